"""Decoding by steps of a fixed sequence (`GraphStep`), which the host reads one step late.

The host writes a sequence's state when it joins, and gives it blocks ahead. All else of a step is
on the device, so the host launches the next one before it knows the tokens of the last.
"""

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from hybridrl.engines.rollout.admission import Admission
from hybridrl.engines.rollout.device_copies import Array, Download, upload
from hybridrl.engines.rollout.entries import Entry, GraphRows, Lane
from hybridrl.engines.rollout.expert_record import ExpertRecorder, Experts
from hybridrl.engines.rollout.graph_capture import CapturedSteps
from hybridrl.engines.rollout.graph_step import GraphStep, obstacle
from hybridrl.engines.rollout.interface import EngineParts, Request, SamplingParams
from hybridrl.engines.rollout.kept_groups import Ints
from hybridrl.engines.rollout.requests import tokens_left
from hybridrl.engines.rollout.stage import Drawn, DrawnTokens, RolloutStage
from hybridrl.kernels.decode_state import RUNNING, DecodeState
from hybridrl.models.paged_attention import KVCache

logger = logging.getLogger(__name__)

_FIRST_CAPABILITY = (8, 0)  # of GPUs that the kernels are compiled for
_STOPS = 8  # stop tokens that the device knows; the host sees any other a step later


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """How steps are computed: by `kernels`, `decode_triton` or `decode_torch`.

    Rows are filled up to the next of `buckets`; more rows than the largest stay as they are. With
    `captures` the step of a bucket is a CUDA graph.
    """

    kernels: ModuleType
    buckets: tuple[int, ...]
    captures: bool


def graph_settings(parts: EngineParts) -> GraphSettings | None:
    """The settings of an engine on this device; None where it has no graph steps."""
    buckets = tuple(sorted(parts.rollout.graph_buckets))
    if parts.device.type == "cuda" and buckets and _runs_kernels(parts.device):
        from hybridrl.kernels import decode_triton

        return GraphSettings(decode_triton, buckets, captures=True)
    return None


def _runs_kernels(device: torch.device) -> bool:
    """Whether a GPU runs the Triton kernels of a step, which are compiled for Ampere and later."""
    recent = torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    if recent and torch.version.cuda is not None and importlib.util.find_spec("triton"):
        return True
    logger.info("decode steps are no CUDA graphs: their kernels want Triton and an Ampere GPU")
    return False


def can_step(stage: RolloutStage, deterministic: bool, speculation: object) -> bool:
    """Whether an engine's rows may decode by graph steps; the log says why not."""
    reason = obstacle(stage)
    if deterministic:
        # Products of another number of rows may round otherwise.
        reason = "deterministic: a sample decodes alone, and is replayed so"
    elif speculation is not None:
        reason = "drafts are verified by passes of several tokens a row"
    if reason:
        logger.info("decode steps are no CUDA graphs: %s", reason)
    return not reason


@dataclass(frozen=True, slots=True)
class _Underway:
    """A step that was launched, `positions` [rows] of the tokens that it fed, and their experts.

    `experts` is None where they are not recorded.
    """

    rows: GraphRows
    positions: Ints
    drawn: Drawn
    experts: Download | None


@dataclass(frozen=True, slots=True)
class LateTokens:
    """What a step has drawn for the requests that still run; they had `cached` tokens together.

    `experts` [rows, layers, k] are those of the tokens that it fed, None where none are recorded.
    `whole`: these are the rows of the lane as it is now, none less and none more.
    """

    requests: list[Request]
    slots: Ints
    drawn: DrawnTokens
    experts: Experts | None
    cached: int
    whole: bool


