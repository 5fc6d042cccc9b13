"""A device and models by a text, `gpu:model=13b,gpu=h100,gpus=8,total=64`: the costs of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from hybridrl.config import ConfigError
from hybridrl.costs.devices import ACCELERATORS, MODELS, Accelerator
from hybridrl.costs.fused_plans import Layouts, can_share_a_plan, updates_s
from hybridrl.costs.instance import Costs
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import (
    ACTOR,
    GenLayout,
    PlannedRole,
    SampleLength,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.model import CostModel, SampleLengths
from hybridrl.costs.model_shape import ModelShape

_PER_NODE = 8
_BYTES = 2  # bfloat16 weights and cache
_USUAL = SampleLength(256, 768)  # of forward passes and updates


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a text of `read_roofline` names."""

    trained: Mapping[str, ModelShape]
    """The actor, and the critic if there is one."""
    accelerator: Accelerator
    gpus: int
    """GPUs of an instance."""
    total: int
    pp: Mapping[str, int]
    """Pipeline stages of each trained role, where the text has them."""
    tp: int
    """Tensor-parallel ranks of the trained roles."""
    mini_batches: int
    train_times: int = 1
    """Updates take so many times what their roofline says."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the actor's weights in generation."""
        return self.trained[ACTOR].parameters * _BYTES

    @classmethod
    def of(cls, text: str, gpus: int = 8, total: int = 64) -> "Roofline":
        """Raises `ConfigError`; `gpus` and `total` hold where the text has none."""
        allowed = (
            "gpu:model=MODEL[,critic=MODEL][,gpu=GPU][,gpus=N][,total=N][,train_times=N] with "
            f"MODEL one of {', '.join(MODELS)}, GPU one of {', '.join(ACCELERATORS)}; with a "
            "critic also [,pp=N][,critic_pp=N][,tp=N][,mini_batches=N], without train_times"
        )
        settings = dict(
            item.split("=", 1) for item in text.removeprefix("gpu:").split(",") if "=" in item
        )
        name, critic = settings.pop("model", ""), settings.pop("critic", None)
        gpu = settings.pop("gpu", "h100")
        numbers = {"gpus": str(gpus), "total": str(total), "train_times": "1"}
        if critic is not None:
            pp = settings.get("pp", "1")
            numbers |= {"pp": pp, "critic_pp": pp, "tp": "1", "mini_batches": "1"}
        has_pipelines = not {"pp", "critic_pp"}.isdisjoint(settings)
        numbers = {key: settings.pop(key, default) for key, default in numbers.items()}
        known = name in MODELS and gpu in ACCELERATORS and (critic is None or critic in MODELS)
        known = known and not (has_pipelines and numbers["train_times"] != "1")
        if not known or settings or not all(n.isdecimal() and int(n) for n in numbers.values()):
            raise ConfigError("--costs", text, allowed)
        sizes = {key: int(number) for key, number in numbers.items()}
        if sizes["total"] % sizes["gpus"]:
            raise ConfigError("--costs", text, "a total that is a multiple of gpus")
        for heads in (MODELS[name].heads, MODELS[name].kv_heads):
            if sizes["gpus"] > heads and sizes["gpus"] % heads:
                allowed = f"at most {heads} gpus, or a multiple: the heads of the model"
                raise ConfigError("--costs", text, allowed)
        trained = {"actor": MODELS[name]} | ({"critic": MODELS[critic]} if critic else {})
        return cls(
            trained=trained,
            accelerator=ACCELERATORS[gpu],
            gpus=sizes["gpus"],
            total=sizes["total"],
            pp={"actor": sizes["pp"], "critic": sizes["critic_pp"]} if has_pipelines else {},
            tp=sizes.get("tp", 1),
            mini_batches=sizes.get("mini_batches", 1),
            train_times=sizes["train_times"],
        )


def layouts_of(named: Roofline, micro_batch_tokens: int) -> dict[str, TrainLayout]:
    """The layouts of a text with `pp`, on all of its ranks; by role.

    Raises ValueError where they do not divide the ranks.
    """
    layouts = {}
    for role, pp in named.pp.items():
        shards, rest = divmod(named.total, pp * named.tp)
        if rest:
            raise ValueError(f"pp x tp = {pp} x {named.tp} of {named.total} ranks")
        layouts[role] = TrainLayout(
            pp=pp, fsdp=shards, tp=named.tp, micro_batch_tokens=micro_batch_tokens
        )
    return layouts


def roles_of(named: Roofline) -> list[PlannedRole]:
    """The trained roles of a text, the actor first."""
    return [
        PlannedRole(name=name, shape=shape, trained=True, value_head=name != ACTOR)
        for name, shape in named.trained.items()
    ]


