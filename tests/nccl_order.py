"""A strict model of NCCL's order, fed with what the ranks of a gloo run have sent.

gloo forgives what NCCL does not: it buffers, needs no order between peers, and has no streams. So a
run that is green on a CPU may hang on GPUs. `nccl_recorder` logs what each rank of such a run does;
`check` runs the logs through this model and returns its faults. The model, of torch's NCCL backend
with communicators that are created at first use:

- The host issues operations. An operation runs on the stream of its communicator, after everything
  before it there. It also runs after what the compute stream has waited for at its issue.
- A collective or a batch of messages (`batch_isend_irecv`) uses the group's communicator; a single
  message one of its two ranks, in both directions.
- Nothing is buffered. A collective ends when it has begun on all ranks. A message ends when its
  other end has begun, a batch when all of its messages have ended.
- The first use of a communicator blocks the host until all of its ranks use it.
- `wait` makes the compute stream wait, not the host; reading a tensor (`item`, `cpu`) the host.
- Tensors on the CPU and pickled objects travel by gloo, where `wait` blocks the host.

The compute stream stands for all streams from which a rank issues collectives. FSDP2 issues its
gathers and reductions from streams of its own; what these wait for, the compute stream waits for
here. So the model has every wait of a GPU, and more: what ends under it ends on a GPU.

hybridrl's own collectives are issued from the compute stream alone. Its other streams carry copies
(`engines/train/activation_offload.py`), and `test_nccl_order.py` holds them to that.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

P2P = "p2p"


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a message; `peer` is the other end's global rank."""

    sends: bool
    peer: int
    num_bytes: int

    def __str__(self) -> str:
        return f"{'send to' if self.sends else 'receive from'} {self.peer}, {self.num_bytes} B"


@dataclass(frozen=True, slots=True)
class Op:
    """A collective, or messages (`kind` P2P), as a rank has issued it.

    `members` are the group's global ranks. `num_bytes` is what all ranks give alike, 0 where they
    may differ. `host` says that it travels by gloo, `device_only` that the group has no gloo.
    """

    group: str
    members: tuple[int, ...]
    kind: str
    num_bytes: int = 0
    root: int | None = None
    messages: tuple[Message, ...] = ()
    batched: bool = False
    host: bool = False
    device_only: bool = False
    site: str = ""

    def __str__(self) -> str:
        what = " and ".join(map(str, self.messages)) or f"{self.kind}, {self.num_bytes} B"
        if self.kind == P2P:
            what = f"{'batch' if self.batched else 'message'}: {what}"
        return f"{what}, on group {self.group}{f' ({self.site})' if self.site else ''}"


@dataclass(frozen=True, slots=True)
class Wait:
    """`work.wait()` of the operation at index `op` of the log."""

    op: int


@dataclass(frozen=True, slots=True)
class Sync:
    """The host reads a tensor of the device, so it waits for the compute stream."""

    site: str = ""


Event = Op | Wait | Sync
Log = Sequence[Event]
"""What one rank did, in order."""


class FaultKind(Enum):
    """What is found."""

    deadlock = "deadlock"
    differs = "collectives differ"
    partial_batch = "first batch of some ranks"
    cpu_tensor = "CPU tensor on a device group"


@dataclass(frozen=True, slots=True)
class Fault:
    """What would fail under NCCL."""

    kind: FaultKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.text}"


def check(logs: Sequence[Log]) -> list[Fault]:
    """The faults of a run; `logs` are those of all global ranks, in order."""
    return [
        *_cpu_tensors(logs),
        *_different_collectives(logs),
        *_partial_first_batches(logs),
        *_Model(logs).run(),
    ]


# Rules that need no order


def _ops(log: Log) -> Iterator[Op]:
    return (event for event in log if isinstance(event, Op))


def _groups(logs: Sequence[Log]) -> dict[str, tuple[int, ...]]:
    """The members of each group, as the first rank that uses it says."""
    members: dict[str, tuple[int, ...]] = {}
    for log in logs:
        for op in _ops(log):
            members.setdefault(op.group, op.members)
    return members


def _cpu_tensors(logs: Sequence[Log]) -> Iterator[Fault]:
    for rank, log in enumerate(logs):
        for op in _ops(log):
            if op.host and op.device_only:
                yield Fault(FaultKind.cpu_tensor, f"rank {rank}: {op}")


