"""Layouts of roles that train in one plan: against all pairs, and in the search of a mapping."""

import itertools
from dataclasses import replace

import pytest

from hybridrl.config import ActivationMode, SerialScheduleConfig
from hybridrl.planner.accelerators import ACCELERATORS, MODELS, layer_roofline
from hybridrl.planner.fused_plans import can_share_a_plan
from hybridrl.planner.joint_layouts import NEAR
from hybridrl.planner.links import LinkSpeed
from hybridrl.planner.mapping import ClusterShape, PlannedRole, TrainLayout
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.mapping_memory import MappingMemory, StepLimits
from hybridrl.planner.mapping_price import MappingPrices
from hybridrl.planner.mapping_search import MappingSearch
from hybridrl.planner.memory import GIB
from hybridrl.planner.search_space import SearchSpace
from hybridrl.planner.workload import Shape, read_workload

A100 = ACCELERATORS["a100"]
SETTINGS = ActivationMode.recompute, 8192
LENGTHS = read_workload(
    "lognormal:median=400,p99=2000,max=2000",
    Shape(prompts_per_step=64, group_size=1, num_steps=1, prompt_tokens=256),
)


def searched(
    actor: str, critic: str, gpus: int, network_s: float, mini_batches: int, fuses: bool = True
) -> MappingSearch:
    """PPO of two models on nodes of eight, whose network has so many bytes a second."""
    cluster = ClusterShape(
        nodes=gpus // 8,
        per_node=8,
        accelerator=A100,
        within=LinkSpeed(2e11, 5e-6),
        between=LinkSpeed(network_s, 5e-6),
        host=LinkSpeed(2e10, 5e-6),
    )
    roles = [
        PlannedRole(name="actor", shape=MODELS[actor], trained=True),
        PlannedRole(
            name="critic", shape=MODELS[critic], trained=True, passes=("values",), value_head=True
        ),
    ]
    memory = MappingMemory(
        limits=StepLimits(
            prompt_tokens=256, new_tokens=2000, samples=64, mini_batches=mini_batches
        ),
        capacity=80 * GIB,
        reserved=3 * GIB,
    )
    costs = MappingCosts(layer_roofline(A100), cluster)
    prices = MappingPrices(costs, memory, roles, LENGTHS, mini_batches=mini_batches)
    space = SearchSpace(
        pools=lambda partition: {"actor": ("actor", "critic")} if len(partition) == 1 else None,
        schedules=(SerialScheduleConfig(),),
        micro_batch_tokens=SETTINGS[1:],
        activations=SETTINGS[:1],
        fuses=fuses,
    )
    return MappingSearch(roles, prices, memory, gpus, space)


CASES = [
    ("7b", "7b", 8, 2e10, 4),
    ("13b", "7b", 8, 2e10, 2),
    ("13b", "13b", 16, 2e9, 2),
    ("13b", "7b", 16, 5e9, 1),
]


@pytest.mark.parametrize("case", CASES)
def test_no_pair_is_quicker(case: tuple[str, str, int, float, int]) -> None:
    """Of all pairs of layouts that fit, 58 to 377 here; by `NEAR`, which the search stops at."""
    search = searched(*case)
    roles, ranks = search.roles, range(search.ranks)
    own = [[layout for _, layout in search._sorted(role, ranks, *SETTINGS)] for role in roles]
    pairs = [dict(zip(("actor", "critic"), pair, strict=True)) for pair in itertools.product(*own)]

    def fits(train: dict[str, TrainLayout]) -> bool:
        peaks = (search.memory.train_peak(role, train[role.name]).values() for role in roles)
        return sum(map(sum, peaks)) + search.memory.reserved <= search.memory.capacity

    pairs = [pair for pair in pairs if can_share_a_plan(roles, pair) and fits(pair)]
    seconds = [search.prices.fused_update_s(roles, pair, ranks) for pair in pairs]
    bounds = [
        sum(search.prices.filled_bound_s(role, pair[role.name], ranks) for role in roles)
        for pair in pairs
    ]
    assert all(bound <= own_s for bound, own_s in zip(bounds, seconds, strict=True))
    best, bound = (
        search._joint.best(roles, ranks, *SETTINGS),
        search._joint.bound(roles, ranks, *SETTINGS),
    )
    assert best is not None
    assert bound is not None
    assert best[1] in pairs
    assert bound[0] <= best[0] <= min(seconds) * (1 + NEAR)


def test_a_search_finds_layouts_that_pay_only_together() -> None:
    """Over a slow network: quicker than the best layouts of each role alone, apart or in a plan."""
    case = CASES[2]
    apart, joint = (searched(*case, fuses=fuses).run(1, 600).best[0] for fuses in (False, True))
    assert not apart.mapping.fuses
    assert joint.mapping.fuses
    apart_s = sum(apart.seconds.stages[f"update_{role}"] for role in ("actor", "critic"))
    assert joint.seconds.stages["update_actor"] < 0.9 * apart_s  # measured: 0.88
    search = searched(*case)
    again = search.price(joint.mapping)
    assert again.seconds.step_s == pytest.approx(joint.seconds.step_s)
    alone = search.price(replace(joint.mapping, train=apart.mapping.train))
    fused, alone_s = (one.seconds.stages["update_actor"] for one in (joint, alone))
    assert fused < 0.96 * alone_s  # measured: 0.95


def test_layouts_found_apart_that_win_in_one_plan_have_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no joint layouts are tried; the bounds of separate updates are above their seconds."""
    search = searched("13b", "13b", 16, 5e8, 1)
    monkeypatch.setattr(search._joint, "bound", lambda *args: None)
    best = search.run(8, 600).best
    assert any(one.mapping.fuses for one in best)
    seconds = [one.seconds.step_s for one in best]
    assert seconds == sorted(seconds)
    assert all(one.bound_s <= one.seconds.step_s * (1 + 1e-9) for one in best)


def test_what_does_not_fit_together_is_left_out() -> None:
    """33B and 13B on eight ranks: each fits alone, no pair does."""
    search = searched("33b", "13b", 8, 2e10, 1)
    assert search._joint.best(search.roles, range(8), *SETTINGS) is None
    assert not search.run(1, 600).best[0].mapping.fuses
