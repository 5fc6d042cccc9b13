"""The search for a mapping: against brute force on small clusters, and what does not fit."""

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from transformers import AutoConfig

from hybridrl.config import (
    ActivationMode,
    FusedScheduleConfig,
    PipelineSchedule,
    SerialScheduleConfig,
    compose,
)
from hybridrl.costs.devices import ACCELERATORS
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.links import LinkSpeed
from hybridrl.costs.mapping import (
    ClusterShape,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    TrainLayout,
)
from hybridrl.costs.memory import GIB
from hybridrl.costs.model import CostModel
from hybridrl.costs.model_shape import ModelShape
from hybridrl.flow.workload import Group, Workload
from hybridrl.plan.fitting_layouts import DoesNotFit
from hybridrl.plan.mapping_price import MappingPrices
from hybridrl.plan.mapping_search import TOLERANCE, MappingSearch
from hybridrl.plan.search_space import Pools, SearchSpace, micro_batch_choices, set_partitions
from hybridrl.preflight.mapping_memory import MappingMemory
from hybridrl.preflight.memory_plan import Room
from hybridrl.preflight.prepare import build_recipe
from hybridrl.workers.emulation import llama_config

pytestmark = pytest.mark.long

A100 = ACCELERATORS["a100"]
SMALL = ModelShape(8, 2048, 5632, 16, 8, 32_000)
LARGER = replace(SMALL, layers=16)
"""More than 512 Mi parameters: FSDP gathers them for each micro-batch."""
BIG = ModelShape(80, 8192, 28_672, 64, 8, 32_000)
PROMPT, RESPONSE = 256, 768


def _roles(actor: ModelShape, other: ModelShape, names: Sequence[str]) -> list[PlannedRole]:
    roles = {
        "actor": PlannedRole(name="actor", shape=actor, trained=True),
        "critic": PlannedRole(
            name="critic", shape=other, trained=True, passes=("values",), value_head=True
        ),
        "reference": PlannedRole(name="reference", shape=actor, passes=("reference",)),
        "reward": PlannedRole(name="reward", shape=other, passes=("reward",), value_head=True),
    }
    return [roles[name] for name in names]


def _search(
    roles: Sequence[PlannedRole],
    ranks: int,
    *,
    draw: random.Random | None = None,
    capacity: float = 80.0,
    device: str = "cuda",
    pipelines: Sequence[PipelineSchedule] = (PipelineSchedule.one_f_one_b,),
    activations: Sequence[ActivationMode] = (ActivationMode.keep,),
    together: bool = False,
    allows_train: Callable[[PlannedRole, TrainLayout], bool] = lambda role, layout: True,
) -> MappingSearch:
    """With links and lengths from `draw`, in `capacity` GiB a rank."""
    draw = draw or random.Random(0)
    within, between, host = (LinkSpeed(draw.choice((2e9, 20e9, 200e9)), 5e-6) for _ in range(3))
    cluster = ClusterShape(1, ranks, A100, within, between, host)
    lengths = [tuple(draw.randint(20, RESPONSE) for _ in range(2)) for _ in range(4)]
    compose.register()
    config = compose.check([
        *("recipe=ppo", "recipe.num_samples=2", "trainer.prompts_per_step=4"),
        *(f"data.max_prompt_tokens={PROMPT}", f"rollout.max_new_tokens={RESPONSE}"),
        *("rollout.max_running=8", "model.attention=flash", "model.compute_dtype=bfloat16"),
        *(f"cluster.device={device}", f"cluster.ranks={ranks}"),
    ])  # fmt: skip
    config.resolve_device(ranks, "the planned cluster")
    shapes = {
        role.name: AutoConfig.for_model(**llama_config(role.shape, PROMPT + RESPONSE))
        for role in roles
    }
    room = Room(round(capacity * GIB), 0)
    memory = MappingMemory(config, build_recipe(config.recipe), shapes, room)
    prices = MappingPrices(
        CostModel(LayerCosts.of(A100), cluster),
        memory,
        roles,
        Workload(tuple(Group(PROMPT, one) for one in lengths), 4, 1),
    )

    def pools(partition: Sequence[Sequence[str]]) -> Pools | None:
        if together and len(partition) > 1:
            return None
        return {names[0]: tuple(names) for names in partition}

    space = SearchSpace(
        pools=pools,
        schedules=(SerialScheduleConfig(), FusedScheduleConfig()),
        micro_batch_tokens=(2048,),
        activations=activations,
        pipelines=pipelines,
        allows_train=allows_train,
    )
    return MappingSearch(roles, prices, memory, ranks, space)


# Brute force: every mapping, by the scheduler


def _splits(ranks: int, pools: int) -> Iterator[tuple[int, ...]]:
    sizes = itertools.product(range(1, ranks + 1), repeat=pools)
    return (one for one in sizes if sum(one) == ranks)


