"""The ranks of one replica of a model, and the micro-batches that they compute together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten, tree_unflatten

from hybridrl.config import Attention
from hybridrl.engines.train.build import TrainDims
from hybridrl.engines.train.chunks import row_in_chunks
from hybridrl.engines.train.image_rows import check_images_came
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import Candidates, PackedBatch, pack
from hybridrl.engines.train.pipeline import Pipeline
from hybridrl.engines.train.shared_prompts import prompt_groups, row_tokens
from hybridrl.models.flops import ForwardFlops
from hybridrl.models.vision import Tower
from hybridrl.pipelines.balance import (
    BY_TOKENS,
    SequenceCost,
    balance,
)

_FLOPS_UNIT = 1000  # operations: sums of a large model's would not fit into 64 bits
_TP_SIZES = 16  # of rows under tensor parallelism, from each power of two to the next


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """Totals of one update over all ranks: they weight tokens and keep collectives in step.

    `flops` are the operations of a forward pass over the sequences, `tower_flops` those of an image
    tower over their images, each sequence's as if it were alone.
    """

    micro_batches: int
    tokens: int
    sequences: int
    longest: int
    flops: float
    tower_flops: float


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Lists of indices into the `sequences`, each of which becomes one packed row of tokens.

    The ranks of cp share the tokens of the first `shared` rows. The sequences of the others come
    behind the replica's own. With `shares_prompts` these have a prompt of several sequences once.
    """

    sequences: Sequence[TrainSequence]
    parts: list[list[int]]
    shared: int = 0
    shares_prompts: bool = False

    def tokens(self, index: int) -> int:
        """The tokens of a row."""
        return row_tokens([self.sequences[i] for i in self.parts[index]], self.shares(index))

    def shares(self, index: int) -> bool:
        """Whether a row has a prompt of several of its sequences once."""
        return self.shares_prompts and index >= self.shared


