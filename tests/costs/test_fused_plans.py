"""Seconds of several roles in one plan: against the search, against all ranks as one problem."""

import itertools
import random
from dataclasses import replace

import pytest

from hybridrl.costs.devices import ACCELERATORS, MODELS
from hybridrl.costs.fused_plans import (
    OVER_BOUND,
    can_share_a_plan,
    shared_problem,
    shared_score_s,
    shared_update_s,
)
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import (
    PlannedRole,
    SampleLength,
    SampleTotals,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.model import CostModel, even_rows
from hybridrl.pipelines.evaluation import lower_bound
from hybridrl.pipelines.problem import PipelinedModel, PipelineProblem
from hybridrl.pipelines.search import search

COSTS = CostModel(
    LayerCosts.of(ACCELERATORS["a100"]), cluster_of(ACCELERATORS["a100"], nodes=2, per_node=8)
)
ACTOR = PlannedRole(name="actor", shape=MODELS["13b"], trained=True)
CRITIC = PlannedRole(name="critic", shape=MODELS["7b"], trained=True, value_head=True)
COST_CRITIC = replace(CRITIC, name="cost_critic")
ROLES = [ACTOR, CRITIC, COST_CRITIC]
DRAW = random.Random(0)
SAMPLES = [SampleLength(64, min(2000, int(DRAW.lognormvariate(6, 0.8)))) for _ in range(48)]


def layouts(*sizes: tuple[int, int, int], tp: int = 2) -> dict[str, TrainLayout]:
    """By role, of pp, replicas and fsdp."""
    return {
        role.name: TrainLayout(pp=pp, replicas=r, fsdp=f, tp=tp, micro_batch_tokens=4096)
        for role, (pp, r, f) in zip(ROLES, sizes, strict=False)
    }


CASES = [
    layouts((4, 1, 2), (4, 1, 2)),
    layouts((8, 1, 1), (4, 2, 1)),
    layouts((4, 1, 2), (2, 2, 2), (2, 1, 4)),
    layouts((2, 1, 4), (4, 1, 2), tp=2),
]


@pytest.mark.parametrize("train", CASES)
@pytest.mark.parametrize("trains", [True, False])
def test_plans_are_found_near_the_bound(train: dict[str, TrainLayout], trains: bool) -> None:
    """Measured: 1.000 to 1.017 after one round."""
    roles = ROLES[: len(train)]
    problem = shared_problem(COSTS, roles, train, range(16), SAMPLES, trains)
    seconds = search(problem, rounds=1).times.seconds
    assert lower_bound(problem) <= seconds * (1 + 1e-9)
    assert seconds <= OVER_BOUND * lower_bound(problem)


@pytest.mark.parametrize("train", CASES)
def test_ranks_that_do_not_meet_are_problems_of_their_own(train: dict[str, TrainLayout]) -> None:
    """The one with most is the bound of all ranks as one problem."""
    roles, models, nbytes = ROLES[: len(train)], list[PipelinedModel](), dict[str, float]()
    for number, role in enumerate(roles):
        layout = train[role.name]
        rows = even_rows(layout, SampleTotals.of(SAMPLES))
        nbytes[role.name] = COSTS.message_bytes(role, layout, rows.work[0])
        (model,) = COSTS.pipeline(role, layout, range(16), rows)[0].models
        for index in range(layout.data_ranks):
            stages = [layout.pp - 1 - s if number % 2 else s for s in model.ranks]
            places = tuple(s * layout.data_ranks + index for s in stages)
            models.append(replace(model, ranks=places))
    problem = shared_problem(COSTS, roles, train, range(16), SAMPLES)
    tp, sends_s = train[roles[0].name].tp, [[0.0] * 8 for _ in range(8)]
    for model in models:
        for a, b in itertools.pairwise(model.ranks):
            seconds = COSTS.cluster.link([tp * a, tp * b]).send_s(nbytes[model.name])
            sends_s[a][b] = sends_s[b][a] = max(sends_s[a][b], seconds)
    whole = PipelineProblem(models=models, num_ranks=8, sends_s=sends_s)
    assert lower_bound(problem) == pytest.approx(lower_bound(whole))


def test_two_equal_pipelines_save_one_ramp() -> None:
    """On two stages r rows, each a forward of 1 and a backward of 2, take 2 (3 r + 3) or 6 r."""
    value = replace(ACTOR, value_head=True)
    roles, train = [value, replace(value, name="critic")], layouts((2, 1, 8), (2, 1, 8), tp=1)
    samples = [SampleLength(2048, 2048)] * 8 * 4
    apart = sum(COSTS.update_s(role, train[role.name], range(16), samples) for role in roles)
    fused = shared_update_s(COSTS, roles, train, range(16), samples)
    assert 1 - fused / apart == pytest.approx(1 / 5, abs=0.04)
    scored = sum(COSTS.score_s(role, train[role.name], range(16), samples) for role in roles)
    together = shared_score_s(COSTS, roles, train, range(16), samples)
    assert 1 - together / scored == pytest.approx(1 / 5, abs=0.04)


@pytest.mark.parametrize(
    ("train", "allowed"),
    [
        (layouts((4, 1, 2), (4, 1, 2)), True),
        (layouts((1, 1, 8), (1, 1, 8)), False),  # nothing is idle
        (layouts((4, 1, 2), (1, 1, 8)), False),  # all weights of 7B would be gathered
        (
            {**layouts((4, 1, 2), (4, 1, 2)), "critic": TrainLayout(pp=4, fsdp=4)},
            False,
        ),  # another tp
        (layouts((4, 1, 2)), False),  # one role
    ],
)
def test_what_can_share_a_plan(train: dict[str, TrainLayout], allowed: bool) -> None:
    assert can_share_a_plan(ROLES[: len(train)], train) is allowed