def with_pipelines(
    costs: Costs,
    accelerator: Accelerator,
    roles: Sequence[PlannedRole],
    layouts: Layouts,
    samples: SampleLengths,
    *,
    mini_batches: int = 1,
    epochs: int = 1,
) -> Costs:
    """`costs` with `train_token_s` and `fused_train_token_s` of these layouts, one or more with pp.

    All layouts are of the same ranks. The latter are 0 where the roles cannot share a plan. Raises
    ValueError for layouts that split neither layers nor heads evenly.
    """
    for role in roles:
        shape, layout = role.shape, layouts[role.name]
        if shape.heads % layout.tp or layout.chunks > shape.layers:
            sizes = f"{shape.heads} heads and {shape.layers} layers"
            raise ValueError(f"{sizes} of {role.name} on tp {layout.tp} and {layout.chunks} chunks")
    ranks = range(layouts[roles[0].name].ranks)
    model = _model_of(accelerator, len(ranks))

    def seconds(*together: PlannedRole) -> float:
        return updates_s(
            model, together, layouts, ranks, samples, mini_batches=mini_batches, epochs=epochs
        )

    apart = sum(seconds(role) for role in roles)
    fused = seconds(*roles) if can_share_a_plan(roles, layouts) else 0.0
    tokens = sum(sample.tokens for sample in samples)
    return replace(costs, train_token_s=apart / tokens, fused_train_token_s=fused / tokens)


def samples_held(
    actor: ModelShape, accelerator: Accelerator, gpus: int, tokens_per_sample: int
) -> int:
    """Samples whose cache fits an instance with the weights, in nine tenths of its memory."""
    free = 0.9 * accelerator.memory_bytes * gpus - actor.parameters * _BYTES
    return int(free // (actor.kv_bytes * tokens_per_sample))


def read_roofline(
    text: str, gpus: int = 8, total: int = 64, widths: Sequence[int] = ()
) -> tuple[Costs, int, ModelShape, Accelerator, int]:
    """`gpu:model=13b[,critic=33b][,gpu=h100][,gpus=8][,total=256]`: costs and instances of it.

    `gpus` and `total` hold where the text has none. With `widths` also costs of so many instances
    as one.

    Also the actor, the accelerator and the number of them in an instance. With a critic there is a
    reward model of its size too (PPO), else only the reference. `train_times=6` makes updates six
    times as long. Pipelines that the text has change nothing here: see `with_pipelines`. Raises
    `ConfigError`.
    """
    named = Roofline.of(text, gpus, total)
    actor, critic = named.trained["actor"], named.trained.get("critic")
    model, ranks = _model_of(named.accelerator, named.total), range(named.total)
    home = PlannedRole(name=ACTOR, shape=actor, trained=True)
    gen = GenLayout(tp=named.gpus)
    forward = {"reference": actor} | ({"reward": critic, "critic": critic} if critic else {})
    trained = {name: TrainLayout(fsdp=named.total) for name in named.trained}
    apart = _train_token_s(model, named, trained)
    # A step of a wide instance is that of one with as much tensor parallelism.
    wide = {
        width: model.generation(home, GenLayout(tp=width * named.gpus), ranks).step_s
        for width in widths
    }
    costs = replace(
        model.generation(home, gen, ranks),
        token_s={name: _token_s(model, shape, gen, ranks) for name, shape in forward.items()},
        train_token_s=apart,
        switch_s=model.switch_s(home, trained[ACTOR], gen, ranks),
        wide_step_s=wide,
    )
    return costs, named.total // named.gpus, actor, named.accelerator, named.gpus


@lru_cache(16)
def _model_of(accelerator: Accelerator, ranks: int) -> CostModel:
    """The cost model of so many accelerators, eight in a node where they fill nodes."""
    per_node = gcd(ranks, _PER_NODE)
    cluster = cluster_of(accelerator, ranks // per_node, per_node)
    return CostModel(LayerCosts.of(accelerator), cluster)


def _token_s(model: CostModel, shape: ModelShape, gen: GenLayout, ranks: range) -> float:
    """Seconds a token of a forward pass of a copy that has generation's layout."""
    role = PlannedRole(name="scorer", shape=shape)
    return model.score_s(role, gen, ranks, [_USUAL] * 8) / (8 * _USUAL.tokens)


def _train_token_s(model: CostModel, named: Roofline, layouts: Layouts) -> float:
    """Seconds a token of the updates of all trained models, one after the other."""
    samples = [_USUAL] * 8 * named.total
    ranks = range(named.total)
    seconds = sum(
        model.update_s(role, layouts[role.name], ranks, samples) for role in roles_of(named)
    )
    return named.train_times * seconds / sum(sample.tokens for sample in samples)