class Replica:
    """The ranks pp x tp, which compute the same sequences, each with its shard of the model.

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
        chunk_tokens: int = 0,
        cost: SequenceCost = BY_TOKENS,
        shares_prompts: bool = False,
        tower: Tower | None = None,
        image_pads: Sequence[int] = (),
    ) -> None:
        """`max_tokens` bounds a micro-batch, of a model of `num_layers` layers.

        Micro-batches have about equal `cost`: that of a sequence by its length.
        Longer sequences are computed in chunks of `chunk_tokens` on a rank; 0 leaves them whole.
        Images go through the `tower`, and `image_pads` stand for them.
        """
        self.dims, self.pipeline, self.attention, self.device = dims, pipeline, attention, device
        self.max_tokens, self.cost, self.shares_prompts = max_tokens, cost, shares_prompts
        self._tower, self._image_pads = tower, image_pads
        self.chunk_tokens = -(-chunk_tokens // dims.token_parts) * dims.token_parts
        self._group = dims.replica_group
        self._all: Sequence[ProcessGroup | None] = (None,)
        self._last_stage = dims.stage_of_layer(num_layers)[-1]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the body what all ranks have in common is common to this copy of the model alone.

        No collective reaches another copy (`trainer.layout.replicas`) then.
        """
        groups = [self.dims.mesh.get_group(axis) for axis in ("pp", "fsdp", "tp")]
        self._all = [group for group in groups if group.size() > 1]
        try:
            yield
        finally:
            self._all = (None,)

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
        self, sequences: Sequence[TrainSequence], samples_per_row: int = 1, alone: bool = False
    ) -> MicroBatches:
        """Micro-batches of the sequences; rows of the loss stay together.

        Under cp those that are too long for a rank come first, and from all ranks that share them
        (Zeppelin, arXiv 2509.21841). With `alone` each sequence is a separate row.
        """
        groups = prompt_groups(sequences, self.cost, samples_per_row, self.shares_prompts)
        parts = groups.micro_batches(self.max_tokens)
        if alone:
            parts = [[i] for i in range(len(sequences))]
        micros = MicroBatches(sequences, parts, shares_prompts=self.shares_prompts)
        return micros if self.dims.cp_group is None else self._share(micros, self.dims.cp_group)

    def _share(self, own: MicroBatches, group: ProcessGroup) -> MicroBatches:
        # Long rows of all ranks come first, in the order of the ranks.
        long = [i for i in range(len(own.parts)) if own.tokens(i) > self.max_tokens]
        rows = [[own.sequences[i] for i in own.parts[number]] for number in long]
        rows_by_rank: list[Any] = [None] * group.size()
        dist.all_gather_object(rows_by_rank, rows, group=group)
        sequences, parts = list(own.sequences), []
        for rank, rows in enumerate(rows_by_rank):
            if rank == group.rank():
                parts += [own.parts[number] for number in long]
                continue
            for row in rows:
                parts.append([*range(len(sequences), len(sequences) + len(row))])
                sequences += row
        rest = [indices for number, indices in enumerate(own.parts) if number not in long]
        return MicroBatches(sequences, parts + rest, len(parts), own.shares_prompts)

    def same_number(
        self, micros: MicroBatches, number: int, samples_per_row: int = 1
    ) -> MicroBatches:
        """`number` micro-batches, or more if the schedule of a pipeline needs more.

        Those of a pipeline cost about alike, so that no stage waits for a short one's neighbour.
        """
        if self.pipeline is not None and self.chunk_tokens:
            return self._same_rounds(micros, self.pipeline, samples_per_row)
        shared, rest = micros.parts[: micros.shared], micros.parts[micros.shared :]
        if self.pipeline is None:
            rest = rest + [[]] * (number - len(micros.parts))
        else:
            left = self.pipeline.num_micro_batches(number) - len(shared)
            own = sorted(index for indices in rest for index in indices)
            if left > len(rest):
                sequences = [micros.sequences[i] for i in own]
                shares = micros.shares_prompts
                groups = prompt_groups(sequences, self.cost, samples_per_row, shares)
                split = groups.equal_number(left, self.max_tokens)
                rest = [[own[i] for i in indices] for indices in split]
        return replace(micros, parts=shared + rest)

    def _same_rounds(
        self, micros: MicroBatches, pipeline: Pipeline, samples_per_row: int
    ) -> MicroBatches:
        """Rows with chunks first, which make a round each, as many passes on all ranks.

        Those with most chunks come first, since a rank with fewer computes empty ones. Other rows
        fill the rounds up, and what is left is a round.
        """
        chunks = [self._num_chunks(micros, i) for i in range(len(micros.parts))]
        order = sorted(range(len(chunks)), key=lambda i: -chunks[i])
        parts = [micros.parts[i] for i in order]
        chunked = sum(number > 1 for number in chunks)
        shared, rest = parts[: max(chunked, micros.shared)], parts[max(chunked, micros.shared) :]

        # Rounds of all ranks, and the rows that they have place for.
        most_chunked, least = self.most([chunked, len(parts) - chunked])
        missing = most_chunked - chunked
        own_rounds = sorted(chunks, reverse=True)[:chunked] + [2] * missing
        rounds = self.most(own_rounds) if own_rounds else []
        places = sum(pipeline.num_micro_batches(number) - number for number in rounds)
        if least > places or not rounds:
            places += pipeline.num_micro_batches(least - places)
        shared = shared[:chunked] + [[]] * missing + shared[chunked:]

        # The rows that this rank has alone, balanced anew if they still fit.
        own = sorted(index for indices in rest for index in indices)
        lengths = [micros.sequences[i].ids.shape[0] for i in own]
        left = most_chunked + places - len(shared)
        balanced = balance(lengths, left, samples_per_row) if left else []
        if all(sum(lengths[i] for i in indices) <= self.max_tokens for indices in balanced):
            rest = [[own[i] for i in indices] for indices in balanced]
        rest += [[]] * (left - len(rest))
        return replace(micros, parts=shared + rest, shared=len(shared))

    def _num_chunks(self, micros: MicroBatches, index: int) -> int:
        """The number of chunks of a row; 1 for one that fits its ranks."""
        ranks = self._num_ranks(micros, index)
        if not self.chunk_tokens or micros.tokens(index) <= self.max_tokens * ranks:
            return 1
        lengths = [micros.sequences[i].ids.shape[0] for i in micros.parts[index]]
        return sum(-(-length // (self.chunk_tokens * ranks)) for length in lengths)

    def _num_ranks(self, micros: MicroBatches, index: int) -> int:
        """The number of ranks that share a row."""
        return self.dims.config.cp if index < micros.shared else 1

    def most(self, numbers: list[int]) -> list[int]:
        """The largest of each of the `numbers` over all ranks of the world, or of `apart`."""
        most = torch.tensor(numbers, device=self.device)
        for group in self._all:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return most.tolist()

    def pack(
        self,
        micros: MicroBatches,
        trained_only: bool = False,
        records_experts: bool = False,
        counts_experts: bool = False,
        candidates: Candidates | None = None,
    ) -> list[PackedBatch]:
        """A row for each micro-batch, of a multiple of the token shards.

        Raises ValueError for a prompt with pads of images that did not come with it.
        """
        check_images_came(micros.sequences, self._image_pads)
        group, multiple = self.dims.cp_group, self.dims.token_parts
        ranks = [self._num_ranks(micros, i) for i in range(len(micros.parts))]
        # Tokens of a rank.
        sizes = [max(1, -(-micros.tokens(i) // number)) for i, number in enumerate(ranks)]
        sizes = [self._padded(size) for size in sizes]
        rows = []
        for number, (indices, size) in enumerate(zip(micros.parts, sizes, strict=True)):
            members = [micros.sequences[i] for i in indices]
            settings: dict[str, Any] = {
                "attention": self.attention,
                "device": self.device,
                "trained_only": trained_only,
                "group": group if ranks[number] > 1 else None,
                "records_experts": records_experts,
                "counts_experts": counts_experts,
                "candidates": candidates,
            }
            if self._num_chunks(micros, number) > 1:
                row = row_in_chunks(members, self.chunk_tokens, multiple=multiple, **settings)
            else:
                shares = micros.shares(number)
                row = pack(
                    members,
                    total_tokens=size * ranks[number],
                    shares_prompts=shares,
                    tower=self._tower,
                    **settings,
                )
            rows.append(row)
        if not self.chunk_tokens:
            return rows
        return self._in_same_passes(rows, multiple, candidates)

    def _padded(self, size: int) -> int:
        """Tokens of a row with so many of a rank's own, with what fills it up.

        A multiple of the token shards. Under tensor parallelism also one of few sizes. For each new
        one torch's DTensors work out the sharding of every operation anew. A row of 1,500 tokens
        has 1,536: a sixteenth of a row is filled at most.
        """
        parts, power = self.dims.token_parts, 1 << (size.bit_length() - 1)
        step = power // _TP_SIZES if self.dims.axes.tp > 1 else 1
        least, most = (-(-tokens // parts) * parts for tokens in (size, max(size, self.max_tokens)))
        step = max(1, step // parts) * parts
        return min(-(-least // step) * step, most)

    def _in_same_passes(
        self, rows: list[PackedBatch], multiple: int, candidates: Candidates | None
    ) -> list[PackedBatch]:
        """`rows` with as many passes as those of any other rank, of the world or of `apart`."""
        most = self.most([max(1, len(row.passes)) for row in rows])
        same = []
        for row, number in zip(rows, most, strict=True):
            if number > 1:  # some rank has chunks
                passes = row.passes or (row,)
                empty = pack(
                    [],
                    self.attention,
                    self.device,
                    total_tokens=multiple,
                    candidates=candidates,
                )
                row = replace(row, passes=(*[empty] * (number - len(passes)), *passes))
            same.append(row)
        return same

    def count(
        self, sequences: Sequence[TrainSequence], num_micro_batches: int, flops: ForwardFlops
    ) -> torch.Tensor:
        """What this rank's pp x tp ranks compute [6], int64: the fields of `UpdateTotals`."""
        counts = [
            sequence.response_tokens if sequence.mask is None else int(sequence.mask.sum())
            for sequence in sequences
        ]
        lengths = [sequence.ids.shape[0] for sequence in sequences]
        in_all = sum(map(flops, lengths, counts)) // _FLOPS_UNIT
        tower, images = self._tower, [x.images for x in sequences if x.images]
        in_tower = sum(map(tower().flops, images)) // _FLOPS_UNIT if tower and images else 0
        totals = [num_micro_batches, sum(counts), len(counts), max(counts, default=0)]
        return torch.tensor([*totals, in_all, in_tower], device=self.device)

    def totals(self, counts: torch.Tensor) -> UpdateTotals:
        """Totals of the `counts` [6] of all ranks of the world.

        At least one micro-batch. Raises ValueError without a token to train on.
        """
        gathered = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, counts)
        counts_by_rank = torch.stack(gathered)
        most = counts_by_rank.max(0).values.tolist()
        # The ranks of a replica count the same sequences.
        total = (counts_by_rank.sum(0) // self.size).tolist()
        if total[1] == 0:
            raise ValueError("update: no rank has a response token to train on")
        flops, tower_flops = (float(number * _FLOPS_UNIT) for number in total[4:])
        return UpdateTotals(max(1, most[0]), total[1], total[2], most[3], flops, tower_flops)
