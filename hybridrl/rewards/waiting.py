"""Judges that wait, as the driver has them: many responses at a time in few processes."""

import contextlib
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from hybridrl.config import JudgeConfig, SourceConfig
from hybridrl.rewards.process import JudgeProcess, wait_for
from hybridrl.rewards.results import BudgetSpent, RewardInput, RewardResult, failure, result_of
from hybridrl.rewards.waiting_worker import BUDGET_SPENT

logger = logging.getLogger(__name__)

PROGRAM = "hybridrl.rewards.waiting_worker"
"""The module that its processes run."""
GRACE_S = 5.0
"""Seconds beyond `timeout_s` for a process to say that a function takes too long."""
LARGEST_ANSWER = 64 << 20
"""Bytes of the answers to one unit, which may be a whole batch."""


@dataclass(eq=False, slots=True)
class _Unit:
    """Responses that are judged together."""

    items: list[RewardInput]
    future: "Future[list[RewardResult]]" = field(default_factory=Future)
    suspect: bool = False  # it was being judged when a process died

    def all(self, result: RewardResult) -> list[RewardResult]:
        """The same result for each of its responses."""
        return [result] * len(self.items)

    def settle(self, outcome: list[RewardResult] | BaseException | None) -> None:
        """Resolve its future, which is cancelled by None; one that is resolved stays as it is."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            elif outcome is not None:
                self.future.set_result(outcome)
            elif self.future.cancel():
                self.future.set_running_or_notify_cancel()


class WaitingJudge:
    """Judges units of responses, up to `max_in_flight` at a time, in any order.

    A function that waits, and an endpoint, have one process, whose event loop judges all units that
    it has. Other functions, of whole groups, have `num_processes`, each with one unit at a time. An
    endpoint's process gets every unit at once: it bounds its requests itself.

    A unit that takes longer than `timeout_s` is given up within the process. A process is replaced
    if it dies, or if its loop hangs. So is one that had this unit alone, since a plain function may
    still compute. With several units the one to blame is not known. They are suspects: the
    new process is given one after the other, each alone. So is one that had a process alone and
    ended it; where it ends another, it has failed.
    Invariant: each unit's future is resolved once.

    A thread owns the processes, which end with it.
    """

    def __init__(
        self,
        config: JudgeConfig,
        sources: Mapping[str, SourceConfig] | None = None,
        replies: Path | None = None,
        key: str = "reward",
    ) -> None:
        """`replies` is where those of an endpoint are kept, `key` the place of the settings."""
        self.config, self.sources, self.replies = config, dict(sources or {}), replies
        self.key = key
        self.counts: dict[str, int] = {}
        """What an endpoint was asked so far, by all processes: see `Endpoint`."""
        self._counts_of_ended: Counter[str] = Counter()
        self._alone = not (config.kind.asks or config.waits)
        self._num_processes = config.num_processes if self._alone else 1
        self._num_at_once = config.num_processes if self._alone else config.max_in_flight
        self._window: float = 1 if self._alone else config.max_in_flight
        if config.kind.asks:
            self._window = math.inf
        self._queue: deque[_Unit] = deque()
        self._unresolved: set[Future[list[RewardResult]]] = set()
        self._lock = threading.Lock()
        self._wake, self._waker = Pipe(duplex=False)
        self._processes: list[_Working] = []
        self._number, self._closed = 0, False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="waiting-judge", daemon=True)
        self._thread.start()

    def submit(self, items: Sequence[RewardInput]) -> "Future[list[RewardResult]]":
        """Have responses judged together, as one call; gives their results, in order.

        The future raises BudgetSpent, or the error of a judge that cannot start.
        """
        unit = _Unit(list(items))
        with self._lock:
            if self._failed is not None or self._closed:
                unit.future.set_exception(self._failed or ValueError("the judge is closed"))
                return unit.future
            self._queue.append(unit)
            self._unresolved.add(unit.future)
            unit.future.add_done_callback(self._unresolved.discard)
            self._waker.send_bytes(b"1")
        return unit.future

    @property
    def is_full(self) -> bool:
        """Whether a unit that is submitted now waits until others are judged."""
        return len(self._unresolved) >= self._num_at_once

    def close(self) -> None:
        """End its processes; units that wait are cancelled. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waker.send_bytes(b"0")
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._processes = [self._start() for _ in range(self._num_processes)]
            while not self._closed:
                for process in self._processes:
                    self._give(process)
                self._step()
        except BaseException as error:
            self._failed = error
        finally:
            with self._lock:
                self._closed = True
                left = [*self._queue, *(u for p in self._processes for u in p.units.values())]
            for process in self._processes:
                process.kill()
            for unit in left:
                unit.settle(self._failed)

    def _give(self, process: "_Working") -> None:
        """Send a process as many units as it may have; a suspect only to an idle one, alone."""
        while process.ready and self._queue and len(process.units) < self._window:
            with_suspect = any(unit.suspect for unit in process.units.values())
            if with_suspect or (self._queue[0].suspect and process.units):
                return
            unit = self._queue.popleft()
            if unit.future.cancelled():
                continue
            self._number += 1
            process.units[self._number] = unit
            try:
                process.connection.send((self._number, unit.items))
            except OSError:  # it has died, which is seen next
                pass
            except Exception as error:  # what pickle raises for a row's values
                del process.units[self._number]
                unit.settle(unit.all(result_of(failure(error))))
                continue
            if not self.config.kind.asks:
                late = time.monotonic() + self.config.timeout_s + GRACE_S
                process.deadlines[self._number] = late

    def _step(self) -> None:
        """Wait for answers, new units, deaths or the next time limit, and handle them."""
        limit = min(process.next_deadline for process in self._processes) - time.monotonic()
        for process in wait_for(self._processes, self._wake, limit):
            self._receive(process)
        for process in list(self._processes):
            if time.monotonic() > process.next_deadline and not process.connection.poll():
                self._replace(process, "timeout", f"no reward within {self.config.timeout_s} s")

    def _receive(self, process: "_Working") -> None:
        if not process.ready:
            try:
                process.set_ready()
            except (EOFError, OSError) as error:
                raise process.no_start() from error
            return
        try:
            number, answers, counts = process.receive()
            unit, outcome = process.units[number], _outcome(answers, self.key)
            if isinstance(outcome, list) and len(outcome) != len(unit.items):
                raise ValueError(f"{len(outcome)} results for {len(unit.items)} responses")
            process.counts = Counter({str(name): int(count) for name, count in counts.items()})
        except (EOFError, OSError, ValueError, LookupError, TypeError, AttributeError):
            self._replace(process, "error", "")
            return
        ended = self._counts_of_ended
        self.counts = {name: count + ended[name] for name, count in process.counts.items()}
        del process.units[number]
        process.deadlines.pop(number, None)
        unit.settle(outcome)
        results = outcome if isinstance(outcome, list) else []
        if self._alone and any(result.status == "timeout" for result in results):
            self._replace(process, "timeout", "a function that was given up may still compute")

    def _replace(self, process: "_Working", status: Any, message: str) -> None:
        """Replace a hung or dead process; a unit that it had alone is to blame, the second time."""
        if not process.ready:
            raise process.no_start()
        ended = process.kill()
        message = message or f"the judge's process ended ({ended})"
        logger.debug("judge process %d is replaced: %s", process.popen.pid, message)
        self._counts_of_ended.update(process.counts)
        units = list(process.units.values())
        process.units.clear()
        if len(units) == 1 and (units[0].suspect or status == "timeout"):
            (unit,) = units
            unit.settle(unit.all(RewardResult(0.0, status, message)))
        else:
            for unit in reversed(units):
                unit.suspect = True
                self._queue.appendleft(unit)
        self._processes[self._processes.index(process)] = self._start()

    def _start(self) -> "_Working":
        replies = str(self.replies) if self.replies else None
        return _Working(
            PROGRAM,
            self.config,
            self.sources,
            replies,
            role=self.key,
            largest_answer=LARGEST_ANSWER,
        )


def _outcome(answers: list[Any], key: str) -> list[RewardResult] | BudgetSpent:
    """The results of a unit, or why there are none; raises an error for garbage."""
    if answers[:1] == [BUDGET_SPENT]:
        return BudgetSpent(f"{key}.endpoint.{answers[1]}")
    return [result_of(answer) for answer in answers]


class _Working(JudgeProcess):
    """A process with the units that it is judging, and when each must be answered, by number."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.units: dict[int, _Unit] = {}
        self.deadlines: dict[int, float] = {}
        self.counts: Counter[str] = Counter()

    @property
    def next_deadline(self) -> float:
        """When to look whether it hangs."""
        return min([self.deadline, *self.deadlines.values()])
