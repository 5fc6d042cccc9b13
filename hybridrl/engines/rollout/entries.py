"""Unfinished requests of an engine, their lanes and KV blocks, and the prompts that they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch

from hybridrl.engines.rollout.batch import DecodeBatch, Prefill
from hybridrl.engines.rollout.blocks import NO_BLOCKS, BlockAllocator, Blocks
from hybridrl.engines.rollout.expert_record import ExpertRecord
from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.kept_groups import Ints, KeptGroups
from hybridrl.engines.rollout.responses import GrowingResponses
from hybridrl.engines.rollout.stage import Drawn
from hybridrl.models.images import PlacedImages
from hybridrl.models.router_replay import Routing


class EntryStatus(Enum):
    """What an unfinished request does.

    submit -> WAITING, or HELD where its turn has ended; WAITING -> admit -> RUNNING;
    RUNNING -> grow, which preempts -> WAITING; RUNNING -> hold -> HELD -> answer -> WAITING.
    """

    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # in a lane
    HELD = "held"  # its turn has ended, or it rests


@dataclass(slots=True, eq=False)
class Entry:
    """An unfinished request: `lane` and `slot` (its row in the block tables) while it runs.

    While it runs the blocks of its row cache all tokens but the pending one. Else its `blocks`
    cache the first `kept` ones. Its recurrent states, of the same tokens, are in the slot `state`;
    0: it has none. `lost` tokens were cached until it gave its blocks up, or they have
    `moved` to its request. `runs` counts how often it has begun to run. `images` are those of its
    prompt, None without any.
    """

    request: Request
    order: int
    blocks: Blocks = field(default_factory=lambda: NO_BLOCKS)
    slot: int = -1
    lane: "Lane | None" = None
    status: EntryStatus = EntryStatus.WAITING
    kept: int = 0
    lost: int = 0
    moved: bool = False
    runs: int = 0
    state: int = 0
    images: PlacedImages | None = None

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in the blocks."""
        return self.length - 1 if self.status is EntryStatus.RUNNING else self.kept

    @property
    def length(self) -> int:
        """Tokens of prompt and response, the pending one included."""
        return len(self.request.prompt_ids) + len(self.request.response_ids)

    @property
    def delta(self) -> int:
        """What a response token's number lacks to its rotary position."""
        return 0 if self.images is None else self.images.delta

    def tokens(self) -> list[int]:
        """Prompt and response."""
        return [*self.request.prompt_ids, *self.request.response_ids]


@dataclass(slots=True, eq=False)
class GraphRows:
    """The rows of a lane in its graph steps, for as long as none joins or leaves.

    Each is an entry in its run of that number, with its request. `of_slots` [slots] are the
    positions of all pending tokens, once what is underway is done. `on_device` [rows] are the slots
    there, perhaps with spare ones behind them; None before the first step.
    """

    entries: list[Entry]
    requests: list[Request]
    runs: list[int]
    slots: Ints
    of_slots: Ints
    on_device: torch.Tensor | None = None

    @property
    def positions(self) -> Ints:
        """Positions [rows] of the pending tokens."""
        return self.of_slots[self.slots]

    def running(self) -> list[int]:
        """The rows whose run has not ended."""
        rows = enumerate(zip(self.entries, self.runs, strict=True))
        return [row for row, (e, run) in rows if e.runs == run and e.lane is not None]


