"""Micro-batches through the pipeline of one model, in the order of its schedule."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hybridrl.config import PipelineSchedule
from hybridrl.engines.train.chunks import LossOfPasses, free_keys
from hybridrl.engines.train.gathering import keep_unreduced, reduce_gradients
from hybridrl.engines.train.packed import PackedBatch, PackedModel
from hybridrl.engines.train.pipeline_executor import (
    ChunkEnded,
    LocalPipeline,
    PipelineExecutor,
    PipelineGroups,
)
from hybridrl.engines.train.row_costs import HALVES
from hybridrl.pipelines.problem import PassCosts, PassKind, PipelinedModel
from hybridrl.pipelines.standard import least_micro_batches, standard_plan

Finish = Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The loss that the last chunk computes from a micro-batch's number, log-probabilities and
entropies (or values and None)."""


class StageModel(PackedModel):
    """A chunk as the executor of plans calls it: with the number of a micro-batch."""

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


class Pipeline:
    """The chunks of this rank, in the order in which micro-batches pass them.

    Each micro-batch is a row of its own length. All ranks that FSDP shards a chunk over have the
    same number of rows, and so one order of passes: its collectives are within them.
    """

    def __init__(
        self,
        chunks: Sequence[StageModel],
        ranks: Sequence[int],
        kind: PipelineSchedule,
        group: ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        groups: PipelineGroups,
        token_parts: int = 1,
    ) -> None:
        """`ranks` are the pipeline ranks of all chunks; `chunks` are those of this one.

        They may be those of `kind`, or the same reversed. Messages go through `groups`.
        """
        self.chunks, self.ranks = chunks, ranks
        self.numbers = [chunk for chunk, rank in enumerate(ranks) if rank == group.rank()]
        self.kind, self.group, self.device, self.dtype = kind, group, device, dtype
        self._token_parts = token_parts
        self._features: int = chunks[0].model.config.hidden_size
        self._global_ranks = dist.get_process_group_ranks(group)
        self._groups = groups
        pairs = [(self._global_ranks[a], self._global_ranks[b]) for a, b in pairwise(ranks)]
        self._groups.connect(pair for pair in pairs if pair[0] != pair[1])

    def num_micro_batches(self, least: int) -> int:
        """The smallest number from `least` on that the schedule can have."""
        return least_micro_batches(self.kind.value, self.group.size(), least)

    def train(self, rows: Sequence[PackedBatch], finish: Finish, all_reduce: bool = True) -> None:
        """Forward and backward of all micro-batches. Gradients are summed.

        Without `all_reduce` FSDP keeps those of this replica (`reduce_gradients`).

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
        if others:
            rounds.append(others)
        keep_unreduced(self.chunks)
        for number, numbers in enumerate(rounds):
            reduce = partial(self._reduce, all_reduce) if number == len(rounds) - 1 else None
            self._train_round(rows, numbers, finish, reduce)

    def _reduce(self, all_reduce: bool, chunk: int) -> None:
        reduce_gradients(self.chunks[self.numbers.index(chunk)], all_reduce)

    def _train_round(
        self,
        rows: Sequence[PackedBatch],
        numbers: Sequence[int],
        finish: Finish,
        chunk_ended: ChunkEnded | None,
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
            return torch.zeros(())

        if passes:
            with torch.no_grad():
                self._run(passes[:-1], keep, with_entropy=True)
        self._run(batches, finish_pass, with_entropy=True, chunk_ended=chunk_ended)
        free_keys(rows[numbers[0]])

    @torch.no_grad()
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
                return torch.zeros(())
            return finish(number, torch.cat(scores.pop(number)), entropy)

        self._run(batches, finish_pass, with_entropy=False)

    def _run(
        self,
        batches: Sequence[PackedBatch],
        finish: Finish,
        with_entropy: bool,
        chunk_ended: ChunkEnded | None = None,
    ) -> None:
        """The passes of all micro-batches; within `torch.no_grad` forward alone."""
        trains = torch.is_grad_enabled()
        halves = self.kind is PipelineSchedule.zero_bubble
        backward = HALVES if halves else (PassKind.backward,)
        model = PipelinedModel.uniform(
            "model",
            ranks=self.ranks,
            micro_batches=len(batches),
            costs=PassCosts(forward_s=1),
            backward=backward if trains else (),
        )
        chunks = dict(zip(self.numbers, self.chunks, strict=True))
        pipeline = LocalPipeline(
            ranks=self.ranks,
            hidden_shapes=[self.hidden_shape(batch.ids.shape[1]) for batch in batches],
            dtype=self.dtype,
            ids=[batch.ids for batch in batches],
            chunks=chunks,
            modules=chunks,
            trains=trains,
            chunk_ended=chunk_ended,
        )
        plan = standard_plan(model, self.kind.value)
        executor = PipelineExecutor(plan, [pipeline], self._groups, self.device, self._global_ranks)
        with self.prepared(batches, finish, with_entropy):
            executor.run()

    def hidden_shape(self, tokens: int) -> tuple[int, int, int]:
        """Shape sent for a row of `tokens`: under sequence parallelism a shard of them."""
        return 1, tokens // self._token_parts, self._features

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
