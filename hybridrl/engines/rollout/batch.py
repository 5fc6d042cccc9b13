"""The arrays of one forward pass of the rollout engine: tokens, positions and block tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from hybridrl.engines.rollout.device_copies import Array, upload
from hybridrl.engines.rollout.expert_record import ExpertRecord, SequenceRows
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.kept_groups import Ints, KeptGroups, group_pages, split
from hybridrl.engines.rollout.random import UniformsOf
from hybridrl.engines.rollout.sampling import SamplingBatch
from hybridrl.models.image_files import Images
from hybridrl.models.images import PlacedImages
from hybridrl.models.paged_attention import KVCache, PagedBatch, PagedGroup
from hybridrl.models.states import StateBatch, StateCache, StateRows, draft_states, state_batch

# What one more group costs in tokens of a prefill, by type of device: 3 GFLOP each on a GPU.
_GROUP_TOKENS = {"cpu": 4, "cuda": 160}
PREFILL_TOKENS = 4096  # tokens of one prefill pass, unless one prompt is longer


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What a pass reads, on the device: batch, token ids [tokens] and positions [tokens].

    `uniforms` are those of the tokens that it draws, None where it draws none. Where prompts have
    images, `rotations` [3, tokens] are the rotary positions, and `images` where some are among the
    tokens.
    """

    paged: PagedBatch
    token_ids: torch.Tensor
    positions: torch.Tensor
    uniforms: torch.Tensor | None = None
    rotations: torch.Tensor | None = None
    images: "PassImages | None" = None

    @property
    def position_ids(self) -> torch.Tensor:
        """What a model takes: [1, tokens], with rotary positions [4, 1, tokens]."""
        if self.rotations is None:
            return self.positions[None]
        return torch.cat([self.positions[None], self.rotations])[:, None]


@dataclass(frozen=True, slots=True)
class PassImages:
    """The pads among a pass's tokens: their places [pads], and of which prompts' images they are.

    `parts` has the images of a prompt, and which of their pads these are, in the order of `pads`.
    """

    pads: Ints
    parts: list[tuple[Images, slice]]


