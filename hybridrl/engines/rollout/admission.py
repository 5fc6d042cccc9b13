"""Admission of requests to lanes and KV blocks, as plain bookkeeping.

Nothing here depends on weights, so all ranks of a generation instance decide alike from the same
calls.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from hybridrl.engines.rollout.batch import DecodeBatch, Prefill
from hybridrl.engines.rollout.expert_record import ExpertRecord
from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.kept_groups import Ints, KeptGroups
from hybridrl.engines.rollout.kv_cache import BlockAllocator
from hybridrl.engines.rollout.stage import Drawn
from hybridrl.models.router_replay import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The largest requests of an engine; sequences are of prompt and response, in tokens.

    `last_cached`: the cache must have room for the last token of a response, too.
    """

    vocab_size: int
    max_sequence: int
    block_size: int
    num_blocks: int
    last_cached: bool = False


def check_positions(max_sequence: int, max_positions: int) -> None:
    """Raise ValueError for sequences that have more tokens than the model has positions."""
    if max_sequence > max_positions:
        raise ValueError(
            f"max_sequence={max_sequence}: the model's max_position_embeddings is {max_positions}"
        )


def check_requests(
    requests: Sequence[Request], limits: AdmissionLimits, unfinished: Container[object]
) -> None:
    """Raise ValueError for a request that can never run or whose id is taken."""
    seen: set[object] = set()
    for request in requests:
        _check(request, limits)
        if request.id in seen or request.id in unfinished:
            raise ValueError(f"request {request.id!r} is already in the engine")
        seen.add(request.id)


