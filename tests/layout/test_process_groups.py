"""Process groups of a switch: every member names and orders them alike, whatever else it makes."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridrl.config import TrainLayoutConfig
from hybridrl.config.layout import Grouping
from hybridrl.engines.train.build import TrainDims
from hybridrl.layout.grouping import TrainAxes, gen_positions
from hybridrl.layout.mesh import Mesh, gen_mesh
from hybridrl.layout.parameters import BOTH, LAST, Parameter
from hybridrl.layout.plan import Plan
from hybridrl.layout.process_groups import GroupTimeout, group_name, new_group, shared_group
from hybridrl.layout.switching import plan_switch
from hybridrl.layout.transfer_rounds import _Links, gather_ranks, transfer_rounds
from hybridrl.layout.weight_switch import WeightSwitch
from hybridrl.models.shard import GenParallel

Ranks = Callable[..., list[Any]]
Group = tuple[int, ...]
Layouts = tuple[TrainAxes, int, int, Grouping]
"""Training axes, pp and tp of generation, the order of ranks in generation."""


def dense_model() -> list[Parameter]:
    """Two layers of a dense decoder whose every split is even, norms among them."""
    parameters = [Parameter("embed", (64, 32), BOTH, 0), Parameter("norm", (32,), LAST)]
    for layer in range(2):
        parameters += [
            Parameter(f"{layer}.q", (64, 32), layer, 0, units=16),
            Parameter(f"{layer}.o", (32, 64), layer, 1, units=16),
            Parameter(f"{layer}.norm", (32,), layer),
        ]
    return parameters


def layouts(num_ranks: int) -> Iterator[Layouts]:
    """All of so many ranks, sizes being powers of two, with at most two pipeline stages."""
    sizes = [2**i for i in range(num_ranks.bit_length())]
    for pp, replicas, fsdp, tp in product(sizes, repeat=4):
        axes = TrainAxes(pp, replicas, fsdp, tp)
        if axes.ranks != num_ranks or pp > 2:
            continue
        for gen_pp, gen_tp in product(sizes, repeat=2):
            if gen_pp <= 2 and num_ranks % (gen_pp * gen_tp) == 0:
                for order in (Grouping.strided, Grouping.vanilla):
                    yield axes, gen_pp, gen_tp, order


def planned(axes: TrainAxes, gen_pp: int, gen_tp: int, order: Grouping) -> Plan:
    return plan_switch(dense_model(), axes, gen_pp, gen_tp, order).plan


def groups_in_order(plan: Plan, rank: int) -> list[Group]:
    """The groups that a rank makes, in its order."""
    return list(
        dict.fromkeys(gather.ranks for gather in transfer_rounds(plan, rank, 2**24).gathers)
    )


def groups_of_all(plan: Plan) -> list[list[Group]]:
    """Return the groups that each rank makes, without the rest of the schedules."""
    links = [_Links(cls, plan.num_ranks, least_group=3) for cls in plan.classes]
    by_rank = [
        {link.group_of[r] for link in links if r in link.group_of} for r in plan.src.mesh.ranks
    ]
    return [sorted(groups) for groups in by_rank]


def named_differently(
    groups_by_rank: Sequence[Sequence[Group]], name: Callable[[Group, int], str]
) -> bool:
    """Whether two members name a group differently; `name` is given a group and its number."""
    names: dict[Group, set[str]] = defaultdict(set)
    for groups in groups_by_rank:
        for number, group in enumerate(groups):
            names[group].add(name(group, number))
    return any(len(names) > 1 for names in names.values())


def all_come_up(groups_by_rank: Sequence[Sequence[Group]]) -> bool:
    """Whether ranks that wait in each group for all of its members get to the end."""
    todo = [list(groups) for groups in groups_by_rank]
    while ready := {
        groups[0] for groups in todo if groups and all(todo[r][:1] == groups[:1] for r in groups[0])
    }:
        todo = [groups[1:] if groups and groups[0] in ready else groups for groups in todo]
    return not any(todo)


def torchs_own_name(ranks: Group, number: int) -> str:
    """As `new_group(use_local_synchronization=True)` builds it: by all groups made so far."""
    return f"{ranks} {number}"


@pytest.fixture(scope="module", params=[8, pytest.param(16, marks=pytest.mark.slow)])
def every_layout(request: pytest.FixtureRequest) -> dict[Layouts, list[list[Group]]]:
    """The groups that each rank makes, for every layout of up to 8 or 16 ranks."""
    sizes = [size for size in (1, 2, 4, 8, 16) if size <= request.param]
    return {at: groups_of_all(planned(*at)) for size in sizes for at in layouts(size)}


def num_ranks(every_layout: dict[Layouts, list[list[Group]]]) -> int:
    """Return the number of ranks of the largest layouts."""
    return max(axes.ranks for axes, *_ in every_layout)


def hanging(every_layout: dict[Layouts, list[list[Group]]]) -> list[Layouts]:
    """The layouts whose switch hangs under torch's own names."""
    return [
        at
        for at, groups_by_rank in every_layout.items()
        if named_differently(groups_by_rank, torchs_own_name)
    ]