def _layouts(search: MappingSearch, role: PlannedRole, ranks: int) -> Iterator[TrainLayout]:
    space, axes = search.space, range(1, ranks + 1)
    for pp, replicas, fsdp, tp in itertools.product(axes, repeat=4):
        if pp * replicas * fsdp * tp != ranks or role.shape.kv_heads % tp:
            continue
        for schedule in space.pipelines if pp > 1 else space.pipelines[:1]:
            for activations in space.activations:
                layout = TrainLayout(
                    pp=pp,
                    replicas=replicas,
                    fsdp=fsdp,
                    tp=tp,
                    schedule=schedule,
                    activations=activations,
                    sequence_parallel=tp > 1,
                    micro_batch_tokens=2048,
                )
                if layout.zigzag and activations is ActivationMode.recompute:
                    continue
                if not space.allows_train(role, layout):
                    continue
                yield layout
                yield search.prices.balanced(role, layout, range(ranks))


def _every_mapping(search: MappingSearch) -> Iterator[DeviceMapping]:
    ranks, roles = search.ranks, {role.name: role for role in search.roles}
    trained = [role.name for role in search.roles if role.trained]
    for partition in set_partitions(list(roles)):
        pools = search.space.pools(partition)
        if pools is None:
            continue
        for sizes in _splits(ranks, len(pools)):
            frame = DeviceMapping(
                pools=pools,
                ranks=dict(zip(pools, sizes, strict=True)),
                train={},
                schedule=SerialScheduleConfig(),
            )
            choices = [
                list(_layouts(search, roles[name], len(frame.ranks_of(name)))) for name in trained
            ]
            for layouts in itertools.product(*choices):
                if len({layout.activations for layout in layouts}) > 1:
                    continue
                for pp, tp in itertools.product(range(1, ranks + 1), repeat=2):
                    scorers = [n for n in roles if n not in trained]
                    if any(len(frame.ranks_of(n)) % (pp * tp) for n in ("actor", *scorers)):
                        continue
                    if SMALL.kv_heads % tp:
                        continue
                    for schedule in search.space.schedules:
                        yield replace(
                            frame,
                            train=dict(zip(trained, layouts, strict=True)),
                            gen=GenLayout(pp=pp, tp=tp),
                            schedule=schedule,
                        )


def _least_s(search: MappingSearch) -> float:
    """The quickest of all mappings that fit."""
    seconds, roles, prices = [], search.roles, search.prices
    for mapping in _every_mapping(search):
        if all(plan.fits for plan in search.memory.plans(roles, mapping).values()):
            seconds.append(prices.replayed(mapping, prices.priced(mapping)).step_s)
    return min(seconds)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(x, marks=pytest.mark.slow) for x in range(2, 6))]
)
def test_the_search_finds_what_brute_force_finds(seed: int) -> None:
    """On two ranks, with three roles, all pipelines, and memory that cuts some layouts."""
    draw = random.Random(seed)
    names = ("actor", "critic", draw.choice(("reference", "reward")))
    other = replace(SMALL, layers=draw.choice((4, 8, 16)))
    search = _search(
        _roles(SMALL, other, names),
        2,
        draw=draw,
        capacity=draw.choice((7.0, 10.0, 80.0)),
        pipelines=tuple(PipelineSchedule),
        activations=(ActivationMode.keep, ActivationMode.recompute),
    )
    least = _least_s(search)
    result = search.run(1)
    assert result.is_complete
    assert least * (1 - 1e-9) <= result.best[0].seconds.step_s <= least * (1 + TOLERANCE)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_on_four_ranks_too(seed: int) -> None:
    draw = random.Random(seed)
    names = ("actor", draw.choice(("reference", "reward")))
    search = _search(_roles(SMALL, SMALL, names), 4, draw=draw)
    least = _least_s(search)
    result = search.run(1)
    assert result.is_complete
    assert least * (1 - 1e-9) <= result.best[0].seconds.step_s <= least * (1 + TOLERANCE)


# What does not fit


@pytest.mark.parametrize(
    ("actor", "other", "names", "role"),
    [
        (SMALL, BIG, ("actor", "reward"), "reward that scores in"),
        (SMALL, BIG, ("actor", "critic"), "critic trained on 2 ranks"),
        (BIG, SMALL, ("actor", "reward"), "actor trained on 2 ranks"),
    ],
)
def test_the_role_that_does_not_fit_is_named(
    actor: ModelShape, other: ModelShape, names: tuple[str, ...], role: str
) -> None:
    """With the memory that is missing, which is above 0."""
    search = _search(_roles(actor, other, names), 2, capacity=40.0)
    with pytest.raises(DoesNotFit) as error:
        search.run(1)
    assert str(error.value).startswith(role)
    missing = re.search(r"on a rank, (-?[\d.]+) GiB more than there is", str(error.value))
    assert missing
    assert float(missing[1]) > 0


