"""Rollout instances during a round: the status of each, what it holds, its call in flight."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hybridrl.flow.executor import Command
from hybridrl.flow.sample import SampleId


class InstanceStatus(Enum):
    """Status of an instance in a round; `Instance` has the table of transitions."""

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
    _TRAINING: (_DEAD,),
    _DEAD: (),
}


@dataclass(slots=True)
class Instance:
    """An instance during a round. One with `members` is a wide one (`Executor.wide`).

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
    | any      | dead     | its process is gone, or that of a member                       |

    One that trains does so until the round ends: its generation weights are gone.

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

    @property
    def width(self) -> int:
        """The number of instances that it consists of."""
        return len(self.members) or 1

    def become(self, status: InstanceStatus) -> None:
        """Change its status; a change that the table lacks is a bug."""
        if status is not self.status:
            assert status in _NEXT[self.status], (
                f"instance {self.number} cannot be {status.value}: {self.status.value}"
            )
            self.status = status

    def hold(self, id: SampleId) -> None:
        """It is given a sample."""
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


def choose_wide(
    table: Mapping[int, tuple[int, ...]],
    width: int,
    held: Mapping[int, int],
    able: Collection[int],
    most: int,
) -> list[Instance]:
    """The fewest wide instances of `width`, of a `table`, that take the `held` samples.

    Each takes `most`. None where too few have members that are all `able`. Those whose members hold
    most samples are taken, so that few move; of equal ones the first.
    """
    whole = {
        number: members
        for number, members in table.items()
        if len(members) == width and set(members) <= set(able)
    }
    order = sorted(whole, key=lambda n: (-sum(held.get(i, 0) for i in whole[n]), n))
    needed = -(-sum(held.values()) // most)
    chosen = order[:needed] if needed <= len(order) else []
    return [Instance(number, whole[number]) for number in sorted(chosen)]