@pytest.mark.long
def test_members_name_every_group_alike_and_none_waits_indefinitely(
    every_layout: dict[Layouts, list[list[Group]]],
) -> None:
    for layout, groups_by_rank in every_layout.items():
        for rank, groups in enumerate(groups_by_rank):
            assert len(groups) == len(set(groups)), (layout, rank)  # so each is its ranks' first
            assert all(rank in group for group in groups), (layout, rank)
        assert not named_differently(groups_by_rank, lambda ranks, _: group_name(ranks, 0)), layout
        assert all_come_up(groups_by_rank), layout


def test_the_groups_are_those_of_the_schedules(
    every_layout: dict[Layouts, list[list[Group]]],
) -> None:
    for at in hanging(every_layout):
        plan = planned(*at)
        for rank in range(plan.num_ranks):
            assert every_layout[at][rank] == groups_in_order(plan, rank), (at, rank)
            assert every_layout[at][rank] == gather_ranks(plan, rank), (at, rank)


def test_the_same_check_finds_what_hung(every_layout: dict[Layouts, list[list[Group]]]) -> None:
    """Under torch's own names 7 layouts hang; FSDP over 8 ranks to tp 2 is the smallest."""
    hung = hanging(every_layout)
    assert len(hung) == {8: 1, 16: 7}[num_ranks(every_layout)]
    assert hung[0] == (TrainAxes(fsdp=8), 1, 2, Grouping.strided)
    crossed = [[(0, 1, 2), (1, 2, 3)], [(1, 2, 3), (0, 1, 2)], [(0, 1, 2), (1, 2, 3)], [(1, 2, 3)]]
    assert not all_come_up(crossed)


def switched(at: Layouts) -> None:
    """One switch on this rank, every element compared with the whole parameter's."""
    plan, rank = planned(*at), dist.get_rank()
    whole = {name: torch.rand(shape) for name, shape in plan.src.shapes.items()}
    for tensor in whole.values():
        dist.broadcast(tensor, 0)

    def own(layout: Any) -> dict[str, torch.Tensor]:
        boxes = {name: layout.local(name, rank) for name in layout.rules}
        return {name: whole[name][box[0].slices()].clone() for name, box in boxes.items() if box}

    source, wanted = own(plan.src), own(plan.dst)
    destination = {name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}
    WeightSwitch(plan, rank, torch.float32).switch(source, destination)
    for name, tensor in wanted.items():
        assert torch.equal(destination[name], tensor), (at, rank, name)


def all_switched(cases: list[Layouts]) -> None:
    for at in cases:
        switched(at)


def test_layouts_that_hung_switch_bit_for_bit(
    ranks: Ranks, every_layout: dict[Layouts, list[list[Group]]]
) -> None:
    """One after the other in one world, so that groups of the same ranks recur."""
    size = num_ranks(every_layout)
    cases = [at for at in hanging(every_layout) if at[0].ranks == size]
    assert cases
    ranks(size, all_switched, cases)


def lonely() -> str:
    if dist.get_rank() != 1:
        begun = time.monotonic()
        with pytest.raises(GroupTimeout) as raised:
            new_group([0, 1, 2], timeout_s=2)
        assert time.monotonic() - begun < 20
        message = str(raised.value)
    else:
        message = ""
    dist.barrier()
    return message


def test_a_group_that_does_not_come_up_is_named(fresh_ranks: Ranks) -> None:
    first, absent, last = fresh_ranks(3, lonely)
    assert not absent
    line = (
        "process group hybridrl/0_1_2/0 of ranks 0, 1, 2 did not come up in 2 s: rank 1 did not"
        " join"
    )
    assert first == last == line


