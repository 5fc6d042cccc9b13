"""The setting of `make bench-plan-search`, that of HybridFlow (arXiv 2409.19256, section 8).

Nodes of 8 A100 with 80 GB, 200 Gb/s a GPU between nodes. PPO whose four roles have 13B each. A step
has 1,024 prompts of 1,024 tokens with a response of 1,024 tokens each. Assumed: one epoch of eight
mini-batches, and the efficiency of kernels and links, which is that of `costs/layers.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

from transformers import AutoConfig

from hybridrl.config import ScheduleConfig, SerialScheduleConfig, compose
from hybridrl.costs.devices import ACCELERATORS, MODELS
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import ACTOR, PlannedRole, cluster_of
from hybridrl.costs.memory import GIB
from hybridrl.costs.model import CostModel
from hybridrl.flow.workload import Group, Shape, Workload, read_workload
from hybridrl.plan.mapping_price import MappingPrices
from hybridrl.plan.mapping_search import MappingResults, MappingSearch
from hybridrl.plan.search_space import Pools, SearchSpace
from hybridrl.preflight.mapping_memory import MappingMemory
from hybridrl.preflight.memory_plan import gpu_room
from hybridrl.preflight.prepare import build_recipe
from hybridrl.workers.emulation import llama_config

_PROMPTS, _PROMPT, _RESPONSE, _MINI_BATCHES = 1024, 1024, 1024, 8
_PER_NODE, _CAPACITY = 8, 80 * GIB
_RUN = (
    *("recipe=ppo", "recipe.num_samples=1", "cluster.device=cuda", "model.attention=flash"),
    *(f"trainer.prompts_per_step={_PROMPTS}", f"trainer.mini_batches={_MINI_BATCHES}"),
    *(f"data.max_prompt_tokens={_PROMPT}", f"rollout.max_new_tokens={_RESPONSE}"),
)
_WORKLOAD = Workload(tuple(Group(_PROMPT, (_RESPONSE,)) for _ in range(_PROMPTS)), _PROMPTS, 1)
_SERIAL = (SerialScheduleConfig(),)

PLACEMENTS: dict[str, Pools] = {
    "colocate": {"actor": ("actor", "critic", "reference", "reward")},
    "split": {"actor": ("actor", "reference"), "critic": ("critic", "reward")},
    "standalone": {name: (name,) for name in ("actor", "critic", "reference", "reward")},
}


def all_placements(
    gpus: int,
    number: int = 1,
    *,
    schedules: Sequence[ScheduleConfig] = _SERIAL,
    workload: Workload = _WORKLOAD,
    fuses: bool = False,
    placement: str | None = None,
) -> MappingResults:
    """13B models under all 15 partitions into pools: what a search takes, in `seconds`.

    For the best `number` of mappings. `fuses` adds updates in one plan, with layouts that pay only
    together. `placement` is one of `PLACEMENTS` in place of all.
    """
    allowed = None if placement is None else [PLACEMENTS[placement]]
    search = _search(gpus, allowed, schedules, workload, fuses=fuses)
    return search.run(number, budget_s=600.0)


def long_tailed() -> Workload:
    """The workload with responses up to eight times the median."""
    lengths = f"lognormal:median={_RESPONSE // 8},sigma=0.894"
    shape = Shape(
        prompts_per_step=_PROMPTS,
        group_size=1,
        num_steps=1,
        prompt_tokens=_PROMPT,
        max_tokens=_RESPONSE,
    )
    workload = read_workload(lengths, shape)
    return replace(workload, groups=workload.groups[:_PROMPTS])


def _search(
    gpus: int,
    allowed: Sequence[Pools] | None,
    schedules: Sequence[ScheduleConfig],
    workload: Workload,
    *,
    fuses: bool,
) -> MappingSearch:
    """The search among the `allowed` placements; None: among all."""
    accelerator, shape = ACCELERATORS["a100"], MODELS["13b"]
    roles = [
        PlannedRole(name=ACTOR, shape=shape, trained=True),
        PlannedRole(name="critic", shape=shape, trained=True, passes=("values",), value_head=True),
        PlannedRole(name="reference", shape=shape, passes=("reference",)),
        PlannedRole(name="reward", shape=shape, passes=("reward",), value_head=True),
    ]
    cluster = cluster_of(accelerator, gpus // _PER_NODE, _PER_NODE)
    compose.register()
    config = compose.check([*_RUN, f"cluster.ranks={gpus}"])
    config.resolve_device(gpus, "the planned cluster")
    model = AutoConfig.for_model(**llama_config(shape, _PROMPT + _RESPONSE))
    shapes = {role.name: model for role in roles}
    memory = MappingMemory(config, build_recipe(config.recipe), shapes, gpu_room(_CAPACITY))
    prices = MappingPrices(
        CostModel(LayerCosts.of(accelerator), cluster),
        memory,
        roles,
        workload,
        mini_batches=_MINI_BATCHES,
    )

    def pools(partition: Sequence[Sequence[str]]) -> Pools | None:
        if allowed is None:
            return {names[0]: tuple(names) for names in partition}
        sets = {frozenset(names) for names in partition}
        same = (one for one in allowed if {frozenset(names) for names in one.values()} == sets)
        return next(same, None)

    space = SearchSpace(
        pools=pools,
        schedules=schedules,
        micro_batch_tokens=(4096, 8192, 16_384),
        fuses=fuses,
    )
    return MappingSearch(roles, prices, memory, gpus, space)