def _different_collectives(logs: Sequence[Log]) -> Iterator[Fault]:
    """Every rank of a group issues the same collectives, in one order."""
    for group, members in _groups(logs).items():
        by_rank = {
            rank: [op for op in _ops(logs[rank]) if op.group == group and op.kind != P2P]
            for rank in members
        }
        others = {op.members for rank in members for op in _ops(logs[rank]) if op.group == group}
        if len(others) > 1:
            yield Fault(FaultKind.differs, f"group {group} has the ranks {sorted(others)}")
            continue
        first = members[0]
        for rank in members[1:]:
            for host in (False, True):
                pair = ([op for op in by_rank[r] if op.host is host] for r in (first, rank))
                if difference := _first_difference(*pair):
                    one, other = difference
                    yield Fault(
                        FaultKind.differs, f"rank {first} has {one}; rank {rank} has {other}"
                    )


def _first_difference(ops: list[Op], others: list[Op]) -> tuple[Op | None, Op | None] | None:
    for number in range(max(len(ops), len(others))):
        one = ops[number] if number < len(ops) else None
        other = others[number] if number < len(others) else None
        if one is None or other is None or _signature(one) != _signature(other):
            return one, other
    return None


def _signature(op: Op) -> tuple[str, int, int | None]:
    return op.kind, op.num_bytes, op.root


def _partial_first_batches(logs: Sequence[Log]) -> Iterator[Fault]:
    """torch: if a group's first operation is a batch, all its ranks take part in it."""
    for group, members in _groups(logs).items():
        first = {
            rank: next((op for op in _ops(logs[rank]) if _communicator(op, rank) == (group,)), None)
            for rank in members
        }
        in_batch = [rank for rank, op in first.items() if op is not None and op.kind == P2P]
        if in_batch and len(in_batch) < len(members):
            yield Fault(
                FaultKind.partial_batch,
                f"of the ranks {list(members)} only {in_batch} begin with a batch:"
                f" {first[in_batch[0]]}",
            )


# The model

_Key = tuple[str | int, ...]


def _communicator(op: Op, rank: int) -> _Key:
    """What orders an operation of `rank`: a communicator; of gloo a group or a direction."""
    if op.kind != P2P:
        return (op.group, "host") if op.host else (op.group,)
    if op.batched:
        return (op.group,)
    (message,) = op.messages
    ends = (rank, message.peer) if message.sends else (message.peer, rank)
    return (op.group, "host", *ends) if op.host else (op.group, "pair", *sorted(ends))


@dataclass(slots=True)
class _Entry:
    """An operation that was issued: it begins when the compute stream has come to `after`."""

    op: Op
    rank: int
    key: _Key
    after: int
    done: bool = False
    open: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class _Rank:
    """The host's place in its log, what the compute stream waits for, and how far it has come."""

    log: Log
    place: int = 0
    compute: list[_Entry] = field(default_factory=list)
    position: int = 0
    issued: dict[int, _Entry] = field(default_factory=dict)

    def advance(self) -> None:
        """Let the compute stream pass what has ended."""
        while self.position < len(self.compute) and self.compute[self.position].done:
            self.position += 1