def groups_of_groups() -> list[str]:
    """Groups of the same ranks, after other groups on some members only."""
    rank = dist.get_rank()
    if rank < 2:
        new_group([0, 1])
    groups = [new_group([0, 1, 2]) for _ in range(2)]
    total = torch.tensor([rank + 1.0])
    for group in groups:
        dist.all_reduce(total, group=group)
    assert total.item() == 18
    assert dist.get_group_rank(groups[0], 2) == 2
    return [group.group_name for group in groups]


def test_groups_of_the_same_ranks_are_told_apart(fresh_ranks: Ranks) -> None:
    names = fresh_ranks(3, groups_of_groups)
    assert names == [["hybridrl/0_1_2/0", "hybridrl/0_1_2/1"]] * 3


def shared_groups() -> list[str]:
    """A group of the same ranks is made once; that of all ranks is the world."""
    assert shared_group([0, 1, 2]) is dist.group.WORLD
    if dist.get_rank() == 1:
        return []
    group = shared_group([0, 2])
    assert shared_group([0, 2]) is group
    other = new_group([0, 2])
    assert shared_group([0, 2]) is group
    return [group.group_name, other.group_name]


def test_a_group_of_the_same_ranks_is_shared(fresh_ranks: Ranks) -> None:
    first, none, last = fresh_ranks(3, shared_groups)
    assert first == last == ["hybridrl/0_2/0", "hybridrl/0_2/1"]
    assert none == []


def test_the_ranks_along_axes_of_a_mesh() -> None:
    mesh = Mesh((("pp", 2), ("fsdp", 2), ("tp", 2)), (7, 6, 5, 4, 3, 2, 1, 0))
    assert mesh.along(7, "pp") == [3, 7]
    assert mesh.along(7, "pp", "tp") == [2, 3, 6, 7]


class CountingStore(FakeStore):
    """A store in which everybody has joined already; counts its calls."""

    calls = 0

    def set(self, *_: Any) -> None:
        self.calls += 1

    wait = set


@pytest.mark.parametrize(
    ("train", "gen", "groups"),
    [
        # Of one rank, fsdp, tp, which is generation's, too.
        (TrainAxes(fsdp=64, tp=8), (1, 8), 3),
        (TrainAxes(replicas=8, fsdp=8, tp=8), (1, 8), 4),
        # Of one rank, pp, fsdp, tp, pp x tp, generation's pp.
        (TrainAxes(pp=8, fsdp=8, tp=8), (2, 8), 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 77, 511])
def test_a_rank_of_512_creates_the_groups_that_it_is_in_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
    train: TrainAxes,
    gen: tuple[int, int],
    groups: int,
    rank: int,
) -> None:
    """torch's own meshes have each rank create the groups of all: 1,048 to 1,744 of them here."""
    created: list[Sequence[int]] = []
    store, create = CountingStore(), distributed_c10d._new_process_group_helper

    def helper(size: int, group_rank: int, ranks: list[int], *args: Any, **settings: Any) -> Any:
        created.append(ranks)
        return create(size, group_rank, ranks, *args, **settings)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=512)
    try:
        monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", helper)
        monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
        sizes = {"pp": train.pp, "replicas": train.replicas, "fsdp": train.fsdp, "tp": train.tp}
        for _ in range(2):  # of the actor and of a value model
            dims = TrainDims.make(TrainLayoutConfig(**sizes), 512, "cpu")
        mesh = gen_mesh(gen_positions(train, *gen, Grouping.strided), *gen)
        parallel = GenParallel.make(mesh, "cpu")
        of_axes = {
            name: dims.mesh.get_group(name).size() for name in dims.mesh.mesh_dim_names or ()
        }
        assert list(of_axes.values()) == list(sizes.values())
        assert dims.replica_group.size() == train.pp * train.tp
        assert parallel.tp_group is not None
        assert sorted(dist.get_process_group_ranks(parallel.tp_group)) == mesh.along(rank, "tp")
    finally:
        dist.destroy_process_group()
    assert len(created) == len({tuple(ranks) for ranks in created}) == groups
    assert all(rank in ranks for ranks in created)
    assert store.calls == 2 * groups


def limits() -> tuple[float, float]:
    """Seconds of the group of all ranks, which is given others than torch's, and of a new one."""
    cpu = torch.device("cpu")
    world = dist.group.WORLD._get_backend(cpu).options
    before, world._timeout = world._timeout, timedelta(seconds=77)
    group = new_group((0, 1))
    world._timeout = before
    return before.total_seconds(), group._get_backend(cpu).options._timeout.total_seconds()


def test_collectives_of_every_group_have_the_time_limit_of_all_ranks(ranks) -> None:
    assert ranks(2, limits) == [(1800.0, 77.0)] * 2
