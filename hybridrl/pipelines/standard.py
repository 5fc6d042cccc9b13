"""The known schedules of one model as plans: 1F1B, interleaved, zero-bubble; what an engine runs.

They are the lists of torch's `Schedule1F1B`, `ScheduleInterleaved1F1B` and `ScheduleZBVZeroBubble`
(torch.distributed.pipelining), as tests/pipelines/test_standard.py asserts.
"""

from collections import Counter
from dataclasses import replace

from hybridrl.pipelines.problem import PassKind, PipelineAction, PipelinedModel, PipelinePlan

FORWARD, BACKWARD = PassKind.forward, PassKind.backward
INPUT, WEIGHTS = PassKind.backward_input, PassKind.backward_weights


class _ActionList:
    """Actions of one rank. Each pass takes the next micro-batch of its chunk and kind."""

    def __init__(self, most: int) -> None:
        self.most, self.actions = most, list[PipelineAction]()
        self._next = Counter[tuple[PassKind, int]]()

    def add(self, kind: PassKind, chunk: int) -> None:
        """Append a pass; those after the last micro-batch only count."""
        number = self.count(kind, chunk)
        if number < self.most:
            self.actions.append(PipelineAction(0, kind, chunk, number))
        self._next[kind, chunk] += 1

    def count(self, kind: PassKind, chunk: int) -> int:
        """How many there are."""
        return self._next[kind, chunk]


def standard_plan(model: PipelinedModel, schedule: str) -> PipelinePlan:
    """The plan of a model by the name of its schedule: `one_f_one_b` or another of this module.

    Its chunks may be on the ranks of the schedule, or on the same reversed. A model without
    backward passes has one chunk of a rank after the other.
    """
    if not model.backward:
        return forward_only(model)
    if len(model.ranks) == 1:
        return one_f_one_b(model)
    if model.ranks[0] == 0:
        return _PLANS[schedule](model)
    last = max(model.ranks)
    mirrored = replace(model, ranks=tuple(last - rank for rank in model.ranks))
    return _PLANS[schedule](mirrored)[::-1]


def least_micro_batches(schedule: str, num_ranks: int, least: int) -> int:
    """The smallest number from `least` on that a schedule can have."""
    multiple = num_ranks if schedule == "interleaved" else 1
    return max(1, -(-least // multiple)) * multiple


def forward_only(model: PipelinedModel) -> PipelinePlan:
    """All micro-batches through one chunk of a rank, then through its next one."""
    plan: list[list[PipelineAction]] = [[] for _ in range(max(model.ranks) + 1)]
    for chunk, rank in enumerate(model.ranks):
        for number in range(len(model.costs)):
            plan[rank].append(PipelineAction(0, FORWARD, chunk, number))
    return plan


def one_f_one_b(model: PipelinedModel) -> PipelinePlan:
    """1F1B of one chunk a rank (PipeDream-Flush, arXiv 2006.09503), in the order of the ranks.

    A rank starts as many forward passes as there are chunks from its own on, then alternates.
    Example: `one_f_one_b(model)[0]` is F0.0 F0.1 B0.0 B0.1 of two chunks and two micro-batches.
    """
    num_chunks, most = len(model.ranks), len(model.costs)
    plan: list[list[PipelineAction]] = [[] for _ in range(max(model.ranks) + 1)]
    for chunk, rank in enumerate(model.ranks):
        assert not plan[rank], f"rank {rank} has two chunks"
        own = _ActionList(most)
        for _ in range(min(most, num_chunks - chunk)):
            own.add(FORWARD, chunk)
        while own.count(BACKWARD, chunk) < most:
            own.add(BACKWARD, chunk)
            if own.count(FORWARD, chunk) < most:
                own.add(FORWARD, chunk)
        plan[rank] = own.actions
    return plan


def interleaved(model: PipelinedModel) -> PipelinePlan:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): chunk c on rank c mod p.

    Rounds of p micro-batches pass one chunk of the rank after the other. The number of
    micro-batches divides by that of its rounds.
    """
    num_ranks, most = max(model.ranks) + 1, len(model.costs)
    own_chunks = len(model.ranks) // num_ranks
    assert model.ranks == tuple(range(num_ranks)) * own_chunks, model.ranks
    rounds = max(1, most // num_ranks)
    assert most % rounds == 0, (most, rounds)
    size = most // rounds  # micro-batches of a round

    def of_rank(rank: int) -> list[PipelineAction]:
        total = own_chunks * most
        warm_up = min((own_chunks - 1) * size + 2 * (num_ranks - 1 - rank), total)
        own = _ActionList(most)
        for step in range(total + warm_up):
            if step < total:
                own.add(FORWARD, step // size % own_chunks * num_ranks + rank)
            if step >= warm_up:
                place = own_chunks - 1 - (step - warm_up) // size % own_chunks
                own.add(BACKWARD, place * num_ranks + rank)
        return own.actions

    return [of_rank(rank) for rank in range(num_ranks)]


def zero_bubble(model: PipelinedModel) -> PipelinePlan:
    """ZB-V (arXiv 2401.10241, section 6): two chunks a rank, there and back, in halves."""
    num_ranks, most = len(model.ranks) // 2, len(model.costs)
    there = tuple(range(num_ranks))
    assert model.ranks == there + there[::-1], model.ranks
    return [_zero_bubble_rank(rank, num_ranks, most) for rank in there]


def _zero_bubble_rank(rank: int, num_ranks: int, most: int) -> list[PipelineAction]:
    first, second = rank, 2 * num_ranks - 1 - rank
    own = _ActionList(most)
    # As many as fill the pipeline; those above `most` are left out of the list.
    filling = max(2 * num_ranks - 1, most)

    def both_halves(chunk: int) -> None:
        own.add(INPUT, chunk)
        own.add(WEIGHTS, chunk)

    # Warm-up.
    for _ in range(2 * (num_ranks - rank) - 1):
        own.add(FORWARD, first)
    for _ in range(rank):
        own.add(FORWARD, second)
        own.add(FORWARD, first)
    for _ in range(num_ranks - rank):
        own.add(FORWARD, second)
        both_halves(second)
    # Every chunk forward and backward.
    while own.count(FORWARD, second) < max(filling, own.count(FORWARD, first)):
        if own.count(FORWARD, first) < filling:
            own.add(FORWARD, first)
        both_halves(first)
        own.add(FORWARD, second)
        both_halves(second)
    # Cool-down: the halves for the weights last, where nothing waits for them.
    for _ in range(rank):
        own.add(INPUT, first)
        own.add(INPUT, second)
    for _ in range(num_ranks - rank):
        both_halves(first)
    for chunk in (second, first):
        while own.count(WEIGHTS, chunk) < own.count(INPUT, chunk):
            own.add(WEIGHTS, chunk)
    return own.actions


_PLANS = {"one_f_one_b": one_f_one_b, "interleaved": interleaved, "zero_bubble": zero_bubble}
