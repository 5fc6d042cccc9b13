"""The ranks of one replica of a model, and the micro-batches that they compute together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from hybridrl.config import Attention
from hybridrl.engines.train.balance import balance, micro_batches
from hybridrl.engines.train.build import TrainDims
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedBatch, pack, scored_positions
from hybridrl.engines.train.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """Totals of one update over all ranks: they weight tokens and keep collectives in step."""

    micro_batches: int
    tokens: int
    sequences: int
    longest: int


class Replica:
    """The ranks pp x tp, which compute the same sequences, each with its shard of the model.

    A micro-batch is a list of indices into the sequences, and becomes one packed row of tokens.
    All methods that communicate are collective.
    """

    def __init__(
        self,
        dims: TrainDims,
        pipeline: Pipeline | None,
        attention: Attention,
        device: torch.device,
        max_tokens: int,
        num_layers: int,
    ) -> None:
        """`max_tokens` bounds a micro-batch, of a model of `num_layers` layers."""
        self.dims, self.pipeline, self.attention, self.device = dims, pipeline, attention, device
        self.max_tokens = max_tokens
        self._group = dims.replica_group
        self._last_stage = dims.stage_of_layer(num_layers)[-1]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size()

    def gather(self, sequences: Sequence[TrainSequence]) -> tuple[Sequence[TrainSequence], slice]:
        """The sequences of all ranks of the replica, and the slice from this rank."""
        if self.size == 1:
            return sequences, slice(0, len(sequences))
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, list(sequences), group=self._group)
        before = sum(map(len, gathered[: self._group.rank()]))
        return [s for of_rank in gathered for s in of_rank], slice(before, before + len(sequences))

    def from_last_stage(self, value: Any, device: torch.device) -> Any:
        """The last pipeline stage's `value` on all stages, its floating tensors on `device`.

        They travel through the host as one: pickled tensors would each be read alone, and restored
        on the sender's GPU.
        """
        tensors, structure = tree_flatten(value)
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        numbers = [tensor.double().flatten() for tensor in tensors]  # exact for smaller formats
        message: list[Any] = [(torch.cat(numbers).cpu() if numbers else None, shapes, structure)]
        group = self.dims.mesh.get_group("pp")
        dist.broadcast_object_list(message, group=group, group_src=self._last_stage)
        joined, shapes, structure = message[0]
        if joined is None:
            return value
        pieces = joined.to(device).split([shape.numel() for shape, _ in shapes])
        pairs = zip(pieces, shapes, strict=True)
        tensors = [piece.view(shape).to(dtype) for piece, (shape, dtype) in pairs]
        return tree_unflatten(tensors, structure)

    def split(
        self, sequences: Sequence[TrainSequence], samples_per_row: int = 1
    ) -> list[list[int]]:
        """Micro-batches of the sequences; rows of the loss stay together."""
        lengths = [len(sequence.ids) for sequence in sequences]
        return micro_batches(lengths, self.max_tokens, samples_per_row)

    def same_number(
        self,
        sequences: Sequence[TrainSequence],
        parts: list[list[int]],
        number: int,
        samples_per_row: int = 1,
    ) -> list[list[int]]:
        """`number` micro-batches, the same on all ranks, or more if a pipeline needs more."""
        if self.pipeline is None:
            return parts + [[]] * (number - len(parts))
        number = self.pipeline.num_micro_batches(number)
        return balance([len(sequence.ids) for sequence in sequences], number, samples_per_row)

    def pack(
        self,
        sequences: Sequence[TrainSequence],
        parts: list[list[int]],
        trained_only: bool = False,
    ) -> list[PackedBatch]:
        """A row for each micro-batch, a multiple of the token shards; in a pipeline all equal."""
        sizes = [max(1, sum(len(sequences[i].ids) for i in indices)) for indices in parts]
        if self.pipeline is not None:
            sizes = [max(sizes)] * len(sizes)
        multiple = self.dims.token_parts
        return [
            pack(
                [sequences[i] for i in indices],
                self.attention,
                self.device,
                trained_only,
                total_tokens=-(-size // multiple) * multiple,
            )
            for indices, size in zip(parts, sizes, strict=True)
        ]

    def totals(self, sequences: Sequence[TrainSequence], num_micro_batches: int) -> UpdateTotals:
        """Totals over all ranks of the world; raises ValueError without a token to train on."""
        counts = [len(scored_positions(sequence, trained_only=True)) for sequence in sequences]
        own_totals = torch.tensor(
            [num_micro_batches, sum(counts), len(counts), max(counts, default=0)],
            device=self.device,
        )
        gathered = [torch.empty_like(own_totals) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own_totals)
        totals_by_rank = torch.stack(gathered)
        most = totals_by_rank.max(0).values.tolist()
        # The ranks of a replica count the same sequences.
        total = (totals_by_rank.sum(0) // self.size).tolist()
        if total[1] == 0:
            raise ValueError("update: no rank has a response token to train on")
        return UpdateTotals(most[0], total[1], total[2], most[3])
