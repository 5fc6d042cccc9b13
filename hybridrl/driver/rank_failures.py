"""Failures of ranks: what ends the run, and what ends a generation instance alone."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from hybridrl.config import ConfigError
from hybridrl.driver.rank_pool import Pool
from hybridrl.runtime.launcher import CallFailed, Launcher
from hybridrl.system import activity
from hybridrl.system.rendezvous import NCCL_TRACE, recorded_collectives
from hybridrl.workers.data_plane import SamplesLost

_UNKNOWN = ("?", "")  # node and log of a rank that has not answered yet


class WorkerError(RuntimeError):
    """A rank failed: which roles, which rank, which node, where its log is, and why.

    `died` says that its process or its node is gone, which may be otherwise next time. `call` is
    what the rank was in, which is empty where that is not known, and `step` what the run was in.
    """

    def __init__(
        self, message: str, died: bool = False, rank: int = -1, call: str = "", step: int = 0
    ) -> None:
        super().__init__(message)
        self.died, self.rank, self.call, self.step = died, rank, call, step


class InstanceEnded(Exception):
    """A rank of a generation instance has failed: all ranks of the instance have been ended."""

    def __init__(self, instance: int) -> None:
        super().__init__(f"generation instance {instance} has ended")


class RankGroup(Protocol):
    """What failures concern of a `WorkerGroup`."""

    launcher: Launcher
    current_step: Callable[[], int]
    all_ranks: Any
    pools: dict[str, Pool]
    home: Pool
    actor_pool: Pool
    instances: list[list[int]]
    logs: Path

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def living(self, ranks: Iterable[int]) -> list[int]:
        """These ranks without those of instances that have ended."""
        ...

    def kill(self) -> None:
        """End every rank now."""
        ...


class RankFailures:
    """What becomes of a failure of a rank of a `WorkerGroup`.

    It ends the run: every rank is ended, and the driver raises (`WorkerError`). Where instances
    have ranks of their own, that of a rank in one ends the ranks of its instance alone, while
    another instance lives (`InstanceEnded`). What the user can mend ends the run in any case.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.ended: list[int] = []
        """The instances that have ended, the first one first."""
        self.dead: set[int] = set()
        """Their ranks."""
        self.errors: list[WorkerError] = []
        """What has ended each of them."""
        self.on_death: Callable[[int, str], None] = lambda instance, line: None
        """Called with an instance that has ended, and a line that says why."""
        self.locations = [_UNKNOWN] * group.size
        """Node and log of each rank."""

    def of(self, rank: int, error: CallFailed) -> BaseException:
        """End the instance of the rank, or all ranks; the error to raise."""
        if isinstance(error.cause, RuntimeError):
            # A death makes the others' collectives fail, and their errors may arrive before it.
            living = self.group.living(range(self.group.size))
            group = self.group.launcher.subgroup(self.group.all_ranks, living)
            if (dead := self.group.launcher.first_dead(group)) is not None:
                number, death = living[dead[0]], dead[1]
                if not self._may_end_alone(number, death):
                    return self._fail(number, death)
                self._end(number, death)
        if rank in self.dead:
            return self.ended_with(rank)
        if isinstance(error.cause, SamplesLost) and self.dead and not self._members(rank):
            return self.ended_with(min(self.dead))  # they were of one that has ended
        if not self._may_end_alone(rank, error):
            return self._fail(rank, error)
        self._end(rank, error)
        return self.ended_with(rank)

    def ended_with(self, rank: int) -> InstanceEnded:
        """Return the error for calls of a rank whose instance has ended."""
        return InstanceEnded(self._instance_of(rank))

    def of_run(self) -> WorkerError:
        """Return the error of a run that cannot go on without the last instance that has ended."""
        return self.errors[-1]

    @property
    def lost(self) -> WorkerError | None:
        """The latest death of a rank that has ended an instance; what raises is none."""
        return next((error for error in reversed(self.errors) if error.died), None)

    def _may_end_alone(self, rank: int, error: CallFailed) -> bool:
        """Whether the run goes on without the rank's instance."""
        members = self._members(rank)
        others = [one for one in self.group.living(self.group.home.ranks) if one not in members]
        return bool(members and others) and not isinstance(error.cause, ConfigError | OSError)

    def _end(self, rank: int, error: CallFailed) -> None:
        """End the ranks of the rank's instance, and say so."""
        group, instance, members = self.group, self._instance_of(rank), self._members(rank)
        print(error.trace, end="", file=sys.stderr, flush=True)
        self.ended.append(instance)
        self.dead |= {*members}
        group.launcher.kill(group.launcher.subgroup(group.all_ranks, members))
        left = len({self._instance_of(other) for other in group.living(group.home.ranks)})
        self.errors.append(self._error_of(rank, error))
        again = f"its samples begin again; instances that go on: {left}"
        self.on_death(instance, f"{self.errors[-1]}; {again}")

    def _members(self, rank: int) -> list[int]:
        """Ranks that end with this one, since the others do not need them; none: all do."""
        if self.group.home is self.group.actor_pool or rank not in self.group.home.ranks:
            return []
        return next((ranks for ranks in self.group.instances if rank in ranks), [])

    def _instance_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.group.instances) if rank in ranks)

    def _fail(self, rank: int, error: CallFailed) -> BaseException:
        """End every rank; the error to raise."""
        self.group.kill()
        if isinstance(error.cause, ConfigError | OSError):
            return error.cause
        # Only here: one line says all of what a user can mend, and of a death.
        print(error.trace, end="", file=sys.stderr, flush=True)
        return self._error_of(rank, error)

    def _error_of(self, rank: int, error: CallFailed) -> WorkerError:
        call = activity.last_call(activity.file_of(self.group.logs.parent, rank))
        step = self.group.current_step()
        return WorkerError(self._described(rank, error), error.died, rank, call, step)

    def _described(self, rank: int, error: CallFailed) -> str:
        """The failure of a rank in one line."""
        if error.stuck:
            reason = str(error)
        elif error.died:
            reason = "its process ended (killed, out of memory, or crashed)"
            if self.locations[rank] == _UNKNOWN:
                reason = f"{reason}: {error}"
        else:
            reason = f"{type(error.cause).__name__}: {error.cause}" if error.cause else str(error)
        node, log = self.locations[rank]
        (roles,) = (pool.roles for pool in self.group.pools.values() if rank in pool.ranks)
        return (
            f"rank {rank} of {self.group.size} ({', '.join(roles)}) on node {node} failed:"
            f" {reason}; its log is {log or self.group.logs}{self._traces()}"
        )

    def _traces(self) -> str:
        """Where NCCL's last collectives are, if a timeout has written them."""
        files = recorded_collectives(self.group.logs)
        if not files:
            return ""
        named = files[0] if len(files) == 1 else f"{self.group.logs}/{NCCL_TRACE}*"
        return f"; the last collectives are in {named} (`torchfrtrace` reads them)"
