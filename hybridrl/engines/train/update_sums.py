"""What a rank adds up in an update, row by row, and what the ranks join: sums and gradients."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hybridrl.algorithms import corrections
from hybridrl.algorithms.normalize import token_weights
from hybridrl.config.loss import Loss
from hybridrl.engines.train.build import TrainDims
from hybridrl.engines.train.fsdp_versions import parameter_groups
from hybridrl.engines.train.gathering import fsdp_modules
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedBatch, loss_inputs, scored_fields
from hybridrl.engines.train.replica import MicroBatches, UpdateTotals
from hybridrl.engines.train.rows import RowScored, ScoredRows
from hybridrl.models.stages import Chunk, modules_before

_LONGEST = 3  # of `UpdateTotals`: a maximum, the others are sums


@dataclass(slots=True)
class UpdateSums:
    """Sums of an update over this rank's rows, also those trained before the others were there.

    `sums` are those of the loss and its metrics, `compared` the figures of `compare_row` of each
    row. `counts` [6] are the fields of `UpdateTotals`, of the early rows alone. `real` tokens of
    sequences make up the `computed` ones of their rows; `shared` more are those of prompts that
    rows have once.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    compared: list[torch.Tensor] = field(default_factory=list)
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(6, dtype=torch.int64))
    real: int = 0
    computed: int = 0
    shared: int = 0

    def joined(self, counts: torch.Tensor) -> torch.Tensor:
        """The `counts` [6] of further sequences and of these together."""
        own = self.counts.to(counts)
        total = own + counts
        total[_LONGEST] = torch.maximum(own[_LONGEST], counts[_LONGEST])
        return total

    def add_padding(
        self, sequences: Sequence[TrainSequence], batches: Sequence[PackedBatch]
    ) -> None:
        """Count the tokens of sequences, and of the rows that they were packed into."""
        rows = [row for batch in batches for row in batch.passes or (batch,)]
        shared = sum(batch.num_shared for batch in batches)
        self.shared += shared
        self.real += sum([sequence.ids.shape[0] for sequence in sequences]) - shared
        self.computed += sum(row.ids.numel() for row in rows)


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """An update whose rows are packed: what forward and backward read, and then the step.

    `finish` gives the loss of a row by its number. The gradient and `sums` are to be multiplied by
    `factor`. `scored` has the scores of the rows, where they are kept.
    """

    sequences: Sequence[TrainSequence]
    batches: Sequence[PackedBatch]
    loss: Loss[torch.Tensor]
    totals: UpdateTotals
    compare: Mapping[str, str]
    sums: UpdateSums
    finish: RowScored
    factor: float
    scored: ScoredRows | None = None


def row_loss(
    micros: MicroBatches,
    batches: Sequence[PackedBatch],
    loss: Loss[torch.Tensor],
    totals: tuple[int, int, int],
    compare: Mapping[str, str],
    into: UpdateSums,
) -> RowScored:
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


# Distances from other policies


def compare_row(log_probs: torch.Tensor, others: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Figures [9] of the distance of a row's log-probabilities [scored] from `others`.

    The first of the ranks that share a row counts it, the others count nothing.
    """
    group = batch.packing.group
    if group is not None and group.rank():
        return corrections.compare(log_probs[:0], others[:0], ())
    return corrections.compare(log_probs, others, batch.counts)


def response_distances(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], prefix: str, device: torch.device
) -> dict[str, float]:
    """Metrics of responses, each with log-probabilities [tokens] of both engines. Collective.

    `pairs` have those of the train engine first; each response is on one rank.
    """
    nothing = torch.zeros(0)
    figures = [corrections.compare(nothing, nothing, ())]  # of a rank without a response
    figures += [corrections.compare(own, other, [len(own)]) for own, other in pairs]
    metrics = distance_metrics([one[None] for one in figures], [prefix], device)
    return {name: x for name, x in metrics.items() if name.startswith(f"{prefix}/")}


def distance_metrics(
    micro_batches: list[torch.Tensor], prefixes: Sequence[str], device: torch.device
) -> dict[str, float]:
    """Metrics of the log-probabilities that all ranks have compared, [prefixes, 9] each."""
    own_figures = torch.stack(
        [corrections.combine(parts) for parts in torch.stack(micro_batches).unbind(1)]
    ).to(device)
    gathered = [torch.empty_like(own_figures) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own_figures)
    # The ranks of a replica count alike, which changes none of the ratios.
    joined = [corrections.combine(parts) for parts in torch.stack(gathered).unbind(1)]
    metrics: dict[str, float] = {}
    for prefix, figures in zip(prefixes, joined, strict=True):
        metrics |= corrections.describe(figures, prefix)
    if of_all := corrections.describe(corrections.combine(torch.stack(joined)), "all"):
        metrics["effective_share"] = of_all["all/ess_sequence"]
    return metrics


# Gradients


def sum_tied(chunks: Sequence[Chunk], dims: TrainDims) -> None:
    """Add the gradients of a tied embedding, which first and last chunk hold as two copies."""
    copies = [grad.to_local() for grad, first in _gradients(chunks, dims) if first is not None]
    if not copies:
        return
    if len(copies) == 2:  # both chunks are here
        total = copies[0] + copies[1]
    else:
        (gradient,) = copies
        group, peer = dims.mesh.get_group("pp"), dims.axes.pp - 1 - dims.rank("pp")
        other = torch.empty_like(gradient)
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, gradient, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
            ]
        )
        for request in work:
            request.wait()
        total = gradient + other
    for gradient in copies:
        gradient.copy_(total)


@torch.no_grad()  # so that a shard of a DTensor is had without a node of a graph
def local_gradients(
    chunks: Sequence[Chunk], dims: TrainDims, factor: float = 1.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """This rank's shards, and its share of the squared norm: each element of the model counts once.

    The shards are multiplied by `factor` first. The sum of the shares over all ranks is the square
    of the full gradient's norm [] float64.
    """
    gradients, shares = [], []
    for gradient, first in _gradients(chunks, dims):
        gradients.append(gradient.to_local())
        shares.append(0.0 if first is False else 1 / _num_copies(gradient, dims))
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    squares = torch.stack(torch._foreach_norm(gradients)).double().square()
    return gradients, (squares * squares.new_tensor(shares)).sum()


def _gradients(chunks: Sequence[Chunk], dims: TrainDims) -> Iterator[tuple[DTensor, bool | None]]:
    """Gradients; and for the copies of a tied embedding, whether it is the first chunk's."""
    for chunk in chunks:
        tied = chunk.model.config.tie_word_embeddings and dims.config.num_chunks > 1
        embedding = f"{modules_before(chunk.model.config)[0]}.weight"
        for name, parameter in chunk.named_parameters():
            if isinstance(parameter.grad, DTensor):
                yield parameter.grad, chunk.first if tied and name.endswith(embedding) else None


def _num_copies(gradient: DTensor, dims: TrainDims) -> int:
    """Ranks that hold the same shard."""
    names = gradient.device_mesh.mesh_dim_names or ()
    replicated_on_tp = any(
        name == "tp" and isinstance(placement, Replicate)
        for name, placement in zip(names, gradient.placements, strict=True)
    )
    return dims.axes.replicas * (dims.axes.tp if replicated_on_tp else 1)
