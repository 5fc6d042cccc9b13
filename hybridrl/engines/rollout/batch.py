"""The arrays of one forward pass of the rollout engine: tokens, positions and block tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.engines.rollout.expert_record import ExpertRecord, SequenceRows
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.sampling import SamplingBatch
from hybridrl.models.paged_attention import KVPool, PagedBatch, PagedGroup, Workspace

Ints = npt.NDArray[np.int64]

# What one more group costs: keys whose gather and attention take as long, by type of device. On a
# CPU measured. On a GPU a group is six more launches in each layer, some 1.2 ms for 28 layers,
# in which an H100 reads the keys and values of some 40,000 tokens of a 1.5B model.
_GROUP_KEYS = {"cpu": 512, "cuda": 40_000}
_GROUP_TOKENS = {"cpu": 4, "cuda": 160}  # the same in tokens of a prefill: 3 GFLOP each
_SPARE_PAGES = 4  # blocks by which a workspace is wider than its longest row
PREFILL_TOKENS = 4096  # tokens of one prefill pass, unless one prompt is longer


def split(sizes: Sequence[int], overhead: int) -> list[tuple[int, int]]:
    """Cut descending `sizes` into ranges [start, stop), each padded to its first size.

    The cut of least cost, where a range costs `size * count + overhead`: exact dynamic programming
    over at most 16 distinct sizes (finer differences are rounded up).
    """
    if not sizes:
        return []
    unit = -(-sizes[0] // 16)
    rounded = [-(-size // unit) * unit for size in sizes]
    edges = [i for i in range(len(sizes)) if i == 0 or rounded[i] != rounded[i - 1]]
    edges.append(len(sizes))
    best: list[tuple[int, int]] = [(0, 0)]
    for stop in range(1, len(edges)):
        best.append(
            min(
                (
                    best[start][0]
                    + rounded[edges[start]] * (edges[stop] - edges[start])
                    + overhead,
                    start,
                )
                for start in range(stop)
            )
        )
    cuts, stop = [], len(edges) - 1
    while stop:
        start = best[stop][1]
        cuts.append((edges[start], edges[stop]))
        stop = start
    return cuts[::-1]


class DecodeBatch:
    """The running sequences, longest first, for as long as none joins or leaves.

    All grow by one token a step, so the order by length is stable and groups of similar length are
    contiguous rows. `counts` [rows] are response tokens so far, `slots` [rows] the rows' indices in
    the engine's block tables. Batches of the same `lane` share workspace memory. With `keep` they
    keep the gathered keys and values from step to step (`Workspace`). Without, a pass depends only
    on tokens, positions and the rows' blocks in the pool.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Request, int, int]],
        block_size: int,
        vocab_size: int,
        device: torch.device,
        lane: int = 0,
        keep: bool = False,
    ) -> None:
        rows = sorted(rows, key=lambda row: -row[2])
        self.requests = [request for request, _, _ in rows]
        self.slots: Ints = np.array([slot for _, slot, _ in rows])
        self.positions: Ints = np.array([length - 1 for _, _, length in rows])
        self.counts: Ints = np.array([len(request.response_ids) for request in self.requests])
        self.sampling = SamplingBatch.of(
            [request.sampling for request in self.requests], vocab_size, device
        )
        pages = [length // block_size + 1 for _, _, length in rows]
        self._cuts = split(pages, -(-_GROUP_KEYS[device.type] // block_size))
        self._device, self._lane, self._keep = device, lane, keep
        self._groups: list[tuple[PagedGroup, Workspace]] = []
        last = [[*r.prompt_ids[-1:], *r.response_ids[-1:]][-1] for r in self.requests]
        self._tokens = torch.tensor(last, device=device)

    def inputs(self, pool: KVPool, tables: Ints) -> tuple[PagedBatch, torch.Tensor, torch.Tensor]:
        """The pass of one decode step: batch, token ids [rows] and positions [rows]."""
        positions = torch.from_numpy(self.positions).to(self._device)
        if self._keep:
            return PagedBatch(pool, None, self._kept_groups(pool, tables)), self._tokens, positions
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

    def _kept_groups(self, pool: KVPool, tables: Ints) -> list[PagedGroup]:
        """The groups with their workspaces, created at the first step."""
        if not self._groups:
            pages = [int(self.positions[start]) // pool.block_size + 1 for start, _ in self._cuts]
            wide = [min(num + _SPARE_PAGES, tables.shape[1]) for num in pages]
            tokens = [
                num * pool.block_size * (stop - start)
                for num, (start, stop) in zip(wide, self._cuts, strict=True)
            ]
            unit = 2 * pool.kv_heads * pool.head_dim
            memory = pool.arena(sum(tokens), self._lane).split([num * unit for num in tokens], 1)
            for (start, stop), num, workspace_memory in zip(self._cuts, wide, memory, strict=True):
                table = _tensor(tables[self.slots[start:stop], :num], self._device)
                # Shares the memory of the array, which `advance` increments.
                positions = torch.from_numpy(self.positions[start:stop])
                workspace = Workspace(pool, table, positions, workspace_memory)
                group = PagedGroup(
                    start, stop - start, 1, 0, positions[:, None], workspace=workspace
                )
                self._groups.append((group, workspace))
        for group, _ in self._groups:
            group.keys = int(self.positions[group.start]) + 1
            group.masks.clear()
        return [group for group, _ in self._groups]

    @property
    def full(self) -> bool:
        """Whether a workspace has no room for another step: then a new batch is needed."""
        return any(self.positions[g.start] >= workspace.width for g, workspace in self._groups)

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
        for _, workspace in self._groups:
            workspace.advance()

    def flush(self, tables: Ints) -> None:
        """Copy the workspaces to the pool; call it before a sequence joins or leaves."""
        for group, workspace in self._groups:
            slots = self.slots[group.start : group.start + group.rows]
            workspace.flush(_tensor(tables[slots], self._device))


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
            sampling=_sampling([r.sampling for r in requests], vocab_size, device),
        )


def _sampling(
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