class DecodeBatch:
    """The running sequences of a lane, for as long as none joins; `take` lets some leave.

    All grow by one token a step, so groups of similar length are contiguous rows. `counts` [rows]
    are response tokens so far, `slots` [rows] the rows' indices in the engine's block tables. With
    `kept` the rows are in its order, and a pass reads the keys and values there. Without, the
    longest are first, and a pass depends only on tokens, positions and the rows' blocks in the
    cache. `states` are the slots of the rows' recurrent states, by their slots in the tables, and
    `deltas` what their rotary positions have more than the tokens' numbers.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Request, int, int]],
        block_size: int,
        vocab_size: int,
        device: torch.device,
        kept: KeptGroups | None = None,
        states: Mapping[int, int] = MappingProxyType({}),
        deltas: Mapping[int, int] = MappingProxyType({}),
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
        self._vocab_size, self._device, self._kept = vocab_size, device, kept
        self.sampling = self._sampling()
        self._states = np.array([states[slot] for slot in self.slots.tolist()] if states else [])
        self._state_batch: StateBatch | None = None
        self._deltas = None
        if deltas:
            self._deltas = np.array([deltas.get(slot, 0) for slot in self.slots.tolist()])
        self._cuts: list[tuple[int, int]] = []
        if kept is None:
            pages = [length // block_size + 1 for _, _, length in rows]
            self._cuts = split(pages, group_pages(device, block_size))
        # Where they are known: those that were drawn on the device stay there.
        self._tokens = torch.tensor([(r.response_ids or r.prompt_ids)[-1] for r in self.requests])

    def _sampling(self) -> SamplingBatch:
        params = [request.sampling for request in self.requests]
        return sampling_batch(params, self._vocab_size, self._device)

    def take(self, rows: Sequence[int]) -> None:
        """Keep these of the rows alone, in this order, which is that of `kept`."""
        at = np.array(rows)
        self.requests = [self.requests[row] for row in rows]
        self.slots, self.positions, self.counts = (
            self.slots[at],
            self.positions[at],
            self.counts[at],
        )
        self._states = self._states[at] if len(self._states) else self._states
        self._state_batch = None
        self._deltas = None if self._deltas is None else self._deltas[at]
        self._tokens = self._tokens[at]
        if self.sampling.has_only_temperatures:
            self.sampling = self.sampling.take(torch.from_numpy(at))
        else:  # made anew, else rows would go on with what those that have left wanted
            self.sampling = self._sampling()

    def inputs(self, cache: KVCache, tables: Ints, uniforms: Array | None = None) -> PassInputs:
        """The pass of one decode step, whose tokens are drawn by `uniforms` [rows].

        All that the device lacks goes there in one copy, before the pass.
        """
        arrays: dict[str, Array] = {"positions": self.positions}
        if uniforms is not None:
            arrays["uniforms"] = uniforms
        if self._tokens.device.type != self._device.type:
            arrays["tokens"] = self._tokens.numpy()
        if self._deltas is not None:
            arrays["rotations"] = np.broadcast_to(
                self.positions + self._deltas, (3, len(self.positions))
            )
        if self._kept is None:
            page, arrays["offsets"] = np.divmod(self.positions, cache.block_size)
            arrays["blocks"] = tables[self.slots, page]
            arrays["tables"] = tables[self.slots, : page[0] + 1]  # the first is the longest
        sent = upload(arrays, self._device)

        self._tokens = sent.get("tokens", self._tokens)
        if self._kept is None:
            places = sent["blocks"], sent["offsets"]
            groups = self._groups(cache, sent["positions"], sent["tables"])
            paged = PagedBatch(cache, places, groups)
        else:
            paged = PagedBatch(cache, None, self._kept.paged_groups())
        if cache.states is not None:
            paged.states = self._states_of(cache.states)
        rest = sent.get("uniforms"), sent.get("rotations")
        return PassInputs(paged, self._tokens, sent["positions"], *rest)

    def _states_of(self, states: StateCache) -> StateBatch:
        """The states of the rows' recurrent layers, which stay in their slots."""
        if self._state_batch is None:
            rows = StateRows(0, 1, np.ones_like(self.slots), self._states, self.positions)
            self._state_batch = state_batch(states, [rows], self._device, False)
        return self._state_batch

    def _groups(
        self, cache: KVCache, positions: torch.Tensor, tables: torch.Tensor
    ) -> list[PagedGroup]:
        """The groups, in parts where the rows have grown too much to be read at once."""
        groups = []
        for start, stop in self._cuts:
            keys = int(self.positions[start]) + 1
            pages = cache.num_pages(keys)
            at_once = cache.rows_at_once(stop - start, pages)
            for first in range(start, stop, at_once):
                rows = slice(first, min(first + at_once, stop))
                groups.append(
                    PagedGroup(
                        start=first,
                        rows=rows.stop - first,
                        queries=1,
                        keys=cache.keys(keys),
                        positions=positions[rows, None],
                        pages=cache.pages(tables[rows, :pages]),
                    )
                )
        return groups

    def spans(self) -> list[SequenceRows]:
        """The pending tokens of the sequences whose experts are recorded."""
        rows = enumerate(zip(self.requests, self.positions.tolist(), strict=True))
        return [
            SequenceRows(request.routed_experts, position, 1, row)
            for row, (request, position) in rows
            if request.routed_experts is not None
        ]

    def advance(self, tokens: torch.Tensor) -> None:
        """The drawn `tokens` [rows] are the pending ones of the next step.

        They may be on the device, or on the host.
        """
        self._tokens = tokens
        self.positions += 1
        self.counts += 1
        if self._kept is not None:
            self._kept.advance()


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens to cache at positions `start`, `start` + 1, ... of a sequence that has `blocks`.

    These may have padding behind them: a row of the block tables. `record` is that of the sequence,
    where experts are recorded, `state` the slot of its recurrent states, `images` are those of its
    prompt.
    """

    tokens: list[int]
    start: int
    blocks: Ints
    record: ExpertRecord | None = None
    state: int = 0
    images: PlacedImages | None = None

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.tokens)


def prefill_batches(
    jobs: Sequence[Prefill], cache: KVCache, device: torch.device
) -> Iterator[tuple[PassInputs, list[SequenceRows]]]:
    """Passes that cache the jobs' tokens, and the sequences whose experts are recorded.

    Jobs of like length are padded to the longest of their group; padding is written to block 0.
    """
    jobs = sorted(jobs, key=lambda job: -len(job.tokens))
    pending: list[Sequence[Prefill]] = []
    for start, stop in split([len(job.tokens) for job in jobs], _GROUP_TOKENS[device.type]):
        for group in _within_limits(jobs[start:stop], cache):
            used = sum(len(other) * len(other[0].tokens) for other in pending)
            if pending and used + len(group) * len(group[0].tokens) > PREFILL_TOKENS:
                yield _prefill_pass(pending, cache, device)
                pending = []
            pending.append(group)
    if pending:
        yield _prefill_pass(pending, cache, device)


def _within_limits(jobs: Sequence[Prefill], cache: KVCache) -> Iterator[Sequence[Prefill]]:
    """Jobs in parts that a pass can compute, and whose keys can be read at once."""
    start, most = 0, max(1, PREFILL_TOKENS // len(jobs[0].tokens))
    while start < len(jobs):
        stop, pages = start, 0
        while stop < min(start + most, len(jobs)):
            pages = max(pages, cache.num_pages(jobs[stop].stop))
            if stop > start and cache.rows_at_once(stop + 1 - start, pages) <= stop - start:
                break
            stop += 1
        yield jobs[start:stop]
        start = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBatch:
    """A pass over the pending tokens of rows and the drafts behind them: rows of several tokens.

    `requests`, `slots` and `counts` [tokens] are those of every token whose successor is drawn, row
    by row, `counts` with the guessed tokens before it. `starts` [rows] are where rows begin
    among them. `places` [tokens] are where they are in the pass, which pads rows of other lengths.
    `rows` [rows] are where its rows begin there.
    """

    inputs: PassInputs
    places: torch.Tensor
    rows: list[int]
    requests: list[Request]
    slots: Ints
    counts: Ints
    starts: list[int]
    sampling: SamplingBatch

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[Request, int, Prefill]],
        cache: KVCache,
        vocab_size: int,
        device: torch.device,
        uniforms_of: UniformsOf | None,
    ) -> "VerifyBatch":
        """Rows (request, slot, pending token and draft), those with most tokens first.

        `uniforms_of` gives what tokens are drawn by, on the rank that draws them.
        """
        jobs = [job for _, _, job in rows]
        sizes = [len(job.tokens) for job in jobs]
        cuts = split(sizes, _GROUP_TOKENS[device.type])
        groups = [
            group for start, stop in cuts for group in _within_limits(jobs[start:stop], cache)
        ]
        # A group's rows are as wide as its first.
        widths = [len(group[0].tokens) for group in groups for _ in group]
        begins = np.cumsum([0, *widths[:-1]])
        inner = np.concatenate([np.arange(size) for size in sizes])
        which = np.repeat(np.arange(len(rows)), sizes)
        requests = [rows[row][0] for row in which.tolist()]
        slots = np.array([slot for _, slot, _ in rows])[which]
        counts = np.array([len(request.response_ids) for request, _, _ in rows])[which] + inner
        arrays: dict[str, Array] = {"places": begins[which] + inner}
        if uniforms_of is not None:
            arrays["uniforms"] = uniforms_of(requests, slots, counts)
        inputs, sent = _prefill_inputs(groups, cache, device, arrays)
        if cache.states is not None:
            inputs.paged.states = draft_states(cache.states, _state_rows(groups), device)
        return cls(
            inputs=inputs,
            places=sent["places"],
            rows=begins.tolist(),
            requests=requests,
            slots=slots,
            counts=counts,
            starts=np.cumsum([0, *sizes[:-1]]).tolist(),
            sampling=sampling_batch([r.sampling for r in requests], vocab_size, device),
        )


def sampling_batch(
    params: Sequence[SamplingParams], vocab_size: int, device: torch.device
) -> SamplingBatch:
    """The batch of these parameters; rows that are alike need nothing from the host."""
    first = params[0]
    if not first.edits_logits and params.count(first) == len(params):  # no call a row
        return SamplingBatch.alike(first, len(params), vocab_size, device)
    return SamplingBatch.of(params, vocab_size, device)


def _prefill_pass(
    groups: Sequence[Sequence[Prefill]], cache: KVCache, device: torch.device
) -> tuple[PassInputs, list[SequenceRows]]:
    """The pass of these groups, and the sequences whose experts are recorded."""
    spans, start = [], 0
    for jobs in groups:
        width = len(jobs[0].tokens)
        for row, job in enumerate(jobs):
            if job.record is not None:
                first = start + row * width
                spans.append(SequenceRows(job.record, job.start, len(job.tokens), first))
        start += len(jobs) * width
    inputs, _ = _prefill_inputs(groups, cache, device, {})
    if cache.states is not None:
        rows = _state_rows(groups)
        inputs.paged.states = state_batch(cache.states, rows, device, cache.states.continues)
    return inputs, spans


def _state_rows(groups: Sequence[Sequence[Prefill]]) -> list[StateRows]:
    """The recurrent states of a pass's groups, each padded to its first row."""
    rows, start = [], 0
    for jobs in groups:
        columns = ((len(job.tokens), job.state, job.start) for job in jobs)
        counts, slots, begins = map(np.array, zip(*columns, strict=True))
        rows.append(StateRows(start, int(counts[0]), counts, slots, begins))
        start += len(jobs) * int(counts[0])
    return rows


