"""Admission of requests to lanes and KV blocks, as plain bookkeeping.

Nothing here depends on weights, so all ranks of a generation instance decide alike from the same
calls.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from hybridrl.engines.rollout.batch import Prefill
from hybridrl.engines.rollout.blocks import NO_BLOCKS, BlockAllocator
from hybridrl.engines.rollout.entries import (
    Admitted,
    Entry,
    EntryStatus,
    Lane,
    Prefix,
    StateSlots,
)
from hybridrl.engines.rollout.expert_record import ExpertRecord
from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.kept_groups import Ints
from hybridrl.engines.rollout.requests import AdmissionLimits, check_requests, tokens_left
from hybridrl.models.image_files import Images
from hybridrl.models.images import PlacedImages


class Admission:
    """Waiting, running and held requests of one engine, first come first served.

    When blocks run out, those give theirs first that do not run: held ones, the longest held first,
    then answered ones that wait. `save` may copy what they have cached to their requests first.
    Then shared prompts are dropped, then the newest sequence is preempted. It waits at the head of
    the queue. What is lost is recomputed. The oldest sequence is never preempted, and fits alone,
    so the queue drains.

    Invariants: an entry is in one lane, or has no slot. The queue is in the order of submission, so
    that answered ones come before new ones. `tables` [slots, pages] has the blocks of running
    entries, the first `num_blocks` [slots] of each row, and 0 behind them. They end or rest with
    `limits` [slots] response tokens. A block is held once by each entry and each prefix that uses
    it.

    With `replays` a prefill ends before the response; the engine feeds its tokens one by one. With
    `records` every request has a record of its tokens' experts. Without `whole_records` these lack
    the layers of other stages, and must decide nothing: all ranks of an instance decide alike.

    A model with recurrent layers has `num_states` slots of states, at least one more than rows. A
    sequence has one for as long as it has blocks, and so has a prefix. Where they run out they are
    taken as blocks are, and a prefix that finds none is not shared. In host memory they count as
    `state_tokens`. `place` says where a prompt's images are.
    """

    def __init__(
        self,
        *,
        num_lanes: int,
        max_running: int,
        block_size: int,
        num_blocks: int,
        max_sequence: int,
        vocab_size: int,
        replays: bool = False,
        records: bool = False,
        whole_records: bool = True,
        save: Callable[[Entry, int], bool] = lambda entry, in_host: False,
        num_states: int = 0,
        state_tokens: int = 0,
        place: Callable[[Request], PlacedImages | None] = lambda request: None,
    ) -> None:
        self.lanes = [Lane(index) for index in range(num_lanes)]
        self.allocator = BlockAllocator(num_blocks)
        assert not num_states or num_states > max_running, (
            "a row needs states, and so does a prefix"
        )
        self.states = StateSlots(num_states) if num_states else None
        self.tables: Ints = np.zeros((max_running, -(-max_sequence // block_size)), np.int64)
        self.num_blocks: Ints = np.zeros(max_running, np.int64)
        self.limits: Ints = np.zeros(max_running, np.int64)
        self.shared_tokens = self.num_preempted = 0
        self.kept_tokens = self.moved_tokens = self.recomputed_tokens = 0
        self._max_running, self._block_size = max_running, block_size
        self._limits = AdmissionLimits(
            vocab_size=vocab_size,
            max_sequence=max_sequence,
            block_size=block_size,
            num_blocks=num_blocks,
        )
        self._replays, self._records, self._whole_records = replays, records, whole_records
        self._save, self._state_tokens, self._place = save, state_tokens, place
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._submitted = 0
        self.num_running = 0  # sequences in lanes
        self.waiting: deque[Entry] = deque()
        self._held: dict[object, Entry] = {}  # the longest held first
        self._entries: dict[object, Entry] = {}
        self._prefixes: dict[object, Prefix] = {}

    @property
    def requests(self) -> list[Request]:
        """All that wait, run, or are held."""
        return [entry.request for entry in self._entries.values()]

    @property
    def num_held(self) -> int:
        """Requests whose turn has ended."""
        return len(self._held)

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError, before any is, for one that can never run."""
        check_requests(requests, self._limits, self._entries)
        prompts: dict[object, tuple[list[int], Images]] = {}
        for request in requests:
            name, prompt = request.prefix, (list(request.prompt_ids), request.images)
            if name is not None and name not in prompts and name in self._prefixes:
                known = self._prefixes[name]
                images = () if known.images is None else known.images.images
                prompts[name] = known.prompt_ids, images
            if name is not None and prompts.setdefault(name, prompt) != prompt:
                raise ValueError(f"prefix {name!r} names two different prompts")
        for request in requests:
            record = request.routed_experts or ExpertRecord()
            placed = self._place(request) if request.images else None
            copied = replace(
                request,
                prompt_ids=list(request.prompt_ids),
                response_ids=list(request.response_ids),
                log_probs=list(request.log_probs),
                routed_experts=record.copy() if self._records else None,
                kept_ids=request.own_kept_ids() if request.sampling.keeps_ids else None,
                turns=list(request.turns),
                recomputed_at=list(request.recomputed_at),
            )
            if copied.prefix is not None:
                prefix = self._prefixes.setdefault(
                    copied.prefix, Prefix(list(copied.prompt_ids), images=placed)
                )
                prefix.users += 1
            entry = Entry(copied, self._submitted, images=placed)
            self._submitted += 1
            self._entries[copied.id] = entry
            if copied.is_held:
                entry.status, self._held[copied.id] = EntryStatus.HELD, entry
            else:
                self.waiting.append(entry)

    def cached(self, ids: Iterable[object]) -> list[Entry]:
        """The known ones of these requests that have cached tokens; the cache has them then."""
        entries = [entry for id in ids if (entry := self._entries.get(id)) and entry.cached]
        for lane, own in self._by_lane(entries):
            if lane.kept is not None:
                lane.kept.flush(self.tables, {entry.slot for entry in own})
        return entries

    def remove(self, ids: Iterable[object]) -> list[Request]:
        """Remove these requests; unknown ids are skipped."""
        entries = [entry for id in ids if (entry := self._entries.pop(id, None)) is not None]
        self._leave([entry for entry in entries if entry.status is EntryStatus.RUNNING])
        for entry in entries:
            match entry.status:
                case EntryStatus.WAITING:
                    self.waiting.remove(entry)
                case EntryStatus.HELD:
                    del self._held[entry.request.id]
            self._release(entry)
            name = entry.request.prefix
            if name is not None:
                prefix = self._prefixes[name]
                prefix.users -= 1
                if not prefix.users:
                    prefix.release(self.allocator, self.states)
                    del self._prefixes[name]
        return [entry.request for entry in entries]

    def drop_prefixes(self) -> None:
        """Release the blocks of shared prompts."""
        for prefix in self._prefixes.values():
            prefix.release(self.allocator, self.states)

    # Turns

    def hold(self, ids: Iterable[object]) -> None:
        """The turns of running requests have ended: they leave their lane and keep their blocks."""
        entries = [self._entries[id] for id in ids]
        for entry in entries:
            self.cut(entry)
        self._leave(entries, keep=True)
        for entry in entries:
            entry.status, entry.kept = EntryStatus.HELD, entry.length - 1
            self._held[entry.request.id] = entry

    def held(self, id: object) -> Request:
        """A held request; raises ValueError for another."""
        if id not in self._held:
            entry = self._entries.get(id)
            got = "unknown" if entry is None else entry.status.value
            raise ValueError(f"request {id!r} is {got}; only a held one can be answered")
        return self._held[id].request

    def answer(self, id: object) -> None:
        """A held request has its reply: it waits, before those that were submitted after it."""
        entry = self._held.pop(id)
        self._queue(entry)

    def _queue(self, entry: Entry) -> None:
        entry.status = EntryStatus.WAITING
        insort(self.waiting, entry, key=lambda other: other.order)

    def give_up(self) -> None:
        """Release all blocks; nothing runs."""
        for entry in self._idle():
            self._evict(entry)
        self.drop_prefixes()

    def forget(self) -> None:
        """Release all blocks, and what was cached in them is of no use; nothing runs."""
        for entry in self.waiting:
            self._release(entry)
            if entry.moved:
                entry.request.kv, entry.moved = None, False
        self.drop_prefixes()

    def _idle(self) -> list[Entry]:
        """Who has blocks and does not run, in the order in which blocks are taken from them."""
        kept = [*self._held.values(), *reversed(self.waiting)]
        return [entry for entry in kept if len(entry.blocks)]

    def _evict(self, entry: Entry) -> None:
        """Take the blocks of a request that does not run."""
        kvs = (other.request.kv for other in self._entries.values() if other.moved)
        in_host = sum(kv.tokens + self._state_tokens for kv in kvs if kv is not None)
        entry.moved = self._save(entry, in_host)
        if entry.moved:
            self.moved_tokens += entry.kept
        else:
            entry.lost = entry.kept
        self._release(entry)

    def _release(self, entry: Entry) -> None:
        self.allocator.release(entry.blocks)
        entry.blocks, entry.kept = NO_BLOCKS, 0
        if self.states is not None:
            self.states.release(entry)

    # Admission

    def admit(self, lane: Lane) -> Admitted:
        """Move waiting requests to a lane, up to its share of all requests."""
        admitted = Admitted()
        total = min(self._max_running, self.num_running + len(self.waiting))
        share = -(-total // len(self.lanes))
        while self.waiting and self._free_slots and len(lane.entries) < share:
            entry = self.waiting[0]
            cached = self._reserve(entry, admitted)
            if cached is None:
                break
            self.waiting.popleft()
            if self.states is not None and not entry.state:
                admitted.reset.append(self.states.give(entry))
            tokens, request = entry.tokens(), entry.request
            if request.kv is not None:
                admitted.restored.append(entry)
            elif self._replays and not entry.kept:
                tokens = tokens[: len(request.prompt_ids)]
                admitted.replayed += [entry] if request.response_ids else []
            if request.response_ids and request.kv is None and not entry.kept:
                request.recomputed_at.append(len(request.response_ids))
            self.kept_tokens += entry.kept
            self.recomputed_tokens += max(0, entry.lost - cached)
            self._start(entry, lane)
            admitted.entries.append(entry)
            table = self.tables[entry.slot]
            experts = request.routed_experts
            rest = table, experts, entry.state, entry.images
            job = Prefill(tokens[cached:-1], cached, *rest)
            admitted.prompts.append(job)
        return admitted

    def _reserve(self, entry: Entry, admitted: Admitted) -> int | None:
        """Allocate an entry's blocks; the tokens whose keys and values exist, None if no room.

        One block for each running sequence stays free, so that an admission does not cause a
        preemption in the next step.
        """
        kv, prefix = entry.request.kv, self._prefixes.get(entry.request.prefix)
        if self.states is not None and not entry.state and not self._spare(self.states, admitted):
            return None
        if kv is not None or entry.kept:
            prefix = None  # it has its keys and values itself, perhaps of other weights
        elif prefix is not None:
            record = entry.request.routed_experts
            prefix = prefix if prefix.suits(record, self._whole_records) else None
            if prefix is not None and self.states is not None and not prefix.state:
                prefix = prefix if self.states.num_free > 1 else None
        cached = entry.kept if kv is None else kv.tokens
        need = -(-entry.length // self._block_size) - len(entry.blocks)
        spare = self.num_running + 1
        if prefix is not None and len(prefix.prompt_ids) > 1:
            full, partly = divmod(len(prefix.prompt_ids) - 1, self._block_size)
            for_prefix = full + bool(partly) if prefix.blocks is None else 0
            if self._make_room(need - full + for_prefix + spare):
                return self._share(entry, prefix, need, admitted)
        elif self._make_room(need + spare):
            entry.blocks = np.append(entry.blocks, self.allocator.allocate(need))
            return cached
        if self.num_running:
            return None
        # Alone it always fits, without a block kept for a prefix.
        for other in self._idle():
            if other is not entry:
                self._evict(other)
        self.drop_prefixes()
        entry.blocks = np.append(entry.blocks, self.allocator.allocate(need))
        return cached

    def _spare(self, states: StateSlots, admitted: Admitted) -> bool:
        """Whether a slot of states is free, if need be one of those that do not run.

        Shared prompts give theirs up only before the first of an admission: the work of the others
        names their slots and blocks. They are then admitted in the next step.
        """
        for entry in () if states.num_free else self._idle():
            if not states.num_free:
                self._evict(entry)
        if not states.num_free and not admitted.entries:
            self.drop_prefixes()
        return states.num_free > 0

    def _make_room(self, num: int) -> bool:
        """Whether `num` blocks are free, if need be those of held requests, the longest held first.

        None of them loses its blocks where that would not suffice.
        """
        missing = num - self.allocator.num_free
        if missing <= 0:
            return True
        held = [entry for entry in self._held.values() if len(entry.blocks)]
        if sum((self.allocator.count(entry.blocks) == 1).sum() for entry in held) < missing:
            return False
        for entry in held:
            if self.allocator.num_free >= num:
                break
            self._evict(entry)
        return True

    def _share(self, entry: Entry, prefix: Prefix, need: int, admitted: Admitted) -> int:
        """Allocate the blocks of an entry that shares a prefix; the tokens that this caches."""
        shared, record = len(prefix.prompt_ids) - 1, entry.request.routed_experts
        full, partly = divmod(shared, self._block_size)
        if prefix.blocks is None:
            prefix.blocks = self.allocator.allocate(full + bool(partly))
            if record:  # whoever comes next shares what this sequence had
                prefix.record.append(record.rows(0, shared))
            recording = prefix.record if record is not None else None
            if self.states is not None:
                admitted.reset.append(self.states.give(prefix))
            rest = prefix.blocks, recording, prefix.state, prefix.images
            job = Prefill(prefix.prompt_ids[:-1], 0, *rest)
            admitted.prefixes.append(job)
        else:
            self.shared_tokens += shared
        self.allocator.share(prefix.blocks[:full])
        entry.blocks = np.append(prefix.blocks[:full], self.allocator.allocate(need - full))
        if record is not None and not record:
            admitted.sharing.append((record, prefix.record))
        if partly:
            admitted.copies.append((int(prefix.blocks[full]), int(entry.blocks[full])))
        if self.states is not None:
            admitted.state_copies.append((prefix.state, self.states.give(entry)))
        return shared

    def _start(self, entry: Entry, lane: Lane) -> None:
        lane.end_batch()
        self.num_running += 1
        entry.runs += 1
        entry.lane, entry.slot = lane, self._free_slots.pop()
        entry.status, entry.kept, entry.lost, entry.moved = EntryStatus.RUNNING, 0, 0, False
        self.num_blocks[entry.slot] = num = len(entry.blocks)
        self.tables[entry.slot, :num], self.tables[entry.slot, num:] = entry.blocks, 0
        entry.blocks = NO_BLOCKS
        self.limits[entry.slot] = len(entry.request.response_ids) + tokens_left(entry.request)
        lane.entries.append(entry)

    def _leave(self, entries: Sequence[Entry], keep: bool = False) -> None:
        """Take running sequences out of their lanes; their blocks stay, filled with `keep`."""
        for lane, own in self._by_lane(entries):
            lane.remove(own, self.tables, keep)
        self.num_running -= len(entries)
        for entry in entries:
            entry.blocks = self.tables[entry.slot, : self.num_blocks[entry.slot]].copy()
            self._free_slots.append(entry.slot)
            entry.slot, entry.lane = -1, None

    @staticmethod
    def _by_lane(entries: Sequence[Entry]) -> list[tuple[Lane, list[Entry]]]:
        """The running ones of the entries, lane by lane."""
        lanes: dict[int, tuple[Lane, list[Entry]]] = {}
        for entry in entries:
            if entry.lane is not None:
                lanes.setdefault(entry.lane.index, (entry.lane, []))[1].append(entry)
        return list(lanes.values())

    # Growth

    def _starting(self, lane: Lane, ahead: int = 0) -> Ints:
        """Slots of the rows whose pending token, or the one `ahead` of it, has no block yet."""
        slots, lengths = lane.lengths()
        return slots[lengths + ahead > self.num_blocks[slots] * self._block_size]

    def is_short(self, lane: Lane) -> bool:
        """Whether `grow` may preempt; then no lane may have tokens in flight."""
        free = self.allocator.num_free
        return len(lane.entries) > free and len(self._starting(lane)) > free

    def grow(self, lane: Lane, ahead: bool = False) -> None:
        """A block for every pending token that starts one; preempts the newest when out.

        With `ahead` a block more for the rows that will soon need it, if it is not missed: one for
        each running sequence stays free.
        """
        starting = self._starting(lane)
        if len(starting) > self.allocator.num_free:
            self._take(lane, starting)
        else:
            self._give(starting)
        if ahead:
            soon = self._starting(lane, self._block_size)
            soon = soon[self.num_blocks[soon] < self.tables.shape[1]]
            if len(soon) + self.num_running < self.allocator.num_free:
                self._give(soon)
        slots, lengths = lane.lengths()
        room = self.num_blocks[slots] * self._block_size - lengths
        lane.steps_left = int(room.min(initial=self._limits.max_sequence))

    def _give(self, slots: Ints) -> None:
        self.tables[slots, self.num_blocks[slots]] = self.allocator.allocate(len(slots))
        self.num_blocks[slots] += 1

    def _take(self, lane: Lane, starting: Ints) -> None:
        """`_give` where free blocks do not suffice: the oldest rows first."""
        rows = [entry for entry in lane.entries if entry.slot in starting]
        for entry in sorted(rows, key=lambda entry: entry.order):
            if entry.lane is None:
                continue  # preempted for an older one
            for idle in self._idle() if not self.allocator.num_free else ():
                if not self.allocator.num_free:
                    self._evict(idle)
            if not self.allocator.num_free:
                self.drop_prefixes()
            while not self.allocator.num_free and entry.lane is not None:
                running = (other for lane in self.lanes for other in lane.entries)
                victim = max(running, key=lambda other: other.order)
                self._leave([victim])
                self._release(victim)
                self._queue(victim)
                self.num_preempted += 1
            if entry.lane is not None:
                self._give(np.array([entry.slot]))

    # Drafts

    def lacks_blocks(self, tokens: int) -> bool:
        """Whether some running entry may find no block within its next `tokens` tokens."""
        need = 0
        for entry in (entry for lane in self.lanes for entry in lane.entries):
            request = entry.request
            left = request.sampling.max_new_tokens - len(request.response_ids)
            # The last token that is made is cached by the step after it.
            cached = entry.length - 1 + min(tokens, left)
            need += max(0, -(-cached // self._block_size) - int(self.num_blocks[entry.slot]))
        return need > self.allocator.num_free

    def extend(self, entry: Entry, tokens: int) -> int:
        """Allocate blocks for `tokens` more than the pending one, from those that are free.

        Returns how many of them fit. `cut` releases the blocks.
        """
        start = int(self.num_blocks[entry.slot])
        wanted = -(-(entry.length + tokens) // self._block_size) - start
        blocks = self.allocator.allocate(max(0, min(wanted, self.allocator.num_free)))
        stop = self.num_blocks[entry.slot] = start + len(blocks)
        self.tables[entry.slot, start:stop] = blocks
        return min(tokens, stop * self._block_size - entry.length)

    def cut(self, entry: Entry) -> None:
        """Release the blocks that hold no cached token, as before `extend`."""
        table, used = self.tables[entry.slot], -(-(entry.length - 1) // self._block_size)
        self.allocator.release(table[used : self.num_blocks[entry.slot]])
        table[used:] = 0
        self.num_blocks[entry.slot] = used