@dataclass(slots=True, eq=False)
class Lane:
    """Running sequences that decode together; a pipeline has as many lanes as stages.

    `drawn` holds the tokens of the last decode step until they are collected, and `routing` its
    experts; until then no sequence joins or leaves. `batch` stays until one joins, and without
    `kept` until one leaves. `kept` are the rows' gathered keys and values. In the next
    `steps_left` steps no row needs another block. Rows that take graph steps have `graph` in place
    of a batch. In `responses` are tokens of the rows that the requests lack until `write`.
    """

    index: int
    entries: list[Entry] = field(default_factory=list)
    batch: DecodeBatch | None = None
    graph: GraphRows | None = None
    kept: KeptGroups | None = None
    steps_left: int = 0
    drawn: Drawn | None = None
    routing: Routing | None = None
    responses: GrowingResponses | None = None

    @property
    def is_arranged(self) -> bool:
        """Whether the next pass takes the batch as it is."""
        return self.batch is not None and (self.kept is None or self.kept.steps_left > 0)

    def write(self) -> None:
        """Give the requests all tokens that were collected."""
        if self.responses is not None:
            self.responses.write()

    def end_batch(self) -> None:
        """Drop the batch, before a sequence joins or leaves."""
        assert self.drawn is None, "sampled tokens are in flight"
        self.write()
        self.batch, self.graph, self.responses, self.steps_left = None, None, None, 0

    def lengths(self) -> tuple[Ints, Ints]:
        """The rows' slots and lengths, in any order."""
        batch = self.batch or self.graph
        if batch is not None:
            return batch.slots, batch.positions + 1
        rows = np.array([(entry.slot, entry.length) for entry in self.entries], np.int64)
        slots, lengths = rows.reshape(-1, 2).T
        return slots, lengths

    def remove(self, leaving: Sequence[Entry], tables: Ints, keep: bool) -> None:
        """Sequences leave; with `keep` all their tokens are in the cache then."""
        slots = {entry.slot for entry in leaving}
        self.entries = [entry for entry in self.entries if entry.slot not in slots]
        if self.kept is None or self.batch is None or not self.entries:
            self.end_batch()
        else:
            assert self.drawn is None, "sampled tokens are in flight"
            self.write()
            rows = enumerate(self.batch.slots.tolist())
            self.take([row for row, slot in rows if slot not in slots])
        if self.kept is not None:
            self.kept.remove(slots, tables, keep)

    def take(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch alone, in this order."""
        assert self.batch is not None
        self.batch.take(rows)
        if self.responses is not None:
            self.responses.take(rows)

    def flush(self, tables: Ints) -> None:
        """Drop the batch and what it has gathered; all tokens are in the cache then."""
        self.end_batch()
        if self.kept is not None:
            self.kept.flush(tables, set(self.kept.slots))
        self.kept = None


class StateSlots:
    """Gives slots of recurrent states to sequences and prefixes: each has one or none."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots, 0, -1))

    @property
    def num_free(self) -> int:
        """Slots that no one has."""
        return len(self._free)

    def give(self, owner: "Entry | Prefix") -> int:
        """A slot for one that has none; the caller has checked `num_free`."""
        assert not owner.state, f"it has slot {owner.state}"
        owner.state = self._free.pop()
        return owner.state

    def release(self, owner: "Entry | Prefix") -> None:
        """Take the owner's slot, if it has one."""
        if owner.state:
            self._free.append(owner.state)
        owner.state = 0


@dataclass(slots=True)
class Prefix:
    """A shared prompt: `blocks` cache all but its last token, None while they are not computed.

    The prefix holds its blocks while `users` unfinished requests name it. Sequences share the full
    blocks and copy the last, partly filled one, since they write to it. They copy its recurrent
    states, too, which are in the slot `state`. `record` has the experts of the cached tokens, once
    they are computed, `images` are those of the prompt.
    """

    prompt_ids: list[int]
    users: int = 0
    blocks: Blocks | None = None
    record: ExpertRecord = field(default_factory=ExpertRecord)
    state: int = 0
    images: PlacedImages | None = None

    def release(self, allocator: BlockAllocator, states: "StateSlots | None") -> None:
        """Forget what is cached."""
        if self.blocks is not None:
            allocator.release(self.blocks)
        if states is not None:
            states.release(self)
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

    First the states in the slots `reset` become those of no tokens. Then `prefixes`, then copies of
    blocks and of states (`copies`, `state_copies`: source, destination). Then the keys and values
    that the requests of `restored` entries carry, then `prompts`, then the responses of `replayed`.
    The records of `sharing` entries begin with that of their prefix.
    """

    entries: list[Entry] = field(default_factory=list)
    prefixes: list[Prefill] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    reset: list[int] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[Prefill] = field(default_factory=list)
    replayed: list[Entry] = field(default_factory=list)
    restored: list[Entry] = field(default_factory=list)
    sharing: list[tuple[ExpertRecord, ExpertRecord]] = field(default_factory=list)
