"""The arrays of one forward pass of the rollout engine: tokens, positions and block tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.engines.rollout.expert_record import ExpertRecord, SequenceRows
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.kept_groups import Ints, KeptGroups, group_pages, split
from hybridrl.engines.rollout.sampling import SamplingBatch
from hybridrl.models.paged_attention import KVPool, PagedBatch, PagedGroup

# What one more group costs in tokens of a prefill, by type of device: 3 GFLOP each on a GPU.
_GROUP_TOKENS = {"cpu": 4, "cuda": 160}
PREFILL_TOKENS = 4096  # tokens of one prefill pass, unless one prompt is longer


class DecodeBatch:
    """The running sequences of a lane, for as long as none joins or leaves.

    All grow by one token a step, so groups of similar length are contiguous rows. `counts` [rows]
    are response tokens so far, `slots` [rows] the rows' indices in the engine's block tables. With
    `kept` the rows are in its order, and a pass reads the keys and values there. Without, the
    longest are first, and a pass depends only on tokens, positions and the rows' blocks in the
    pool.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Request, int, int]],
        block_size: int,
        vocab_size: int,
        device: torch.device,
        kept: KeptGroups | None = None,
    ) -> None:
        if kept is None:
            rows = sorted(rows, key=lambda row: -row[2])
        else:
            by_slot = {row[1]: row for row in rows}
            rows = [by_slot[slot] for slot in kept.slots]
        self.requests = [request for request, _, _ in rows]
        self.slots: Ints = np.array([slot for _, slot, _ in rows])
        self.positions: Ints = np.array([length - 1 for _, _, length in rows])
        self.counts: Ints = np.array([len(request.response_ids) for request in self.requests])
        self.sampling = sampling_batch([r.sampling for r in self.requests], vocab_size, device)
        self._device, self._kept = device, kept
        self._cuts: list[tuple[int, int]] = []
        if kept is None:
            pages = [length // block_size + 1 for _, _, length in rows]
            self._cuts = split(pages, group_pages(device, block_size))
        last = [(r.response_ids or r.prompt_ids)[-1] for r in self.requests]
        self._tokens = torch.tensor(last, device=device)

    def inputs(self, pool: KVPool, tables: Ints) -> tuple[PagedBatch, torch.Tensor, torch.Tensor]:
        """The pass of one decode step: batch, token ids [rows] and positions [rows]."""
        positions = torch.from_numpy(self.positions).to(self._device)
        if self._kept is not None:
            return PagedBatch(pool, None, self._kept.paged_groups()), self._tokens, positions
        page, offset = np.divmod(self.positions, pool.block_size)
        blocks = _tensor(tables[self.slots, page], self._device)
        groups = [
            PagedGroup(
                start=start,
                rows=stop - start,
                queries=1,
                keys=int(self.positions[start]) + 1,
                positions=positions[start:stop, None],
                tables=_tensor(tables[self.slots[start:stop], : page[start] + 1], self._device),
            )
            for start, stop in self._cuts
        ]
        rows = pool.rows(blocks, _tensor(offset, self._device))
        return PagedBatch(pool, rows, groups), self._tokens, positions

    def spans(self) -> list[SequenceRows]:
        """The pending tokens of the sequences whose experts are recorded."""
        rows = enumerate(zip(self.requests, self.positions.tolist(), strict=True))
        return [
            SequenceRows(request.routed_experts, position, 1, row)
            for row, (request, position) in rows
            if request.routed_experts is not None
        ]

    def advance(self, tokens: torch.Tensor) -> None:
        """The drawn `tokens` [rows] are the pending ones of the next step."""
        self._tokens = tokens
        self.positions += 1
        self.counts += 1
        if self._kept is not None:
            self._kept.advance()


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens to cache at positions `start`, `start` + 1, ... of a sequence that has `blocks`.

    `record` is that of the sequence, where experts are recorded.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    record: ExpertRecord | None = None


def prefill_batches(
    jobs: Sequence[Prefill], pool: KVPool, device: torch.device
) -> Iterator[tuple[PagedBatch, torch.Tensor, torch.Tensor, list[SequenceRows]]]:
    """Passes that cache the jobs' tokens: batch, token ids [tokens] and positions [tokens].

    The last are the sequences whose experts are recorded.

    Jobs of like length are padded to the longest of their group; padding is written to block 0.
    """
    jobs = sorted(jobs, key=lambda job: -len(job.tokens))
    pending: list[Sequence[Prefill]] = []
    for start, stop in split([len(job.tokens) for job in jobs], _GROUP_TOKENS[device.type]):
        rows = max(1, PREFILL_TOKENS // len(jobs[start].tokens))
        for first in range(start, stop, rows):
            group = jobs[first : min(first + rows, stop)]
            used = sum(len(other) * len(other[0].tokens) for other in pending)
            if pending and used + len(group) * len(group[0].tokens) > PREFILL_TOKENS:
                yield _prefill_batch(pending, pool, device)
                pending = []
            pending.append(group)
    if pending:
        yield _prefill_batch(pending, pool, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBatch:
    """A pass over the pending tokens of rows and the drafts behind them: rows of several tokens.

    `requests`, `slots` and `counts` [tokens] are those of every token whose successor is drawn, row
    by row, `counts` with the guessed tokens before it. `starts` [rows] are where rows begin
    among them. `places` [tokens] are where they are in the pass, which pads rows of other lengths.
    """

    paged: PagedBatch
    token_ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    requests: list[Request]
    slots: Ints
    counts: Ints
    starts: list[int]
    sampling: SamplingBatch

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[Request, int, Prefill]],
        pool: KVPool,
        vocab_size: int,
        device: torch.device,
    ) -> "VerifyBatch":
        """Rows (request, slot, pending token and draft), those with most tokens first."""
        jobs = [job for _, _, job in rows]
        sizes = [len(job.tokens) for job in jobs]
        groups = [jobs[start:stop] for start, stop in split(sizes, _GROUP_TOKENS[device.type])]
        paged, token_ids, positions, _ = _prefill_batch(groups, pool, device)
        # A group's rows are as wide as its first.
        widths = [len(group[0].tokens) for group in groups for _ in group]
        begins = np.cumsum([0, *widths[:-1]])
        inner = np.concatenate([np.arange(size) for size in sizes])
        which = np.repeat(np.arange(len(rows)), sizes)
        requests = [rows[row][0] for row in which.tolist()]
        num_before = np.array([len(request.response_ids) for request, _, _ in rows])
        return cls(
            paged=paged,
            token_ids=token_ids,
            positions=positions,
            places=_tensor(begins[which] + inner, device),
            requests=requests,
            slots=np.array([slot for _, slot, _ in rows])[which],
            counts=num_before[which] + inner,
            starts=np.cumsum([0, *sizes[:-1]]).tolist(),
            sampling=sampling_batch([r.sampling for r in requests], vocab_size, device),
        )


def sampling_batch(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> SamplingBatch:
    """The batch of these parameters; those of rows that are alike are made once."""
    first = params[0]
    if not first.edits_logits and all(other is first or other == first for other in params):
        return _alike(first, len(params), vocab_size, device)
    return SamplingBatch.of(params, vocab_size, device)


@lru_cache(maxsize=256)
def _alike(
    params: SamplingParams, rows: int, vocab_size: int, device: torch.device
) -> SamplingBatch:
    return SamplingBatch.of([params] * rows, vocab_size, device)


def _prefill_batch(
    groups: Sequence[Sequence[Prefill]], pool: KVPool, device: torch.device
) -> tuple[PagedBatch, torch.Tensor, torch.Tensor, list[SequenceRows]]:
    size = pool.block_size
    paged, rows, ids, start = [], [], [], 0
    spans: list[SequenceRows] = []
    for jobs in groups:
        shape = (len(jobs), len(jobs[0].tokens))
        longest = max(job.start + len(job.tokens) for job in jobs)
        token_ids, positions, blocks, offsets = (np.zeros(shape, np.int64) for _ in range(4))
        tables = np.zeros((len(jobs), -(-longest // size)), np.int64)
        for row, job in enumerate(jobs):
            count = len(job.tokens)
            used = job.blocks[: tables.shape[1]]
            tables[row, : len(used)] = used
            token_ids[row, :count] = job.tokens
            positions[row, :count] = np.arange(job.start, job.start + count)
            page, offsets[row, :count] = np.divmod(positions[row, :count], size)
            blocks[row, :count] = tables[row, page]
            if job.record is not None:
                spans.append(SequenceRows(job.record, job.start, count, start + row * shape[1]))
        queries = _tensor(positions, device)
        paged.append(PagedGroup(start, *shape, longest, queries, _tensor(tables, device)))
        rows.append(
            pool.rows(_tensor(blocks.reshape(-1), device), _tensor(offsets.reshape(-1), device))
        )
        ids.append(_tensor(token_ids.reshape(-1), device))
        start += shape[0] * shape[1]
    positions_row = torch.cat([group.positions.reshape(-1) for group in paged])
    return PagedBatch(pool, torch.cat(rows), paged), torch.cat(ids), positions_row, spans


def _tensor(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