class GraphDecoder:
    """The steps of an engine's only lane, and the state of its rows on the device.

    The state is made with the first step over a cache, and goes with it (`free`). A slot is written
    when a sequence joins, from its request. After that the device is ahead of the request by the
    steps that are underway. `positions`, `counts` and `blocks` [slots] are what the device has once
    these are done. A row that ended by its text, which only the host sees, draws tokens of no use
    in steps underway: `collect` drops them, and what they wrote is in blocks that are free, behind
    all that their next owner reads.

    Example: step 1 is launched, then step 2, then the tokens of step 1 are read, of which one ends
    its row by a stop token. In step 2 its slot has ended on the device, too: it draws nothing.
    """

    def __init__(
        self,
        stage: RolloutStage,
        settings: GraphSettings,
        slots: int,
        max_sequence: int,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        """The `recorder` tells experts of this rank's layers from those of others."""
        self._recorder = recorder
        self._stage, self._settings, self._device = stage, settings, stage.device
        self._max_sequence, self._spare = max_sequence, slots
        self._positions, self._counts, self._limits, self._blocks = np.zeros((4, slots), np.int64)
        self._written: list[tuple[Entry, int] | None] = [None] * slots
        self._underway: list[_Underway] = []
        self._told: set[str] = set()
        self.num_steps = self.num_captured = 0
        self.free()

    def free(self) -> None:
        """Drop what depends on the addresses of weights and cache; nothing runs."""
        self._steps: GraphStep | CapturedSteps | None = None
        self._state: DecodeState | None = None
        self._underway.clear()
        self.forget()

    def forget(self) -> None:
        """The device's state is of no use, since other steps have fed the rows."""
        assert not self._underway, "tokens are in flight"
        self._written = [None] * len(self._written)

    # Rows

    def arrange(self, lane: Lane, tables: Ints) -> bool:
        """Whether all rows of the lane can take graph steps; they are those of the next ones."""
        for entry in lane.entries:
            reason = _obstacle(entry.request.sampling)
            if reason:
                if reason not in self._told:
                    logger.info("a batch decodes without a CUDA graph: it has %s", reason)
                    self._told.add(reason)
                return False
        if lane.kept is not None:
            lane.flush(tables)
        for entry in lane.entries:
            if self._written[entry.slot] != (entry, entry.runs):
                self._join(entry)
        slots = np.array([entry.slot for entry in lane.entries])
        runs = [entry.runs for entry in lane.entries]
        requests = [entry.request for entry in lane.entries]
        lane.graph = GraphRows(list(lane.entries), requests, runs, slots, self._positions)
        return True

    def _join(self, entry: Entry) -> None:
        """Note what the host knows of a row; `_send` writes it to the device."""
        slot, request = entry.slot, entry.request
        self._written[slot] = None
        self._positions[slot], self._counts[slot] = entry.length - 1, len(request.response_ids)
        self._limits[slot] = len(request.response_ids) + tokens_left(request)
        self._blocks[slot] = 0

    # Steps

    def launch(self, lane: Lane, cache: KVCache, admission: Admission) -> bool:
        """Begin a step of the lane's rows, unless the steps underway end them all."""
        rows = lane.graph
        assert rows is not None
        if (self._counts[rows.slots] >= self._limits[rows.slots]).all():
            return False
        if self._steps is None:
            self._make(cache, admission.tables.shape[1])
        assert self._steps is not None
        self._send(rows, admission)
        assert rows.on_device is not None
        captured = self._num_graphs
        tokens, log_probs, *recorded = self._steps(rows.on_device)
        self.num_captured += self._num_graphs - captured
        self.num_steps += 1
        drawn = Drawn(tokens, [tokens, log_probs])
        experts = Download(recorded) if recorded else None
        self._underway.append(_Underway(rows, self._positions[rows.slots], drawn, experts))
        self._positions[rows.slots] += 1
        self._counts[rows.slots] += 1
        return True

    @property
    def _num_graphs(self) -> int:
        return self._steps.num_captured if isinstance(self._steps, CapturedSteps) else 0

    def _make(self, cache: KVCache, pages: int) -> None:
        """Make the state, empty, and the step over it."""
        settings, device = self._settings, self._device
        self._state = DecodeState.vacant(self._spare, pages, _STOPS, device)
        records = self._recorder is not None
        rest = self._max_sequence, settings.kernels, records
        step = GraphStep(self._stage, cache, self._state, *rest)
        self._steps = step
        if settings.captures:
            self._steps = CapturedSteps(step, settings.buckets, self._spare, device)

    def _send(self, rows: GraphRows, admission: Admission) -> None:
        """Write rows that have joined, and blocks that it lacks, by one copy to the device."""
        arrays: dict[str, Array] = {}
        joined: list[Entry] = []
        if rows.on_device is None:  # later steps have the same rows
            arrays["rows"] = self._padded(rows.slots)
            joined = [entry for entry in rows.entries if self._written[entry.slot] is None]
        if joined:
            arrays |= self._columns(joined)
        missing = admission.num_blocks[rows.slots] - self._blocks[rows.slots]
        if missing.any():
            arrays["cells"] = self._cells(rows.slots, missing, admission.tables)
        if not arrays:
            return
        sent = upload(arrays, self._device)
        state = self._state
        assert state is not None
        rows.on_device = sent.get("rows", rows.on_device)
        if joined:
            slots, (tokens, lengths, counts, limits) = sent["slots"], sent["numbers"].unbind(0)
            state.tokens[slots], state.lengths[slots] = tokens, lengths
            state.counts[slots], state.limits[slots] = counts, limits
            state.stops[slots], state.streams[slots] = sent["stops"], sent["streams"]
            state.temperatures[slots] = sent["temperatures"]
            state.ended[slots] = sent["ended"]
        if "cells" in sent:
            slots, pages, blocks = sent["cells"].unbind(0)
            state.tables[slots, pages] = blocks.int()
        for entry in joined:
            self._written[entry.slot] = entry, entry.runs

    def _padded(self, slots: Ints) -> Array:
        """The slots of a batch, and the spare one up to the size of its bucket."""
        size = min((size for size in self._settings.buckets if size >= len(slots)), default=0)
        padded = np.full(max(size, len(slots)), self._spare, np.int32)
        padded[: len(slots)] = slots
        return padded

    def _columns(self, joined: Sequence[Entry]) -> dict[str, Array]:
        """The state of rows that have joined, but for their blocks."""
        requests = [entry.request for entry in joined]
        slots = np.array([entry.slot for entry in joined])
        pending = np.array([(r.response_ids or r.prompt_ids)[-1] for r in requests])
        numbers = pending, self._positions[slots], self._counts[slots], self._limits[slots]
        stops = np.full((len(joined), _STOPS), -1, np.int32)
        for row, request in enumerate(requests):
            known = request.sampling.stop_token_ids[:_STOPS]
            stops[row, : len(known)] = known
        return {
            "slots": slots,
            "numbers": np.stack(numbers).astype(np.int32),
            "stops": stops,
            "streams": np.array([r.stream for r in requests], np.uint64).view(np.int64),
            "temperatures": np.array([r.sampling.temperature for r in requests], np.float32),
            "ended": np.full(len(joined), RUNNING, np.int32),
        }

    def _cells(self, slots: Ints, missing: Ints, tables: Ints) -> Array:
        """Slots, pages and blocks [3, cells] of the tables' cells that the device lacks."""
        which = np.repeat(slots, missing)
        first = np.repeat(self._blocks[slots] - (missing.cumsum() - missing), missing)
        pages = first + np.arange(len(which))
        self._blocks[slots] += missing
        return np.stack((which, pages, tables[which, pages]))

    def collect(self, lane: Lane, keep: int) -> Iterator[LateTokens]:
        """Wait for all steps but the last `keep`, and give what they have drawn, one by one.

        A request that has left the lane meanwhile gets nothing. The caller takes the tokens of a
        step, and lets requests leave, before it asks for the next.
        """
        while len(self._underway) > keep:
            step = self._underway.pop(0)
            requests, whole = step.rows.requests, step.rows is lane.graph
            rows = list(range(len(requests))) if whole else step.rows.running()
            if not rows:
                continue
            tokens, log_probs, _ = step.drawn.wait()
            yield LateTokens(
                requests if whole else [requests[row] for row in rows],
                step.rows.slots[rows],
                DrawnTokens(tokens[rows], log_probs[rows]),
                self._experts(step, rows),
                int(step.positions[rows].sum()),
                whole,
            )

    def _experts(self, step: _Underway, rows: list[int]) -> Experts | None:
        """The experts of a step's tokens in these rows, if they are recorded."""
        if self._recorder is None or step.experts is None:
            return None
        return self._recorder.whole(step.experts.wait()[0], len(step.positions))[rows]


def _obstacle(sampling: SamplingParams) -> str:
    """Why a step cannot draw by these parameters; empty if it can."""
    if sampling.edits_logits:
        return "penalties, min_new_tokens, logit_bias or bad_words"
    if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
        return "top_k, top_p or min_p"
    return ""
