"""Rollout instances: the status of each, what it holds, its call in flight, its bounds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from hybridrl.config import Migration
from hybridrl.costs.instance import Costs
from hybridrl.flow.executor import Command, LoadWeights
from hybridrl.flow.sample import SampleId

_CALL_SHARE = 0.02  # of the decoding: what calls may cost so that they end sooner


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    """Bounds of an instance, and how the tail moves.

    An instance decodes at most `max_held` samples at a time, without those that wait for replies.
    With `ahead` it is given more while others wait, so that calls may be long: rows refill within.
    `chunk_tokens` bound one call of a forward pass. A call that decodes is to last about `call_s`
    seconds, with fewer steps while the batch is large. Finished samples are known only at its end.
    `stale_kv` lets a sample continue with keys and values of older weights, and one that is parked
    too (`parks_kv`), where they may travel.
    """

    max_held: int
    chunk_tokens: int
    call_s: float = 0.25
    migration: Migration = Migration.auto
    stale_kv: bool = False
    ahead: bool = True

    @property
    def parks_kv(self) -> bool:
        """Whether parked samples keep their keys and values for newer weights."""
        return self.stale_kv and self.migration is not Migration.recompute

    def steps(self, costs: Costs, rows: float, most: int) -> int:
        """Decode steps, at most `most`, of a call after which something may begin.

        Longer than `call_s` where calls would cost more than a fiftieth of the decoding.
        """
        call_s = max(self.call_s, costs.between_s / _CALL_SHARE)
        return max(1, min(most, round(call_s / max(float(costs.pass_s(rows)), 1e-9))))


class InstanceStatus(Enum):
    """Status of an instance; `Instance` has the table of transitions."""

    FREE = "free"  # holds no sample: it may be given some, run a forward pass, or train
    DECODING = "decoding"  # holds samples, which may all wait for replies
    LEAVING = "leaving"  # the next call, or that in flight, parks its samples
    JOINED = "joined"  # a member of a wide instance, without samples or a call of its own
    SCORING = "scoring"  # runs a forward pass of a stage; samples may wait for its end
    TRAINING = "training"  # has training shards, and runs passes of other roles' weights too
    DEAD = "dead"


_FREE, _DECODING, _LEAVING, _JOINED, _SCORING, _TRAINING, _DEAD = InstanceStatus
_NEXT: dict[InstanceStatus, tuple[InstanceStatus, ...]] = {
    _FREE: (_DECODING, _JOINED, _SCORING, _TRAINING, _DEAD),
    _DECODING: (_FREE, _LEAVING, _DEAD),
    _LEAVING: (_FREE, _JOINED, _DEAD),
    _JOINED: (_FREE, _DEAD),
    _SCORING: (_FREE, _DECODING, _LEAVING, _JOINED, _DEAD),
    _TRAINING: (_FREE, _DEAD),
    _DEAD: (),
}


@dataclass(slots=True)
class Instance:
    """A rollout instance. One with `members` is a wide one (`Executor.wide`).

    | from     | to       | when                                                           |
    |----------|----------|----------------------------------------------------------------|
    | free     | decoding | it is given samples                                            |
    | free     | scoring  | it begins a forward pass                                       |
    | free     | training | it begins the gradient of the first group                      |
    | free     | joined   | it is to be a member of a wide instance                        |
    | decoding | free     | its last sample has finished or is lost                        |
    | decoding | leaving  | its samples migrate, or are put by since they all wait         |
    | leaving  | free     | its samples are parked                                         |
    | leaving  | joined   | its samples are parked, and it is to be a member               |
    | scoring  | free     | its pass has ended                                             |
    | scoring  | decoding | its pass has ended, and samples have come meanwhile            |
    | scoring  | leaving  | the samples that have come meanwhile migrate                   |
    | scoring  | joined   | its pass has ended, and it is to be a member                   |
    | joined   | free     | its wide instance has no sample left, or has lost a member     |
    | training | free     | all ranks have generation weights again                        |
    | any      | dead     | its process is gone, or that of a member                       |

    One that trains does so until the ranks generate again: its generation weights are gone.

    Invariants: it has one call in flight, if any. It holds samples if and only if it decodes or
    leaves, or scores and got them meanwhile. A wide one has a call in flight only while all of its
    members are joined.

    Example: instances 0 to 3 and the pairs 4 = (0, 1), 5 = (2, 3). Two samples are left, on 1 and
    on 3, and are to be in one wide instance: 4. So 0 is joined, and 1 and 3 are leaving. When they
    have parked their samples 1 is joined and 3 is free, and 4 decodes. 2 was free all the time.
    """

    number: int
    members: tuple[int, ...] = ()
    status: InstanceStatus = _FREE
    held: dict[SampleId, None] = field(default_factory=dict)
    """The samples that it has, or that its next call takes to it."""
    inbox: list[Command] = field(default_factory=list)
    """The commands of its next call."""
    sent: float | None = None
    """When its call in flight was sent."""
    progress: float = 0.0
    """Tokens of its rows so far."""
    keeps: bool = False
    """Whether it is one of those that the last samples migrate to."""
    joins: int | None = None
    """The wide instance that it is, or is to be, a member of."""
    puts_by: bool = False
    """Whether it leaves its samples to their replies, for no other instance."""
    version: int | None = None
    """The weights that its next call decodes with, where instances load them one by one."""

    @property
    def width(self) -> int:
        """The number of instances that it consists of."""
        return len(self.members) or 1

    def begin(self) -> None:
        """All ranks have generation weights again, and it holds nothing."""
        assert not self.held, f"instance {self.number} has samples of the round before"
        self.become(_FREE)
        self.progress, self.keeps, self.joins = 0.0, False, None

    def load(self, version: int) -> None:
        """It is to be given samples that this version makes, and has no others."""
        if version != self.version:
            assert not self.held, f"instance {self.number} has samples of other weights"
            self.load_in_flight(version)

    def load_in_flight(self, version: int, keeps_kv: bool = False) -> None:
        """Its next call begins with this version, under the samples that it has."""
        if version != self.version:
            self.inbox.insert(0, LoadWeights(version, keeps_kv))
            self.version = version

    def send(self, now: float) -> None:
        """A call of it begins."""
        assert self.sent is None, f"instance {self.number} has a call in flight"
        self.sent = now

    def returned(self, now: float) -> float:
        """Its call has ended; gives the seconds that it was in flight."""
        assert self.sent is not None, f"instance {self.number} has no call in flight"
        seconds = now - self.sent
        self.sent = None
        self.settle()
        return seconds

    def become(self, status: InstanceStatus) -> None:
        """Change its status; a change that the table lacks is a bug."""
        if status is not self.status:
            assert status in _NEXT[self.status], (
                f"instance {self.number} cannot be {status.value}: {self.status.value}"
            )
            self.status = status

    def hold(self, id: SampleId) -> None:
        """It is given a sample."""
        assert id not in self.held, f"instance {self.number} has sample {id}"
        assert self.status is not _TRAINING, f"instance {self.number} trains"
        self.held[id] = None
        self.settle()

    def lose(self, id: SampleId) -> None:
        """It does not have a sample any more."""
        del self.held[id]
        self.settle()

    def join(self, wide: int | None) -> None:
        """It is to be a member of `wide`, as soon as it has nothing else to do; None: not again."""
        self.joins = wide
        self.settle()

    def settle(self) -> None:
        """What it has to do has changed."""
        if self.status is _LEAVING and not self.held:
            self.puts_by = False
        stays = self.status in (_TRAINING, _DEAD) or (self.status is _LEAVING and self.held)
        if stays or (self.status is _SCORING and self.sent is not None):
            return
        if self.held:
            self.become(_DECODING)
        else:
            self.become(_FREE if self.joins is None else _JOINED)

    def die(self) -> list[SampleId]:
        """Its process is gone, with its call in flight; gives the samples that it held."""
        self.become(_DEAD)
        lost = [*self.held]
        self.held.clear()
        self.inbox.clear()
        self.sent, self.puts_by = None, False
        return lost


class Instances:
    """The instances of a run, by number. The dead stay; wide ones are there while they decode."""

    def __init__(self) -> None:
        self._of: dict[int, Instance] = {}

    def begin(self, numbers: Iterable[int]) -> None:
        """All ranks have generation weights again: these instances are free."""
        assert not self.in_flight, "weights change while a call is in flight"
        for wide in self.wide:
            self.remove(wide)
        for number in numbers:
            self._of.setdefault(number, Instance(number)).begin()

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, number: int) -> Instance:
        return self._of[number]

    def __iter__(self) -> Iterator[Instance]:
        """Yield those that live, wide ones last."""
        yield from self.alive
        yield from self.wide

    @property
    def alive(self) -> list[Instance]:
        """The instances that live, without wide ones."""
        return [i for i in self._of.values() if not i.members and i.status is not _DEAD]

    @property
    def wide(self) -> list[Instance]:
        """The wide instances."""
        return [i for i in self._of.values() if i.members]

    def add(self, wide: Instance) -> None:
        """A wide instance is to decode."""
        self._of[wide.number] = wide

    def remove(self, wide: Instance) -> None:
        """A wide instance is none any more."""
        del self._of[wide.number]

    @property
    def in_flight(self) -> bool:
        """Whether some instance has a call in flight."""
        return any(i.sent is not None for i in self._of.values())

    @property
    def migrating(self) -> bool:
        """Whether samples are to leave, or on their way to, other instances."""
        return any(i.status is _LEAVING and not i.puts_by for i in self._of.values())

    @property
    def hold_some(self) -> bool:
        """Whether some instance holds a sample."""
        return any(i.held for i in self._of.values())
