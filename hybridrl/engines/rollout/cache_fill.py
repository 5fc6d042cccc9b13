"""How the KV cache of admitted requests is filled: computed, copied, or replayed."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from hybridrl.engines.rollout.batch import DecodeBatch, Prefill, prefill_batches
from hybridrl.engines.rollout.device_copies import upload
from hybridrl.engines.rollout.entries import Admitted, Entry, Lane
from hybridrl.engines.rollout.expert_record import (
    ExpertRecord,
    ExpertRecorder,
    Experts,
    SequenceRows,
)
from hybridrl.engines.rollout.interface import KV, Request
from hybridrl.engines.rollout.kept_groups import Ints, KeptGroups, group_pages
from hybridrl.engines.rollout.stage import RolloutStage
from hybridrl.models.paged_attention import KVCache
from hybridrl.models.router_replay import Routing

_EACH = 32  # decisions for which a choice holds
_LEAST_TOKENS = 64  # of a measurement: a pass of fewer has other costs
_FADES = 0.9  # of what is known, at each measurement


class Rate:
    """Seconds a token, by what was measured lately; None before that."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        if tokens >= _LEAST_TOKENS:
            self._seconds = _FADES * self._seconds + seconds
            self._tokens = _FADES * self._tokens + tokens

    @property
    def seconds(self) -> float | None:
        """The seconds that a token takes."""
        return self._seconds / self._tokens if self._tokens else None


class KVCosts:
    """Compares a copy to host memory and back with a prefill, by times that were measured.

    A copy has the states of recurrent layers, too, as many bytes as the keys and values of
    `state_tokens`, whatever the sequence's length. So short sequences are computed again, and long
    ones are copied. Where one of the two times is not known yet, a copy is made. Times are read
    anew after some decisions. `agree` gives all ranks of an instance those of one of them; without
    it they always copy. Copies have at most `most_tokens`, those of states included.

    *Example.* A token's prefill takes 8 us, its copies 1 us each, and states are as 500 tokens. 100
    tokens cost 800 us or 2 x 600: they are computed again. 1,000 cost 8,000 us or 2 x 1,500.
    """

    def __init__(
        self,
        agree: Callable[[list[float]], list[float]] | None,
        most_tokens: int,
        state_tokens: int = 0,
    ) -> None:
        self.prefill, self.copy = Rate(), Rate()
        self._agree, self._most_tokens, self._state_tokens = agree, most_tokens, state_tokens
        self._decided = 0
        self._prefill_s = self._copy_s = 0.0  # of a token; 0 is not known

    def copies(self, tokens: int, in_host: int) -> bool:
        """Whether `tokens` that give way are copied; host memory has `in_host` of others."""
        if self._agree is not None and self._decided % _EACH == 0:
            known = [self.prefill.seconds or 0.0, self.copy.seconds or 0.0]
            self._prefill_s, self._copy_s = self._agree(known)
        self._decided += 1
        copied = tokens + self._state_tokens
        if in_host + copied > self._most_tokens:
            return False
        if not (self._prefill_s and self._copy_s):
            return True
        return 2 * self._copy_s * copied <= self._prefill_s * tokens

    def timing_copy(self, tokens: int, memory: torch.Tensor) -> AbstractContextManager[None]:
        """Measure a copy of `tokens`, and of the states behind them."""
        return self.timing(self.copy, tokens + self._state_tokens, memory)

    @contextmanager
    def timing(self, rate: Rate, tokens: int, memory: torch.Tensor) -> Iterator[None]:
        """Measure what the body does with `tokens` in the `memory` of a cache, to its end."""
        _finish(memory)
        start = time.perf_counter()
        yield
        _finish(memory)
        rate.saw(tokens, time.perf_counter() - start)


def _finish(memory: torch.Tensor) -> None:
    """Wait for what a device still does with its memory: by reading a number of it."""
    if memory.numel():  # a stage of recurrent layers alone has none
        memory.view(-1)[0].item()


