"""What a rank adds up in an update, row by row, besides the gradient."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.algorithms.normalize import token_weights
from hybridrl.config.loss import Loss
from hybridrl.engines.train.comparison import compare_row
from hybridrl.engines.train.fsdp_versions import parameter_groups
from hybridrl.engines.train.gathering import fsdp_modules
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedBatch, loss_inputs, scored_fields
from hybridrl.engines.train.replica import MicroBatches, UpdateTotals

_LONGEST = 3  # of `UpdateTotals`: a maximum, the others are sums


@dataclass(slots=True)
class UpdateSums:
    """Sums of an update over this rank's rows, also those trained before the others were there.

    `sums` are those of the loss and its metrics, `compared` the figures of `comparison.compare_row`
    of each row. `counts` [5] are the fields of `UpdateTotals`, of the early rows alone. `real`
    tokens of sequences make up the `computed` ones of their rows.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    compared: list[torch.Tensor] = field(default_factory=list)
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.int64))
    real: int = 0
    computed: int = 0

    def joined(self, counts: torch.Tensor) -> torch.Tensor:
        """The `counts` [5] of further sequences and of these together."""
        own = self.counts.to(counts)
        total = own + counts
        total[_LONGEST] = torch.maximum(own[_LONGEST], counts[_LONGEST])
        return total

    def add_padding(
        self, sequences: Sequence[TrainSequence], batches: Sequence[PackedBatch]
    ) -> None:
        """Count the tokens of sequences, and of the rows that they were packed into."""
        rows = [row for batch in batches for row in batch.passes or (batch,)]
        self.real += sum(len(sequence.ids) for sequence in sequences)
        self.computed += sum(row.ids.numel() for row in rows)


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """An update whose rows are packed: what forward and backward read, and then the step.

    `finish` gives the loss of a row by its number. The gradient and `sums` are to be multiplied by
    `factor`.
    """

    sequences: Sequence[TrainSequence]
    batches: Sequence[PackedBatch]
    loss: Loss[torch.Tensor]
    totals: UpdateTotals
    compare: Mapping[str, str]
    sums: UpdateSums
    finish: Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor]
    factor: float


def row_loss(
    micros: MicroBatches,
    batches: Sequence[PackedBatch],
    loss: Loss[torch.Tensor],
    totals: tuple[int, int, int],
    compare: Mapping[str, str],
    into: UpdateSums,
) -> Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """The loss [] of row number i, from its scores; its metrics are added to `into`.

    `totals` are tokens, sequences and the longest response, by which tokens are weighted.
    """

    def finish(number: int, scores: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        batch, members = batches[number], [micros.sequences[i] for i in micros.parts[number]]
        log_probs, fields = loss_inputs(members, batch, loss, scores)
        values, metrics = loss(log_probs, entropy if loss.needs_entropy else None, fields)
        weights = token_weights(batch.counts, loss.normalize, *totals).to(values)
        total = (weights * values).sum()
        named = metrics if entropy is None else {**metrics, "entropy": entropy}
        weighted = {name: (weights * value.detach()).sum() for name, value in named.items()}
        for name, value in {
            **weighted,
            "loss": total.detach(),
            "weight": weights.sum(),
        }.items():
            if batch.num_ranks > 1:  # each of them computes the loss of the whole row
                value = value / batch.num_ranks
            into.sums[name] = into.sums[name] + value if name in into.sums else value
        if compare:
            others = scored_fields(members, batch, tuple(compare), missing=math.nan)
            figures = [compare_row(log_probs, x, batch) for x in others.values()]
            into.compared.append(torch.stack(figures))
        return total

    return finish


def averages(
    own_square: torch.Tensor, sums: Mapping[str, torch.Tensor], factor: float, sharers: int
) -> tuple[float, dict[str, float]]:
    """The sum of `own_square` over ranks; the loss, and metrics averaged by weight. Collective.

    `sums` are those of a rank's rows (`row_loss`), to be multiplied by `factor`. So many `sharers`
    have the same sums.
    """
    names = sorted(sums)
    # A value that is not finite on one rank is not finite in the sum over ranks.
    each = [factor * sums[name].double() / sharers for name in names]
    values = torch.stack([own_square, *each])
    dist.all_reduce(values)
    square, *totals = values.tolist()
    metrics = dict(zip(names, totals, strict=True))
    weight = metrics.pop("weight")
    return square, {k: v if k == "loss" else v / weight for k, v in metrics.items()}


def forget_early_gradients(roots: Sequence[nn.Module]) -> None:
    """Drop the gradients that FSDP keeps until it next sums over replicas."""
    for module in fsdp_modules(roots):
        for group in parameter_groups(module._get_fsdp_state()):
            group._partial_reduce_output = None