def _copies(capacity: float) -> MappingSearch:
    """Actor and critic on two CPUs, by copies or by shards; on CPUs all roles stay."""
    return _search(
        _roles(LARGER, LARGER, ("actor", "critic")),
        2,
        draw=random.Random(3),
        capacity=capacity,
        device="cpu",
        together=True,
        allows_train=lambda role, layout: layout.ranks in (layout.replicas, layout.fsdp),
    )


@pytest.mark.parametrize(("capacity", "replicas"), [(80.0, 2 + 2), (24.0, 1 + 2), (16.0, 1 + 1)])
def test_roles_that_do_not_fit_together_get_other_layouts(capacity: float, replicas: int) -> None:
    """Copies are quickest. With less memory one role is cut, then both."""
    search = _copies(capacity)
    result = search.run(1)
    (best,) = result.best
    assert sum(layout.replicas for layout in best.mapping.train.values()) == replicas
    assert best.seconds.step_s <= _least_s(search) * (1 + TOLERANCE)


def test_without_time_one_mapping_is_replayed() -> None:
    """That which is furthest goes first then, so little more is priced."""
    result = _copies(20.0).run(3, budget_s=0)
    assert (len(result.best), result.num_replayed) == (1, 1)
    assert result.num_priced <= 2
    assert not result.is_complete


def test_without_time_the_first_placement_is_bounded_alone() -> None:
    """All roles in one pool. Of the others nothing is known, so they may take no time."""
    search = _search(_roles(SMALL, SMALL, ("actor", "critic", "reference")), 2)
    result = search.run(3, budget_s=0)
    assert [[*one.mapping.pools] for one in result.best] == [["actor"]]
    assert (result.is_complete, result.rest_s) == (False, 0.0)
    assert search.run(3).is_complete


def test_where_no_layouts_fit_together_the_phase_is_named() -> None:
    """Each role would fit alone."""
    with pytest.raises(DoesNotFit, match="in pool actor, phase train actor, needs"):
        _copies(12.0).run(1)


# Tokens of a micro-batch


@pytest.mark.parametrize(
    ("longest", "samples", "choices"),
    [
        (5120, 512, ([5120], [8192, 16384, 32768])),
        (8192, 512, ([], [8192, 16384, 32768])),
        (2000, 512, ([2048], [4096, 8192, 16384])),
        (200, 512, ([256, 1024], [4096, 8192, 16384])),
        (200, 8, ([256, 1024], [4096])),
        (200, 4, ([256], [1024])),
        (5120, 1, ([], [5120])),
    ],
)
def test_micro_batches_begin_with_the_longest_sample(
    longest: int, samples: int, choices: tuple[list[int], list[int]]
) -> None:
    """Up to four times the next power of two, or to what holds all samples."""
    assert micro_batch_choices(longest, samples) == choices


def test_micro_batches_are_not_below_chunks() -> None:
    """`trainer.chunk_tokens` is at most a micro-batch."""
    assert micro_batch_choices(2000, 512, at_least=6000) == ([6000], [8192, 16384, 32768])


@pytest.mark.parametrize("capacity", [9.0, 12.0, 40.0])
def test_small_micro_batches_are_tried_where_they_may_win(capacity: float) -> None:
    """The result is that of a search that tries all of them alike, in memory that cuts some."""
    roles = _roles(LARGER, LARGER, ("actor", "critic"))
    activations = (ActivationMode.keep, ActivationMode.recompute)
    own = _search(roles, 2, draw=random.Random(5), capacity=capacity, activations=activations)
    alike = replace(own.space, micro_batch_tokens=(1024, 2048, 8192))
    apart = replace(alike, micro_batch_tokens=(8192,), small_micro_batches=(1024, 2048))
    best = []
    for space in (alike, apart):
        search = MappingSearch(roles, own.prices, own.memory, 2, space)
        result = search.run(1, 600)
        assert result.is_complete
        best.append(result.best[0].seconds.step_s)
    assert best[1] == pytest.approx(best[0], rel=TOLERANCE)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_serial_is_priced_at_is_near_its_replay_and_never_above(seed: int) -> None:
    """Prompts are dealt in turn, so that each instance's decoding has a closed form."""
    search = _search(
        _roles(SMALL, SMALL, ("actor", "critic", "reference")), 4, draw=random.Random(seed)
    )
    mappings = [one.mapping for one in search.run(20).best]
    serial = [mapping for mapping in mappings if not mapping.schedule.entry.overlaps]
    assert {mapping.instances for mapping in serial} >= {1, 2}
    for mapping in serial:
        priced = search.prices.priced(mapping)
        replayed = search.prices.replayed(mapping, priced)
        print(f"{mapping.instances} instances: {priced.step_s / replayed.step_s:.4f}")
        assert 0.9 * replayed.step_s < priced.step_s <= replayed.step_s * (1 + 1e-9)