class CacheFiller:
    """Fills the cache up to the pending token of every request, and counts what that took.

    `recorder` keeps experts, where they are recorded. With `keep` lanes keep gathered keys and
    values (`KeptGroups`), if they are on a CPU.
    """

    def __init__(
        self,
        stage: RolloutStage,
        recorder: ExpertRecorder | None,
        costs: KVCosts,
        device: torch.device,
        block_size: int,
        vocab_size: int,
        keep: bool,
    ) -> None:
        self._stage, self._recorder, self._device = stage, recorder, device
        self._costs = costs
        self._block_size, self._vocab_size = block_size, vocab_size
        self._keeps = keep and device.type == "cpu"
        self.prefill_calls = self.prefill_tokens = 0
        self.replayed_tokens = self.restored_tokens = 0

    def fill(self, admitted: Admitted, cache: KVCache, tables: Ints, timed: bool) -> None:
        """Do the work of an admission, in its order; `timed`: learn what a prefill costs."""
        if cache.states is not None and admitted.reset:
            cache.states.reset(admitted.reset)
        self._prefill(admitted.prefixes, cache, timed)
        for record, prefix in admitted.sharing:
            record.append(prefix.whole())
        if admitted.copies:
            pairs = upload({"copies": np.array(admitted.copies)}, self._device)["copies"]
            cache.copy(*pairs.unbind(1))
        if cache.states is not None and admitted.state_copies:
            cache.states.copy(admitted.state_copies)
        for entry in admitted.restored:
            self._restore(entry, cache, tables)
        self._prefill(admitted.prompts, cache, timed)
        for entry in admitted.replayed:
            self._replay(entry, cache, tables)

    def check(self, request: Request) -> None:
        """Raise ValueError for keys and values that are not those of this rank, or incomplete."""
        if request.kv is None:
            return
        tokens = request.num_tokens - 1
        if request.turns:  # a reply may not have been computed
            tokens = min(tokens, request.kv.tokens)
        got, wanted = request.kv.blocks, self._stage.kv_shape(tokens)
        if tuple(got.shape) != wanted or got.dtype != self._stage.dtype:
            raise ValueError(
                f"request {request.id!r} comes with a KV cache {list(got.shape)} {got.dtype}; "
                f"wanted [layers, 2, kv_heads, tokens, head_dim] = {list(wanted)} "
                f"{self._stage.dtype}"
            )
        states, size = request.kv.states, self._stage.state_bytes
        if (0 if states is None else len(states)) != size:
            got_bytes = "none" if states is None else f"{len(states)} bytes"
            raise ValueError(
                f"request {request.id!r} comes with recurrent states of {got_bytes}; wanted {size}"
            )

    def read(self, entry: Entry, tables: Ints, cache: KVCache) -> KV:
        """What an entry has cached, in host memory."""
        blocks = entry.blocks if entry.lane is None else tables[entry.slot]
        kept = cache.read_blocks(blocks.tolist(), entry.cached)
        return KV(kept, None if cache.states is None else cache.states.read(entry.state))

    def lane_batch(self, lane: Lane, cache: KVCache, tables: Ints) -> DecodeBatch:
        """The batch of a lane's next step; it stays while no sequence joins."""
        batch, kept = lane.batch, lane.kept
        if batch is not None and (kept is None or kept.steps_left > 0):
            return batch
        if batch is not None and kept is not None:  # only the rows' places change
            slots = batch.slots.tolist()
            kept.arrange(list(zip(slots, batch.positions.tolist(), strict=True)), tables)
            row_of = {slot: row for row, slot in enumerate(slots)}
            lane.take([row_of[slot] for slot in kept.slots])
            return batch
        if self._keeps:
            if kept is None or kept.cache is not cache:
                overhead = group_pages(self._device, self._block_size)
                kept = lane.kept = KeptGroups(cache, lane.index, overhead, tables.shape[1])
            kept.arrange([(entry.slot, entry.length - 1) for entry in lane.entries], tables)
        rows = [(entry.request, entry.slot, entry.length) for entry in lane.entries]
        lane.batch = self._batch(rows, lane.entries, kept)
        return lane.batch

    def _batch(
        self,
        rows: Sequence[tuple[Request, int, int]],
        entries: Sequence[Entry],
        kept: KeptGroups | None = None,
    ) -> DecodeBatch:
        """Rows (request, slot, length) of these `entries` that decode together."""
        sizes = self._block_size, self._vocab_size
        states = {e.slot: e.state for e in entries}
        deltas: dict[int, int] = {}
        for entry in entries:
            if entry.images is not None:
                deltas[entry.slot] = entry.delta
        return DecodeBatch(rows, *sizes, self._device, kept, states, deltas)

    # Experts

    def routing(self, spans: list[SequenceRows], rows: int) -> Routing | None:
        """Where the experts of a pass of `rows` tokens are recorded, and those to replay."""
        return None if self._recorder is None else self._recorder.routing(spans, rows)

    def new_routing(self) -> Routing | None:
        """Where the experts of new tokens are recorded, which have none to replay."""
        return None if self._recorder is None else Routing(records=True)

    def keep(self, spans: list[SequenceRows], routing: Routing | None) -> None:
        """Append what a pass has recorded to the records of its sequences."""
        if self._recorder is not None and routing is not None:
            self._recorder.keep(spans, routing)

    def experts(self, routing: Routing, rows: int) -> Experts:
        """What a decode step has recorded [rows, layers, k]."""
        assert self._recorder is not None
        return self._recorder.experts(routing, rows)

    def join_records(self, records: Iterable[ExpertRecord | None]) -> None:
        """Add the layers of other stages to records that leave the engine."""
        if self._recorder is not None:
            self._recorder.join([record for record in records if record is not None])

    # Keys and values

    def _prefill(self, jobs: list[Prefill], cache: KVCache, timed: bool = False) -> None:
        """Write the keys and values of the jobs' tokens."""
        jobs = [job for job in jobs if job.tokens]
        num_tokens = sum(len(job.tokens) for job in jobs)
        self.prefill_tokens += num_tokens
        timing: AbstractContextManager[None] = nullcontext()
        if timed and jobs:
            timing = self._costs.timing(self._costs.prefill, num_tokens, cache.blocks)
        with timing:
            for inputs, spans in prefill_batches(jobs, cache, self._device):
                routing = self.routing(spans, len(inputs.token_ids))
                self._stage.prefill(inputs, routing)
                self.keep(spans, routing)
                self.prefill_calls += 1

    def _restore(self, entry: Entry, cache: KVCache, tables: Ints) -> None:
        """Write the keys and values that a request carries to its blocks."""
        request = entry.request
        assert request.kv is not None
        cache.write_blocks(tables[entry.slot].tolist(), request.kv.blocks)
        if cache.states is not None:
            assert request.kv.states is not None
            cache.states.write(entry.state, request.kv.states)
        self.restored_tokens += request.kv.tokens
        request.kv = None  # if it is preempted, its tokens are recomputed

    def _replay(self, entry: Entry, cache: KVCache, tables: Ints) -> None:
        """Compute a response again by the passes that have made it; nothing is sampled.

        Turns are fed token by token. A reply is one pass, with the turn's last token before it.
        """
        request, num_prompt = entry.request, len(entry.request.prompt_ids)
        starts = [turn.start for turn in request.turns] + [request.turn_start]
        stops = [turn.stop for turn in request.turns] + [len(request.response_ids)]
        cached = stops[0]
        for start, stop in zip(starts, stops, strict=True):
            if start > 0:
                first, last = num_prompt + cached - 1, num_prompt + start - 1
                reply = entry.tokens()[first:last]
                rest = tables[entry.slot], request.routed_experts, entry.state, entry.images
                self._prefill([Prefill(reply, first, *rest)], cache)
            self._feed(entry, start, stop, cache, tables)
            cached = stop

    def _feed(self, entry: Entry, start: int, stop: int, cache: KVCache, tables: Ints) -> None:
        """The decode steps that have made response tokens [start, stop)."""
        request = entry.request
        before = replace(request, response_ids=request.response_ids[:start])
        batch = self._batch([(before, entry.slot, before.num_tokens)], [entry])
        for token in request.response_ids[start:stop]:
            spans = batch.spans()
            routing = self.routing(spans, 1)
            self._stage.feed(batch.inputs(cache, tables), routing)
            self.keep(spans, routing)
            batch.advance(torch.tensor([token]))
        self.replayed_tokens += stop - start
