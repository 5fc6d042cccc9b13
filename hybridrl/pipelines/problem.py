"""Models in pipelines on the same ranks: their chunks, micro-batches and costs.

A model is cut into chunks, each on one rank; a micro-batch passes them forward and then backward.
Several models may share the ranks, each with chunks in its own order: intra-stage fusion of RLHFuse
(arXiv 2409.13221, section 5). A plan is a list of actions for each rank.

    plan of one model, ranks (0, 1), two micro-batches
    rank 0    F0.0 F0.1 B0.0 B0.1      the first number is the chunk, the second the micro-batch
    rank 1    F1.0 B1.0 F1.1 B1.1

Invariants of a plan, which `evaluate` checks:

- each rank has every pass of its chunks once;
- a chunk takes the passes of a kind in the order of the micro-batches;
- no rank waits for ever;
- no rank keeps more bytes of activations than its limit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class PassKind(StrEnum):
    """A pass of a micro-batch over a chunk."""

    forward = "F"
    backward = "B"
    """The whole backward pass."""
    backward_input = "I"
    """The half that gives the gradient of the chunk's input (Zero Bubble, arXiv 2401.10241)."""
    backward_weights = "W"
    """The half that gives the gradients of the chunk's weights."""


class PipelineAction(NamedTuple):
    """One pass, by the index of its model, its kind, its chunk and its micro-batch."""

    model: int
    kind: PassKind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch} of model {self.model}"


PipelinePlan = Sequence[Sequence[PipelineAction]]
"""Actions by rank, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCosts:
    """Seconds of a micro-batch on a chunk, and the bytes that stay from forward to backward."""

    forward_s: float
    backward_s: float = 0.0
    """The whole backward pass; of a model in halves the half for the input."""
    weights_s: float = 0.0
    """The half for the weights, of a model in halves."""
    kept_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinedModel:
    """A model's chunks and micro-batches.

    Example: the critic of RLHFuse's first problem, in the other direction, on half of the ranks:
    `PipelinedModel.uniform("critic", ranks=(3, 2, 1, 0), micro_batches=16, costs=...)`.
    """

    name: str
    ranks: tuple[int, ...]
    """The rank of each chunk, in the order of the forward pass."""
    costs: Sequence[Sequence[PassCosts]]
    """[micro_batches][chunks]."""
    backward: tuple[PassKind, ...] = (PassKind.backward,)
    """Its backward passes: one, the two halves, or none of a model that only scores."""

    def __post_init__(self) -> None:
        halves = (PassKind.backward_input, PassKind.backward_weights)
        assert self.backward in ((), (PassKind.backward,), halves), self.backward
        for costs in self.costs:
            assert len(costs) == len(self.ranks), (self.name, len(costs), len(self.ranks))

    @classmethod
    def uniform(
        cls,
        name: str,
        *,
        ranks: Sequence[int],
        micro_batches: int,
        costs: PassCosts,
        backward: tuple[PassKind, ...] = (PassKind.backward,),
    ) -> "PipelinedModel":
        """A model whose micro-batches and chunks all cost the same."""
        each = [[costs] * len(ranks)] * micro_batches
        return cls(name=name, ranks=tuple(ranks), costs=each, backward=backward)

    @property
    def kinds(self) -> tuple[PassKind, ...]:
        """All passes of a micro-batch over a chunk, in their order."""
        return (PassKind.forward, *self.backward)

    def seconds(self, kind: PassKind, chunk: int, micro_batch: int) -> float:
        """What one pass takes."""
        costs = self.costs[micro_batch][chunk]
        match kind:
            case PassKind.forward:
                return costs.forward_s
            case PassKind.backward_weights:
                return costs.weights_s
            case _:
                return costs.backward_s

    def kept_bytes(self, chunk: int, micro_batch: int) -> float:
        """What stays until the last backward pass; nothing of a model that only scores."""
        return self.costs[micro_batch][chunk].kept_bytes if self.backward else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineProblem:
    """Models that share ranks, each of which computes one pass at a time."""

    models: Sequence[PipelinedModel]
    num_ranks: int
    limit_bytes: float | Sequence[float] = math.inf
    """The most that a rank may keep of all models: one number, or one by rank."""
    send_s: float = 0.0
    """Between the end of a pass and the next one on another rank."""
    sends_s: Sequence[Sequence[float]] = ()
    """`send_s` by the two ranks, [from][to], where links differ."""

    def __post_init__(self) -> None:
        for model in self.models:
            assert all(0 <= rank < self.num_ranks for rank in model.ranks), model.ranks
        assert len(self.limits) == self.num_ranks, (self.limit_bytes, self.num_ranks)

    @property
    def limits(self) -> tuple[float, ...]:
        """`limit_bytes` by rank."""
        if isinstance(self.limit_bytes, Sequence):
            return tuple(self.limit_bytes)
        return (self.limit_bytes,) * self.num_ranks

    def delay_s(self, source: int, target: int) -> float:
        """Between a pass on one rank and the next one on another, or on the same."""
        if source == target:
            return 0.0
        return self.sends_s[source][target] if self.sends_s else self.send_s

    def actions(self) -> Iterator[PipelineAction]:
        """Every action, by model, kind and chunk in the order of the micro-batches."""
        for index, model in enumerate(self.models):
            for kind in model.kinds:
                for chunk in range(len(model.ranks)):
                    for number in range(len(model.costs)):
                        yield PipelineAction(index, kind, chunk, number)

    def rank(self, action: PipelineAction) -> int:
        """The rank that computes it."""
        return self.models[action.model].ranks[action.chunk]

    def seconds(self, action: PipelineAction) -> float:
        """What it takes."""
        return self.models[action.model].seconds(action.kind, action.chunk, action.micro_batch)

    def needs(self, action: PipelineAction) -> PipelineAction | None:
        """The action whose result it takes, None for the first chunk's forward pass."""
        index, kind, chunk, number = action
        model = self.models[index]
        last = len(model.ranks) - 1
        match kind:
            case PassKind.forward if chunk == 0:
                return None
            case PassKind.forward:
                return PipelineAction(index, kind, chunk - 1, number)
            case PassKind.backward_weights:
                return PipelineAction(index, PassKind.backward_input, chunk, number)
            case _ if chunk == last:
                return PipelineAction(index, PassKind.forward, chunk, number)
            case _:
                return PipelineAction(index, kind, chunk + 1, number)


def side_by_side(ranks: Sequence[int], copies: int) -> list[tuple[int, ...]]:
    """The ranks of a smaller model's copies: RLHFuse's fusion factor (section 5.1).

    Example: ranks (7, ..., 0) and two copies give (7, 6, 5, 4) and (3, 2, 1, 0).
    """
    assert len(ranks) % copies == 0, (len(ranks), copies)
    size = len(ranks) // copies
    return [tuple(ranks[i * size : (i + 1) * size]) for i in range(copies)]
