"""Micro-batches through a pipeline of chunks, by torch's own schedules."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from hybridrl.config import PipelineSchedule
from hybridrl.engines.train.chunks import LossOfPasses, free_keys
from hybridrl.engines.train.packed import PackedBatch, PackedModel

Finish = Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The loss that the last chunk computes from a micro-batch's number, log-probabilities and
entropies (or values and None)."""


class _ReversedInterleaved(ScheduleInterleaved1F1B):
    """On ranks whose chunks run from the last one to the first: see `_ReversedZBV`."""

    def _calculate_single_rank_operations(self, rank: int) -> Any:
        return super()._calculate_single_rank_operations(self.pp_group_size - 1 - rank)


class _ReversedZBV(ScheduleZBVZeroBubble):
    """Each rank has the passes of the rank opposite, whose chunks it holds.

    torch reads from these lists which rank holds a chunk (`_validate_and_set_stage_mapping`).
    """

    def _calculate_single_rank_operations(self, rank: int) -> Any:
        return super()._calculate_single_rank_operations(self.pp_group_size - 1 - rank)


class StageModel(PackedModel):
    """A chunk as torch's pipeline calls it: with the number of a micro-batch.

    torch splits tensors over micro-batches, but a packed row's description is no tensor. So the
    module holds the descriptions, and the pipeline passes the number.
    """

    batches: Sequence[PackedBatch] = ()
    finish: Finish | None = None
    with_entropy = False

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:  # type: ignore[override]
        """Hidden states, or on the last chunk the micro-batch's loss [1]."""
        out = super().forward(x, self.batches[number], self.with_entropy)
        if isinstance(out, torch.Tensor):
            return out
        assert self.finish is not None
        return torch.stack([self.finish(number, *out)])