def _check(request: Request, limits: AdmissionLimits) -> None:
    name, sampling = f"request {request.id!r}", request.sampling
    if not request.prompt_ids:
        raise ValueError(f"{name} has an empty prompt")
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < limits.vocab_size:
        raise ValueError(
            f"{name} has token ids {min(request.prompt_ids)} to {max(request.prompt_ids)}; "
            f"the model's vocabulary has 0 to {limits.vocab_size - 1}"
        )
    if len(request.response_ids) >= sampling.max_new_tokens and not request.is_held:
        raise ValueError(
            f"{name} has {len(request.response_ids)} response tokens already; "
            f"rollout.max_new_tokens={sampling.max_new_tokens}"
        )
    total = len(request.prompt_ids) + sampling.max_new_tokens
    reach = (
        f"{name} may reach {total} tokens (prompt {len(request.prompt_ids)} + "
        f"rollout.max_new_tokens={sampling.max_new_tokens}); "
    )
    if total > limits.max_sequence:
        raise ValueError(f"{reach}the longest sequence is {limits.max_sequence}")
    if -(-(total - (not limits.last_cached)) // limits.block_size) > limits.num_blocks:
        cached = limits.num_blocks * limits.block_size
        raise ValueError(f"{reach}rollout.kv_cache_tokens={cached} can never hold it")


class EntryStatus(Enum):
    """What an unfinished request does.

    submit -> WAITING, or HELD where its turn has ended; WAITING -> admit -> RUNNING;
    RUNNING -> grow, which preempts -> WAITING; RUNNING -> hold -> HELD -> answer -> WAITING.
    """

    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # in a lane
    HELD = "held"  # its turn has ended


@dataclass(slots=True, eq=False)
class Entry:
    """An unfinished request: `lane` and `slot` (its row in `tables`) while it runs.

    Its `blocks` cache all tokens but the pending one while it runs, and else the first `kept` ones.
    `lost` tokens were cached until it gave its blocks up, or they have `moved` to its request.
    """

    request: Request
    order: int
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    lane: "Lane | None" = None
    status: EntryStatus = EntryStatus.WAITING
    kept: int = 0
    lost: int = 0
    moved: bool = False

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the blocks."""
        return self.length - 1 if self.status is EntryStatus.RUNNING else self.kept

    @property
    def length(self) -> int:
        """Tokens of prompt and response, the pending one included."""
        return len(self.request.prompt_ids) + len(self.request.response_ids)

    def tokens(self) -> list[int]:
        """Prompt and response."""
        return [*self.request.prompt_ids, *self.request.response_ids]


@dataclass(slots=True, eq=False)
class Lane:
    """Running sequences that decode together; a pipeline has as many lanes as stages.

    `drawn` holds the tokens of the last decode step until they are collected, and `routing` its
    experts; until then no sequence joins or leaves. `batch` stays from step to step until one does.
    `kept` are the rows' gathered keys and values, which stay longer.
    """

    index: int
    entries: list[Entry] = field(default_factory=list)
    batch: DecodeBatch | None = None
    kept: KeptGroups | None = None
    drawn: Drawn | None = None
    routing: Routing | None = None

    def end_batch(self) -> None:
        """Drop the batch, before a sequence joins or leaves."""
        assert self.drawn is None, "sampled tokens are in flight"
        self.batch = None

    def remove(self, leaving: Sequence[Entry], tables: Ints, keep: bool) -> None:
        """Sequences leave; with `keep` all their tokens are in the cache then."""
        self.end_batch()
        for entry in leaving:
            self.entries.remove(entry)
        if self.kept is not None:
            self.kept.remove([entry.slot for entry in leaving], tables, keep)

    def flush(self, tables: Ints) -> None:
        """Drop the batch and what it has gathered; all tokens are in the cache then."""
        self.end_batch()
        if self.kept is not None:
            self.kept.flush(tables)
        self.kept = None


@dataclass(slots=True)
class _Prefix:
    """A shared prompt: `blocks` cache all but its last token, None while they are not computed.

    The prefix holds its blocks while `users` unfinished requests name it. Sequences share the full
    blocks and copy the last, partly filled one, since they write to it. `record` has the experts of
    the cached tokens, once they are computed.
    """

    prompt_ids: list[int]
    users: int = 0
    blocks: list[int] | None = None
    record: ExpertRecord = field(default_factory=ExpertRecord)

    def release(self, allocator: BlockAllocator) -> None:
        """Forget what is cached."""
        allocator.release(self.blocks or [])
        self.blocks, self.record = None, ExpertRecord()

    def suits(self, record: ExpertRecord | None, whole: bool) -> bool:
        """Whether a sequence with this record may read the cached tokens.

        Parked sequences may have computed the prompt with other experts, under older weights. That
        is seen where records are `whole`; else they share nothing that is cached already.
        """
        if not record or self.blocks is None:
            return True
        if not whole:
            return False
        tokens = len(self.prompt_ids) - 1
        known = len(self.record) == tokens
        return known and np.array_equal(self.record.whole(), record.rows(0, tokens))


@dataclass(slots=True)
class Admitted:
    """The work that fills the cache for the admitted `entries`, in this order.

    First `prefixes`, then block copies (`copies`: source, destination). Then the keys and values
    that the requests of `restored` entries carry, then `prompts`, then the responses of `replayed`.
    The records of `sharing` entries begin with that of their prefix.
    """

    entries: list[Entry] = field(default_factory=list)
    prefixes: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[Prefill] = field(default_factory=list)
    replayed: list[Entry] = field(default_factory=list)
    restored: list[Entry] = field(default_factory=list)
    sharing: list[tuple[ExpertRecord, ExpertRecord]] = field(default_factory=list)


class Admission:
    """Waiting, running and held requests of one engine, first come first served.

    When blocks run out, those give theirs first that do not run: held ones, the longest held first,
    then answered ones that wait. `save` may copy what they have cached to their requests first.
    Then shared prompts are dropped, then the newest sequence is preempted. It waits at the head of
    the queue. What is lost is recomputed. The oldest sequence is never preempted, and fits alone,
    so the queue drains.

    Invariants: an entry is in one lane, or has no slot. The queue is in the order of submission, so
    that answered ones come before new ones. `tables` [slots, pages] has the blocks of running
    entries. A block is held once by each entry and each prefix that uses it.

    With `replays` a prefill ends before the response; the engine feeds its tokens one by one. With
    `records` every request has a record of its tokens' experts. Without `whole_records` these lack
    the layers of other stages, and must decide nothing: all ranks of an instance decide alike.
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
    ) -> None:
        self.lanes = [Lane(index) for index in range(num_lanes)]
        self.allocator = BlockAllocator(num_blocks)
        self.tables: Ints = np.zeros((max_running, -(-max_sequence // block_size)), np.int64)
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
        self._save = save
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._submitted = 0
        self._waiting: deque[Entry] = deque()
        self._held: dict[object, Entry] = {}  # the longest held first
        self._entries: dict[object, Entry] = {}
        self._prefixes: dict[object, _Prefix] = {}

    @property
    def num_running(self) -> int:
        """Sequences in lanes."""
        return sum(len(lane.entries) for lane in self.lanes)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Requests whose turn has ended."""
        return len(self._held)

    # Requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError, before any is, for one that can never run."""
        check_requests(requests, self._limits, self._entries)
        prompts = {name: prefix.prompt_ids for name, prefix in self._prefixes.items()}
        for request in requests:
            prompt = list(request.prompt_ids)
            if request.prefix is not None and prompts.setdefault(request.prefix, prompt) != prompt:
                raise ValueError(f"prefix {request.prefix!r} names two different prompts")
        for request in requests:
            record = request.routed_experts or ExpertRecord()
            copied = replace(
                request,
                prompt_ids=list(request.prompt_ids),
                response_ids=list(request.response_ids),
                log_probs=list(request.log_probs),
                routed_experts=record.copy() if self._records else None,
                turns=list(request.turns),
            )
            if copied.prefix is not None:
                prefix = self._prefixes.setdefault(copied.prefix, _Prefix(list(copied.prompt_ids)))
                prefix.users += 1
            entry = Entry(copied, self._submitted)
            self._submitted += 1
            self._entries[copied.id] = entry
            if copied.is_held:
                entry.status, self._held[copied.id] = EntryStatus.HELD, entry
            else:
                self._waiting.append(entry)

    def cached(self, id: object) -> Entry | None:
        """A request with cached tokens; None for one without any, and for an unknown one."""
        entry = self._entries.get(id)
        return entry if entry is not None and entry.cached else None

    def remove(self, id: object) -> Request | None:
        """Remove an unfinished request; None for an unknown one."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return None
        match entry.status:
            case EntryStatus.RUNNING:
                self._leave([entry])
            case EntryStatus.WAITING:
                self._waiting.remove(entry)
            case EntryStatus.HELD:
                del self._held[id]
        self._release(entry)
        request = entry.request
        if request.prefix is not None:
            prefix = self._prefixes[request.prefix]
            prefix.users -= 1
            if not prefix.users:
                prefix.release(self.allocator)
                del self._prefixes[request.prefix]
        return request

    def drop_prefixes(self) -> None:
        """Release the blocks of shared prompts."""
        for prefix in self._prefixes.values():
            prefix.release(self.allocator)

    # Turns

    def hold(self, requests: Sequence[Request]) -> None:
        """The turns of running requests have ended: they leave their lane and keep their blocks."""
        entries = [self._entries[request.id] for request in requests]
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
        insort(self._waiting, entry, key=lambda other: other.order)

    def give_up(self) -> None:
        """Release all blocks; nothing runs."""
        for entry in self._idle():
            self._evict(entry)
        self.drop_prefixes()

    def forget(self) -> None:
        """Release all blocks, and what was cached in them is of no use; nothing runs."""
        for entry in self._waiting:
            self._release(entry)
            if entry.moved:
                entry.request.kv, entry.moved = None, False
        self.drop_prefixes()

    def _idle(self) -> list[Entry]:
        """Who has blocks and does not run, in the order in which blocks are taken from them."""
        kept = [*self._held.values(), *reversed(self._waiting)]
        return [entry for entry in kept if entry.blocks]

    def _evict(self, entry: Entry) -> None:
        """Take the blocks of a request that does not run."""
        kvs = (other.request.kv for other in self._entries.values() if other.moved)
        entry.moved = self._save(entry, sum(kv.tokens for kv in kvs if kv is not None))
        if entry.moved:
            self.moved_tokens += entry.kept
        else:
            entry.lost = entry.kept
        self._release(entry)

    def _release(self, entry: Entry) -> None:
        self.allocator.release(entry.blocks)
        entry.blocks, entry.kept = [], 0

    # Admission

    def admit(self, lane: Lane) -> Admitted:
        """Move waiting requests to a lane, up to its share of all requests."""
        admitted = Admitted()
        total = min(self._max_running, self.num_running + self.num_waiting)
        share = -(-total // len(self.lanes))
        while self._waiting and self._free_slots and len(lane.entries) < share:
            entry = self._waiting[0]
            cached = self._reserve(entry, admitted)
            if cached is None:
                break
            self._waiting.popleft()
            tokens, request = entry.tokens(), entry.request
            if request.kv is not None:
                admitted.restored.append(entry)
            elif self._replays and not entry.kept:
                tokens = tokens[: len(request.prompt_ids)]
                admitted.replayed += [entry] if request.response_ids else []
            self.kept_tokens += entry.kept
            self.recomputed_tokens += max(0, entry.lost - cached)
            self._start(entry, lane)
            admitted.entries.append(entry)
            job = Prefill(tokens[cached:-1], cached, entry.blocks, request.routed_experts)
            admitted.prompts.append(job)
        return admitted

    def _reserve(self, entry: Entry, admitted: Admitted) -> int | None:
        """Allocate an entry's blocks; the tokens whose keys and values exist, None if no room.

        One block for each running sequence stays free, so that an admission does not cause a
        preemption in the next step.
        """
        kv, prefix = entry.request.kv, self._prefixes.get(entry.request.prefix)
        if kv is not None or entry.kept:
            prefix = None  # it has its keys and values itself, perhaps of other weights
        elif prefix is not None:
            record = entry.request.routed_experts
            prefix = prefix if prefix.suits(record, self._whole_records) else None
        cached = entry.kept if kv is None else kv.tokens
        need = -(-entry.length // self._block_size) - len(entry.blocks)
        spare = self.num_running + 1
        if prefix is not None and len(prefix.prompt_ids) > 1:
            full, partly = divmod(len(prefix.prompt_ids) - 1, self._block_size)
            for_prefix = full + bool(partly) if prefix.blocks is None else 0
            if self._make_room(need - full + for_prefix + spare):
                return self._share(entry, prefix, need, admitted)
        elif self._make_room(need + spare):
            entry.blocks += self.allocator.allocate(need)
            return cached
        if self.num_running:
            return None
        # Alone it always fits, without a block kept for a prefix.
        for other in self._idle():
            if other is not entry:
                self._evict(other)
        self.drop_prefixes()
        entry.blocks += self.allocator.allocate(need)
        return cached

    def _make_room(self, num: int) -> bool:
        """Whether `num` blocks are free, if need be those of held requests, the longest held first.

        None of them loses its blocks where that would not suffice.
        """
        missing = num - self.allocator.num_free
        if missing <= 0:
            return True
        held = [entry for entry in self._held.values() if entry.blocks]
        own = sum(self.allocator.count(block) == 1 for entry in held for block in entry.blocks)
        if own < missing:
            return False
        for entry in held:
            if self.allocator.num_free >= num:
                break
            self._evict(entry)
        return True

    def _share(self, entry: Entry, prefix: _Prefix, need: int, admitted: Admitted) -> int:
        """Allocate the blocks of an entry that shares a prefix; the tokens that this caches."""
        shared, record = len(prefix.prompt_ids) - 1, entry.request.routed_experts
        full, partly = divmod(shared, self._block_size)
        if prefix.blocks is None:
            prefix.blocks = self.allocator.allocate(full + bool(partly))
            if record:  # whoever comes next shares what this sequence had
                prefix.record.append(record.rows(0, shared))
            recording = prefix.record if record is not None else None
            admitted.prefixes.append(Prefill(prefix.prompt_ids[:-1], 0, prefix.blocks, recording))
        else:
            self.shared_tokens += shared
        self.allocator.share(prefix.blocks[:full])
        entry.blocks = prefix.blocks[:full] + self.allocator.allocate(need - full)
        if record is not None and not record:
            admitted.sharing.append((record, prefix.record))
        if partly:
            admitted.copies.append((prefix.blocks[full], entry.blocks[full]))
        return shared

    def _start(self, entry: Entry, lane: Lane) -> None:
        lane.end_batch()
        entry.lane, entry.slot = lane, self._free_slots.pop()
        entry.status, entry.kept, entry.lost, entry.moved = EntryStatus.RUNNING, 0, 0, False
        self.tables[entry.slot] = 0
        self.tables[entry.slot, : len(entry.blocks)] = entry.blocks
        lane.entries.append(entry)

    def _leave(self, entries: Sequence[Entry], keep: bool = False) -> None:
        """Take running sequences out of their lane; their blocks stay, filled with `keep`."""
        lane = entries[0].lane
        assert lane is not None
        lane.remove(entries, self.tables, keep)
        for entry in entries:
            self._free_slots.append(entry.slot)
            entry.slot, entry.lane = -1, None

    # Growth

    def _starting(self, lane: Lane) -> list[Entry]:
        """Entries whose pending token is the first of a block, oldest first."""
        if lane.batch is not None and (lane.batch.positions % self._block_size).all():
            return []
        starting = [e for e in lane.entries if e.length > len(e.blocks) * self._block_size]
        return sorted(starting, key=lambda entry: entry.order)

    def is_short(self, lane: Lane) -> bool:
        """Whether `grow` may preempt; then no lane may have tokens in flight."""
        free = self.allocator.num_free
        return len(lane.entries) > free and len(self._starting(lane)) > free

    def grow(self, lane: Lane) -> None:
        """A block for every pending token that starts one; preempts the newest when out."""
        for entry in self._starting(lane):
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
                (block,) = self.allocator.allocate(1)
                self.tables[entry.slot, len(entry.blocks)] = block
                entry.blocks.append(block)

    # Drafts

    def lacks_blocks(self, tokens: int) -> bool:
        """Whether some running entry may find no block within its next `tokens` tokens."""
        need = 0
        for entry in (entry for lane in self.lanes for entry in lane.entries):
            request = entry.request
            left = request.sampling.max_new_tokens - len(request.response_ids)
            # The last token that is made is cached by the step after it.
            cached = entry.length - 1 + min(tokens, left)
            need += max(0, -(-cached // self._block_size) - len(entry.blocks))
        return need > self.allocator.num_free

    def extend(self, entry: Entry, tokens: int) -> int:
        """Allocate blocks for `tokens` more than the pending one, from those that are free.

        Returns how many of them fit. `cut` releases the blocks.
        """
        wanted = -(-(entry.length + tokens) // self._block_size) - len(entry.blocks)
        blocks = self.allocator.allocate(max(0, min(wanted, self.allocator.num_free)))
        start = len(entry.blocks)
        self.tables[entry.slot, start : start + len(blocks)] = blocks
        entry.blocks += blocks
        return min(tokens, len(entry.blocks) * self._block_size - entry.length)

    def cut(self, entry: Entry) -> None:
        """Release the blocks that hold no cached token, as before `extend`."""
        used = -(-(entry.length - 1) // self._block_size)
        self.allocator.release(entry.blocks[used:])
        self.tables[entry.slot, used : len(entry.blocks)] = 0
        del entry.blocks[used:]