def _prefill_inputs(
    groups: Sequence[Sequence[Prefill]],
    cache: KVCache,
    device: torch.device,
    others: Mapping[str, Array],
) -> tuple[PassInputs, dict[str, torch.Tensor]]:
    """The pass of these groups, and the tensors of `others`: all of it gets there in one copy."""
    shapes = [(len(jobs), len(jobs[0].tokens)) for jobs in groups]
    num_tokens = sum(rows * width for rows, width in shapes)
    token_ids, positions, blocks, offsets = (np.zeros(num_tokens, np.int64) for _ in range(4))
    tables: list[Ints] = []
    start = 0
    for jobs, (_, width) in zip(groups, shapes, strict=True):
        pages = cache.num_pages(max(job.stop for job in jobs))
        table = np.zeros((len(jobs), pages), np.int64)
        for row, job in enumerate(jobs):
            used = job.blocks[:pages]
            table[row, : len(used)] = used
            at = slice(start + row * width, start + row * width + len(job.tokens))
            token_ids[at] = job.tokens
            positions[at] = np.arange(job.start, job.stop)
            page, offsets[at] = np.divmod(positions[at], cache.block_size)
            blocks[at] = table[row, page]
        tables.append(table)
        start += len(jobs) * width
    arrays = {"token_ids": token_ids, "positions": positions, "blocks": blocks, "offsets": offsets}
    rotations, images = _images_of(groups, positions)
    if rotations is not None:
        arrays["rotations"] = rotations
    named = {f"table {number}": table for number, table in enumerate(tables)}
    sent = upload({**arrays, **named, **others}, device)

    paged, start = [], 0
    for number, (jobs, (rows, width)) in enumerate(zip(groups, shapes, strict=True)):
        paged.append(
            PagedGroup(
                start=start,
                rows=rows,
                queries=width,
                keys=cache.keys(max(job.stop for job in jobs)),
                positions=sent["positions"][start : start + rows * width].view(rows, width),
                pages=cache.pages(sent[f"table {number}"]),
                # The memory plan of a GPU counts masks: preempted samples may need them.
                whole=device.type == "cpu" and all(job.start == 0 for job in jobs),
            )
        )
        start += rows * width
    batch = PagedBatch(cache, (sent["blocks"], sent["offsets"]), paged)
    rest = sent.get("uniforms"), sent.get("rotations"), images
    inputs = PassInputs(batch, sent["token_ids"], sent["positions"], *rest)
    return inputs, sent


def _images_of(
    groups: Sequence[Sequence[Prefill]], positions: Ints
) -> tuple[Ints | None, PassImages | None]:
    """Rotary positions [3, tokens] of a pass, where prompts have images, and those images."""
    rotations: Ints | None = None
    start, pads, parts = 0, [], []
    for jobs in groups:
        width = len(jobs[0].tokens)
        for job in jobs:
            if job.images is not None:
                if rotations is None:
                    rotations = np.tile(positions, (3, 1))
                rotations[:, start : start + len(job.tokens)] = job.images.at(job.start, job.stop)
                of_job = job.images.within(job.start, job.stop)
                if of_job.start < of_job.stop:
                    pads.append(job.images.pads[of_job] - job.start + start)
                    parts.append((job.images.images, of_job))
            start += width
    return rotations, PassImages(np.concatenate(pads), parts) if parts else None