def _read_number(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read the micro-batch's number on the host, from the tensor [1] that torch's schedule passes.

    This comes before FSDP's own hook, which moves tensors to the GPU: reading it there waits for
    all that the GPU has to do.
    """
    if "number" in kwargs:
        kwargs = {**kwargs, "number": int(kwargs["number"])}
    return args, kwargs


class Pipeline:
    """The chunks of this rank, in the order in which micro-batches pass them.

    All micro-batches of one call are rows of equal length. Each call creates new stages: gloo does
    not support messages of changing length between two ranks, and creation takes under 1 ms.
    """

    def __init__(
        self,
        chunks: Sequence[StageModel],
        ranks: Sequence[int],
        kind: PipelineSchedule,
        group: ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        token_parts: int = 1,
    ) -> None:
        """`ranks` are the pipeline ranks of all chunks; `chunks` are those of this one.

        They may be those of `kind`, or the same reversed.
        """
        self.chunks, self.ranks, self.num_chunks = chunks, ranks, len(ranks)
        self.numbers = [chunk for chunk, rank in enumerate(ranks) if rank == group.rank()]
        self.kind, self.group, self.device, self.dtype = kind, group, device, dtype
        self._token_parts = token_parts
        self._features: int = chunks[0].model.config.hidden_size
        for chunk in chunks:
            chunk.register_forward_pre_hook(_read_number, prepend=True, with_kwargs=True)

    def num_micro_batches(self, least: int) -> int:
        """The smallest allowed number from `least` on: a multiple of the stages."""
        stages = self.group.size()
        return max(1, -(-least // stages)) * stages

    def train(self, rows: Sequence[PackedBatch], finish: Finish) -> None:
        """Forward and backward of all micro-batches. Gradients are summed.

        Each row with passes has a round, so that the keys of one row are kept at a time. Other rows
        fill the round up to an allowed number.
        """
        rounds = []
        others = [number for number, row in enumerate(rows) if not row.passes]
        for number, row in enumerate(rows):
            if row.passes:
                filling = self.num_micro_batches(len(row.passes)) - len(row.passes)
                rounds.append([number, *others[:filling]])
                others = others[filling:]
        for numbers in [*rounds, others] if others else rounds:
            with self._adding_gradients():
                self._train_round(rows, numbers, finish)

    def _train_round(
        self, rows: Sequence[PackedBatch], numbers: Sequence[int], finish: Finish
    ) -> None:
        """The rows of these `numbers`, of which the first one alone may have passes."""
        passes = rows[numbers[0]].passes
        of_row = LossOfPasses(rows[numbers[0]], partial(finish, numbers[0]))
        others = numbers[1:] if passes else numbers
        batches = [*reversed(passes), *(rows[number] for number in others)]

        def finish_pass(
            place: int, scores: torch.Tensor, entropy: torch.Tensor | None
        ) -> torch.Tensor:
            if place < len(passes):
                return of_row((scores, entropy))
            return finish(others[place - len(passes)], scores, entropy)

        def keep(_: int, scores: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
            of_row.keep((scores, entropy))
            return torch.zeros(1)

        if passes:
            self._forward(passes[:-1], keep, with_entropy=True)
        schedule = self._schedule(len(batches), batches[0].ids.shape[1])
        places = torch.arange(len(batches))
        inputs = [torch.cat([batch.ids for batch in batches])] if self.numbers[0] == 0 else []
        with self.prepared(batches, finish_pass, with_entropy=True):
            schedule.step(*inputs, target=places, number=places)
        free_keys(rows[numbers[0]])

    def score(self, rows: Sequence[PackedBatch], finish: Finish) -> None:
        """Forward of all rows. Those with passes are finished with the scores of all of them."""
        numbers = [number for number, row in enumerate(rows) for _ in row.passes or (row,)]
        batches = [batch for row in rows for batch in row.passes or (row,)]
        scores: dict[int, list[torch.Tensor]] = defaultdict(list)

        def finish_pass(
            place: int, values: torch.Tensor, entropy: torch.Tensor | None
        ) -> torch.Tensor:
            number = numbers[place]
            if not rows[number].passes:
                return finish(number, values, entropy)
            scores[number].append(values)
            if len(scores[number]) < len(rows[number].passes):
                return torch.zeros(1)
            return finish(number, torch.cat(scores.pop(number)), entropy)

        self._forward(batches, finish_pass, with_entropy=False)

    @torch.no_grad()
    def _forward(self, batches: Sequence[PackedBatch], finish: Finish, with_entropy: bool) -> None:
        """Forward of all micro-batches: through one chunk of this rank after the other.

        torch's schedules with several chunks a rank have no forward alone. All ranks count the same
        ticks, and what a rank sends and receives in one tick is one batch. Single messages would
        share a stream in both directions under NCCL, so that some block others.
        """
        num_batches, rank = len(batches), self.group.rank()
        holders = [self._holder(index) for index in range(self.num_chunks + 1)]
        starts = _first_ticks(holders[:-1], num_batches)
        chunks = dict(zip(self.numbers, self.chunks, strict=True))
        hidden: dict[tuple[int, int], torch.Tensor] = {}  # inputs by chunk and micro-batch
        messages: dict[int, list[dist.Work]] = {}  # by tick
        sent: list[torch.Tensor] = []  # kept until it has left
        with self.prepared(batches, finish, with_entropy):
            for tick in range(starts[-1] + num_batches):
                operations: list[dist.P2POp] = []
                for index, number in _active(starts, num_batches, tick):
                    holder, target = holders[index], holders[index + 1]
                    x = batches[number].ids
                    if holder == rank:
                        if index:
                            _wait(messages.pop(starts[index - 1] + number, []))
                            x = hidden.pop((index, number))
                        x = chunks[index](x, number)
                    elif target == rank:
                        x = x.new_empty(self.hidden_shape(x.shape[1]), dtype=self.dtype)
                        operations.append(self._message(dist.irecv, x, holder))
                    if target == rank:
                        hidden[index + 1, number] = x
                    elif holder == rank and target is not None:
                        sent.append(x.contiguous())
                        operations.append(self._message(dist.isend, sent[-1], target))
                if operations:
                    messages[tick] = dist.batch_isend_irecv(operations)
        for works in messages.values():
            _wait(works)

    def _message(self, kind: Callable[..., Any], x: torch.Tensor, peer: int | None) -> dist.P2POp:
        return dist.P2POp(kind, x, group=self.group, group_peer=peer)

    def hidden_shape(self, tokens: int) -> tuple[int, int, int]:
        """Shape sent for a row of `tokens`: under sequence parallelism a shard of them."""
        return 1, tokens // self._token_parts, self._features

    def _holder(self, index: int) -> int | None:
        """The pipeline rank of a chunk, None before the first and after the last."""
        return self.ranks[index] if 0 <= index < self.num_chunks else None

    @contextmanager
    def prepared(
        self, batches: Sequence[PackedBatch], finish: Finish, with_entropy: bool
    ) -> Iterator[None]:
        """Within the body the chunks compute the rows by their numbers."""
        for chunk in self.chunks:
            chunk.batches, chunk.finish, chunk.with_entropy = batches, finish, with_entropy
        try:
            yield
        finally:
            for chunk in self.chunks:
                chunk.batches, chunk.finish = (), None

    @contextmanager
    def _adding_gradients(self) -> Iterator[None]:
        """Add to the gradients of earlier rounds, which a new schedule of torch clears."""
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        earlier = [p.grad for p in parameters]
        yield
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is not None:
                assert parameter.grad is not None
                parameter.grad += gradient

    def _schedule(self, num_batches: int, tokens: int) -> Any:
        pairs = zip(self.chunks, self.numbers, strict=True)
        stages: list[Any] = [self._stage(*pair, tokens) for pair in pairs]
        settings: dict[str, Any] = {"loss_fn": _loss, "scale_grads": False}
        is_reversed = self.ranks[0] > 0
        match self.kind:
            case PipelineSchedule.one_f_one_b:
                return Schedule1F1B(stages[0], num_batches, **settings)
            case PipelineSchedule.interleaved:
                interleaved = _ReversedInterleaved if is_reversed else ScheduleInterleaved1F1B
                return interleaved(stages, num_batches, **settings)
            case PipelineSchedule.zero_bubble:
                zero_bubble = _ReversedZBV if is_reversed else ScheduleZBVZeroBubble
                return zero_bubble(stages, num_batches, **settings)

    def _stage(self, chunk: StageModel, number: int, tokens: int) -> PipelineStage:
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        hidden = torch.zeros(self.hidden_shape(tokens), dtype=self.dtype, device="meta")
        hidden.requires_grad_()  # else no gradient is received for it
        loss = torch.zeros(1, device="meta", requires_grad=True)
        stage = PipelineStage(
            chunk,
            number,
            self.num_chunks,
            self.device,
            input_args=ids if chunk.first else hidden,
            output_args=loss if chunk.last else hidden,
            group=self.group,
        )
        stage.stage_index_to_group_rank = dict(enumerate(self.ranks))  # else i mod pp
        return stage


def _first_ticks(holders: Sequence[int | None], num_batches: int) -> list[int]:
    """The tick in which each chunk gets its first micro-batch; it gets one a tick from then on.

    `holders` are the chunks' ranks. A chunk begins a tick after the one before it, when its rank
    has ended the chunk that it had. Example: chunks of the ranks 0, 1, 0, 1 and two micro-batches
    begin in the ticks 0, 1, 2, 3.
    """
    starts: list[int] = []
    free: dict[int | None, int] = {}
    for holder in holders:
        starts.append(max(starts[-1] + 1 if starts else 0, free.get(holder, 0)))
        free[holder] = starts[-1] + num_batches
    return starts


def _active(starts: Sequence[int], num_batches: int, tick: int) -> list[tuple[int, int]]:
    """The chunks of all ranks that compute in a tick, each with its micro-batch."""
    numbers = [(index, tick - start) for index, start in enumerate(starts)]
    return [(index, number) for index, number in numbers if 0 <= number < num_batches]


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()
