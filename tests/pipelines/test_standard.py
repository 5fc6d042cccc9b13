"""1F1B, interleaved and zero-bubble lists are torch's, and keep the invariants."""

import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _Action,
)

from hybridrl.pipelines.evaluation import evaluate, lower_bound
from hybridrl.pipelines.problem import (
    PassCosts,
    PassKind,
    PipelineAction,
    PipelinedModel,
    PipelineProblem,
)
from hybridrl.pipelines.standard import interleaved, one_f_one_b, zero_bubble

COSTS = PassCosts(forward_s=1.0, backward_s=2.0, kept_bytes=1.0)
HALVES = (PassKind.backward_input, PassKind.backward_weights)
HALF_COSTS = PassCosts(forward_s=1.0, backward_s=1.0, weights_s=1.0, kept_bytes=1.0)


def _torch_list(actions: Sequence[_Action | None]) -> list[tuple[str, int, int]]:
    words = (re.fullmatch(r"(\d+)([A-Z]+)(\d+)", str(action)) for action in actions if action)
    return [(word[2], int(word[1]), int(word[3])) for word in words if word]


def _own_list(actions: Sequence[PipelineAction]) -> list[tuple[str, int, int]]:
    return [(str(action.kind), action.chunk, action.micro_batch) for action in actions]


@pytest.mark.parametrize(("pp", "rows"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 9)])
def test_1f1b_is_torchs(pp: int, rows: int) -> None:
    model = PipelinedModel.uniform("m", ranks=range(pp), micro_batches=rows, costs=COSTS)
    plan = one_f_one_b(model)
    order = Schedule1F1B._get_pipeline_order(SimpleNamespace(_num_stages=pp, _n_microbatches=rows))
    for rank in range(pp):
        # torch numbers the forward passes of the last rank from 1, where it only draws the list.
        assert [entry[:2] for entry in _own_list(plan[rank])] == [
            entry[:2] for entry in _torch_list(order[rank])
        ]
    times = evaluate(PipelineProblem(models=[model], num_ranks=pp), plan)
    assert times.seconds == (rows + pp - 1) * 3.0  # PipeDream-Flush's formula
    assert times.peak_bytes == tuple(float(min(rows, pp - rank)) for rank in range(pp))


@pytest.mark.parametrize(
    ("pp", "chunks", "rows"), [(2, 1, 4), (2, 2, 2), (2, 2, 6), (4, 2, 8), (4, 3, 4), (2, 2, 3)]
)
def test_interleaved_is_torchs(pp: int, chunks: int, rows: int) -> None:
    model = PipelinedModel.uniform(
        "m", ranks=tuple(range(pp)) * chunks, micro_batches=rows, costs=COSTS
    )
    plan = interleaved(model)
    rounds = max(1, rows // pp)
    own = SimpleNamespace(
        pp_group_size=pp,
        n_local_stages=chunks,
        _n_microbatches=rows,
        microbatches_per_round=rows // rounds,
    )
    for rank in range(pp):
        theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(own, rank)
        assert _own_list(plan[rank]) == _torch_list(theirs)
    evaluate(PipelineProblem(models=[model], num_ranks=pp), plan)


@pytest.mark.parametrize(("pp", "rows"), [(1, 2), (2, 2), (2, 3), (2, 8), (4, 4), (4, 7), (4, 12)])
def test_zero_bubble_is_torchs(pp: int, rows: int) -> None:
    model = PipelinedModel.uniform(
        "m",
        ranks=(*range(pp), *reversed(range(pp))),
        micro_batches=rows,
        costs=HALF_COSTS,
        backward=HALVES,
    )
    plan = zero_bubble(model)
    own = SimpleNamespace(pp_group_size=pp, _n_microbatches=rows, num_stages=2 * pp)
    for rank in range(pp):
        theirs = ScheduleZBVZeroBubble._calculate_single_rank_operations(own, rank)
        assert _own_list(plan[rank]) == _torch_list(theirs)
    problem = PipelineProblem(models=[model], num_ranks=pp)
    times = evaluate(problem, plan)
    assert times.seconds >= lower_bound(problem)
    if rows >= 2 * pp:  # no bubble but at the start: the paper's claim
        assert times.seconds == 6.0 * rows + pp - 1