class _Model:
    """Runs the logs until no rank moves."""

    def __init__(self, logs: Sequence[Log]) -> None:
        self.ranks = [_Rank(log) for log in logs]
        self.queues: dict[_Key, dict[int, list[_Entry]]] = defaultdict(dict)
        self.created: set[_Key] = set()
        self.at_creation: dict[_Key, set[int]] = defaultdict(set)
        self.faults: list[Fault] = []

    def run(self) -> list[Fault]:
        """The faults of the order: what waits in the end, and messages of two sizes."""
        moved = True
        while moved:
            moved = False
            for number in range(len(self.ranks)):
                moved |= self._host(number)
            for key in list(self.queues):
                moved |= self._stream(key)
        waiting = [number for number in range(len(self.ranks)) if self._obstacle(number)]
        if waiting:
            self.faults.append(Fault(FaultKind.deadlock, self._cycle(waiting[0])))
        return self.faults

    def _host(self, number: int) -> bool:
        """Let the host of a rank go on as far as it can."""
        rank, begun = self.ranks[number], self.ranks[number].place
        while rank.place < len(rank.log) and self._event(rank, number, rank.log[rank.place]):
            rank.place += 1
        return rank.place > begun

    def _event(self, rank: _Rank, number: int, event: Event) -> bool:
        """Whether the host is past the event."""
        match event:
            case Op():
                return self._issue(rank, number, event)
            case Wait():
                entry = rank.issued[event.op]
                if entry.op.host:
                    return entry.done
                rank.compute.append(entry)
                rank.advance()
                return True
            case Sync():
                return rank.position == len(rank.compute)

    def _issue(self, rank: _Rank, number: int, op: Op) -> bool:
        key = _communicator(op, number)
        if not op.host and key not in self.created:
            present = self.at_creation[key]
            present.add(number)
            if present != self._members(key, op):
                return False
            self.created.add(key)
        entry = _Entry(op, number, key, 0 if op.host else len(rank.compute))
        entry.open = list(op.messages)
        rank.issued[rank.place] = entry
        self.queues[key].setdefault(number, []).append(entry)
        return True

    @staticmethod
    def _members(key: _Key, op: Op) -> set[int]:
        """The ranks of a communicator."""
        return {int(end) for end in key[2:]} if key[1:2] == ("pair",) else set(op.members)

    def _head(self, key: _Key, number: int) -> _Entry | None:
        """What is first on a stream of a rank, if it has begun."""
        queue = self.queues[key].get(number)
        if not queue or queue[0].after > self.ranks[number].position:
            return None
        return queue[0]

    def _stream(self, key: _Key) -> bool:
        """End what can end on a communicator."""
        moved = False
        while self._collective(key) or self._messages(key):
            moved = True
        return moved

    def _collective(self, key: _Key) -> bool:
        members = next((q[0].op.members for q in self.queues[key].values() if q), ())
        heads = [self._head(key, number) for number in members]
        entries = [entry for entry in heads if entry is not None]
        if not entries or len(entries) < len(heads):
            return False
        if P2P in {entry.op.kind for entry in entries}:
            return False
        if len({_signature(entry.op) for entry in entries}) > 1:
            return False
        for entry in entries:
            self._end(entry)
        return True

    def _messages(self, key: _Key) -> bool:
        """Join each send that has begun with its receive."""
        moved = False
        for number in list(self.queues[key]):
            entry = self._head(key, number)
            for message in [m for m in entry.open if m.sends] if entry else ():
                other = self._head(key, message.peer)
                ends = [m for m in other.open if not m.sends and m.peer == number] if other else []
                if not ends or entry is None or other is None:
                    continue
                if ends[0].num_bytes != message.num_bytes:
                    text = f"rank {number} has {entry.op}; rank {message.peer} has {other.op}"
                    self.faults.append(Fault(FaultKind.differs, text))
                entry.open.remove(message)
                other.open.remove(ends[0])
                moved = True
                if not other.open:
                    self._end(other)
            if entry and entry.op.kind == P2P and not entry.open and not entry.done:
                self._end(entry)
        return moved

    def _end(self, entry: _Entry) -> None:
        entry.done = True
        self.queues[entry.key][entry.rank].pop(0)
        self.ranks[entry.rank].advance()

    # What waits for whom

    def _obstacle(self, number: int) -> tuple[str, set[int]] | None:
        """What a rank waits for, and the ranks that would have to act; None where it is done."""
        rank = self.ranks[number]
        event = rank.log[rank.place] if rank.place < len(rank.log) else None
        if isinstance(event, Op):
            key = _communicator(event, number)
            missing = self._members(key, event) - self.at_creation[key]
            return f"the host creates the communicator of {event}", missing
        if isinstance(event, Wait):
            return self._entry_obstacle("the host waits", rank.issued[event.op])
        if rank.position < len(rank.compute):
            who = "the host reads a tensor" if event else "the compute stream waits"
            where = f" ({event.site})" if isinstance(event, Sync) and event.site else ""
            return self._entry_obstacle(who + where, rank.compute[rank.position])
        for queues in self.queues.values():
            if queue := queues.get(number):
                return self._entry_obstacle("its stream waits", queue[0])
        return None

    def _entry_obstacle(self, who: str, entry: _Entry) -> tuple[str, set[int]]:
        head = self.queues[entry.key][entry.rank][0]
        behind = "" if head is entry else f", which stands behind {head.op}"
        if head.op.kind == P2P:
            peers = {message.peer for message in head.open}
        else:
            peers = {
                member
                for member in head.op.members
                if (other := self._head(entry.key, member)) is None
                or _signature(other.op) != _signature(head.op)
            }
        return f"{who} for {entry.op}{behind}", peers

    def _cycle(self, start: int) -> str:
        """Who waits for whom, from `start` until a rank comes back or has ended."""
        lines, seen, number = [], set[int](), start
        while number not in seen:
            seen.add(number)
            obstacle = self._obstacle(number)
            if obstacle is None:
                return "; ".join([*lines, f"rank {number} has ended"])
            text, peers = obstacle
            lines.append(f"rank {number}: {text}; it needs {sorted(peers)}")
            number = min(peers - {number}, default=number)
        return "; ".join(lines)
