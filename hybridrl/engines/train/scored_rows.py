"""The rows of a forward-only call of the train engine, and where their scores go."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedBatch
from hybridrl.engines.train.replica import MicroBatches


@dataclass(kw_only=True, slots=True)
class ScoredRows:
    """Rows of a replica, each to be computed once in any order: `TrainEngine.prepare_scores`.

    `finish` takes the scores of a row. On the last pipeline stage `scores` has those of all
    sequences at the end, [response_tokens] each, on CPU.
    """

    sequences: Sequence[TrainSequence]
    """Those of this rank."""
    pooled: Sequence[TrainSequence]
    """Those of all ranks of the replica, of which `own` are this rank's."""
    own: slice
    micros: MicroBatches
    batches: Sequence[PackedBatch]
    """A row for each micro-batch."""
    records_experts: bool = False
    scores: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.scores = [torch.zeros(0)] * len(self.micros.sequences)

    def finish(
        self, number: int, values: torch.Tensor, entropy: torch.Tensor | None
    ) -> torch.Tensor:
        """Take the scores [scored] of a row by its number; gives the loss [] of none, 0."""
        indices, batch = self.micros.parts[number], self.batches[number]
        for position, value in zip(batch.order, values.cpu().split(batch.counts), strict=True):
            if position >= 0:
                self.scores[indices[position]] = value.clone()
        return torch.zeros(())
