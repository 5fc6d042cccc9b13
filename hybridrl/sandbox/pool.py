"""Sandboxes with time limits: who hangs or dies is told from the others, and replaced."""

import logging
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any, Generic, Self, TypeVar

from hybridrl.sandbox.process import SandboxProcess, SandboxTask, settle, wait_for
from hybridrl.sandbox.worker import UNREAD, Settings

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at whose code runs, while answers are due."""
PATIENCE = 5
"""Times that a task is served again whose process was killed while nobody's code ran: most likely
from outside, since memory is short say."""
GRACE_S = 5.0
"""Seconds beyond the limits for a process to tell that one was reached."""
MOST_SPANS = 10_000
"""Stretches of work that are kept until somebody takes them."""

AnyTask = TypeVar("AnyTask", bound=SandboxTask)


@dataclass(frozen=True, slots=True)
class BusySpan:
    """A process had answers due from `start` to `end`, in seconds since the epoch; it gave some."""

    place: int
    start: float
    end: float
    answers: int


class SandboxPool(ABC, Generic[AnyTask]):
    """Serves tasks in processes, which a thread owns; they end with it.

    States of a task: queued, served (its process has its request), answered. A task may keep its
    process, its home, for further requests. A subclass says what a request is and reads answers.

    A process says whose code it is about to run (`Mark`). If it hangs or dies, that task is to
    blame, or the only one that was served. The others are served again. Where nobody's code was
    running, they are suspects. The new process serves one of them at a time, so that the next death
    tells who it is. A task that dies is served once more, unless it took too long: a second try
    would cost the limit again.

    Example: a, b and c are served at once, and the process dies in a thread of b. All three are
    suspects. Task a is served alone and answers. Then b is served alone, and the process dies: b is
    to blame. It is served once more, dies and has failed. Task c is served alone and answers.

    Invariant: each future is resolved once.
    """

    ended = "its process ended"
    """How errors begin that say so; the exit code follows."""
    tries_again = True
    """Whether a task that has failed may be served once more."""

    def __init__(
        self,
        settings: Sequence[Settings],
        name: str,
        *,
        step_s: float,
        late: str,
        window: float = math.inf,
        closes_s: float = 0.0,
    ) -> None:
        """A process for each of the `settings`, which serves at most `window` tasks at a time.

        `name` says in errors what they are. Code that runs for `step_s` without a pause hangs: the
        error is `late`. A process has `closes_s` to close what tasks leave behind.
        """
        self.settings, self.name, self.late = settings, name, late
        self.step_s, self.window, self.closes_s = step_s, window, closes_s
        self.spans: deque[BusySpan] = deque(maxlen=MOST_SPANS)
        """What the processes did; for the driver to take."""
        self.counts: Counter[str] = Counter()
        """Counts so far, by name; a subclass says which."""
        self._ready, self._all_ready = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._commands: deque[tuple[Callable[[], None], Future[Any] | None]] = deque()
        self._wake, self._waker = Pipe(duplex=False)
        self._processes: list[SandboxProcess] = []
        self._queue: deque[AnyTask] = deque()
        self._closed, self._bad_starts = False, 0
        self._error: BaseException | None = None
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"{name} pool", daemon=True)
        self._thread.start()

    # -- for its owner -------------------------------------------------------------------------

    def wait_ready(self, every: bool = False) -> None:
        """Wait for a process, or for `every` one; raises ConfigError or RuntimeError where it
        cannot start."""
        (self._all_ready if every else self._ready).wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; what is due is cancelled. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waker.send_bytes(b"0")
        self._thread.join()

    def _do(self, command: Callable[[], None], future: "Future[Any] | None" = None) -> None:
        """Run `command` in the thread; `future` is told where the pool has ended before."""
        with self._lock:
            if self._error is None and not self._closed:
                self._commands.append((command, future))
                if len(self._commands) == 1:  # else the thread has been woken
                    self._waker.send_bytes(b"1")
            elif future is not None:
                settle(future, self._error or ValueError(f"the {self.name} pool is closed"))

    # -- for a subclass: all in the thread -----------------------------------------------------

    @abstractmethod
    def _request(
        self, task: AnyTask, process: SandboxProcess
    ) -> tuple[str, tuple[Any, ...], float]:
        """What a process is asked for: a method's name, its arguments, and the seconds for it."""

    @abstractmethod
    def _read(self, task: AnyTask, answer: list[Any]) -> Any:
        """An answer in its types; raises ValueError or TypeError for garbage."""

    @abstractmethod
    def _answered(self, task: AnyTask, answer: Any) -> None:
        """Hand an answer on, or see to a failure. The task may have been given up before."""

    @abstractmethod
    def _failed(self, task: AnyTask, kind: str, error: BaseException | str) -> None:
        """Tell the owner that a task has failed for good."""

    def _is_ready(self, process: SandboxProcess, details: list[Any]) -> None:
        """A process has started; its service says `details` of itself."""

    def _refusal(self, error: BaseException) -> BaseException:
        """The error to raise where a service is not built."""
        return error

    def _again(self, task: AnyTask) -> None:
        """A task that has failed is served once more."""
        self._queue.append(task)

    def _bereaved(self, task: AnyTask, suspect: bool, error: tuple[str, str] | None) -> None:
        """The process of a task is gone, through another one as far as is known.

        With `error`, its kind first, the task's own code ran, though nothing of it was due.
        """
        task.suspect = suspect
        if task not in self._queue:
            self._queue.append(task)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for settings in self.settings:
                self._processes.append(self._start(settings))
            if not self.settings:
                self._note_ready()
            while not self._closed:
                while self._commands:
                    self._commands.popleft()[0]()
                self._give()
                self._step()
        except BaseException as error:
            self._error = self._refusal(error)
        finally:
            with self._lock:
                self._closed = True
            due: list[SandboxTask] = [*self._queue]
            for process in self._processes:
                due += process.requests.values()
                process.finish()
            left = [task.future for task in due if task.due]
            for future in [*left, *(future for _, future in self._commands if future)]:
                settle(future, self._error)
            self._ready.set()
            self._all_ready.set()

    def _give(self) -> None:
        """Send what is queued to processes that can take it.

        A suspect waits for a process without requests. One of those that are ready is kept for the
        first of them: what is queued behind it does not go there.
        """
        waiting: list[AnyTask] = []
        kept: SandboxProcess | None = None
        while self._queue:
            task = self._queue.popleft()
            if not task.due or task.future.cancelled():
                continue
            homes = self._processes if task.home is None else [task.home]
            able = [p for p in homes if p is not kept and p.takes(task, self.window)]
            if able:
                self._serve(min(able, key=lambda process: len(process.tasks)), task)
                continue
            waiting.append(task)
            if task.suspect and kept is None:
                ready = (process for process in self._processes if process.ready)
                kept = min(ready, key=SandboxProcess.until_alone, default=None)
            elif not task.suspect and self.window < math.inf:
                break  # no process has room, and no task that is queued has a home
        self._queue.extendleft(reversed(waiting))

    def _serve(self, process: SandboxProcess, task: AnyTask) -> None:
        name, arguments, seconds = self._request(task, process)
        if task.home is None:
            task.home = process
            process.tasks.add(task)
        try:
            process.send((name, task.number, *arguments))
        except Exception as error:  # what pickle raises for a row's values
            process.leave(task)
            self._fail(task, "error", error)
            return
        process.begin(task, seconds + GRACE_S)

    def _step(self) -> None:
        """Wait for answers, commands, deaths or a limit of time, and handle them."""
        starts = [process.start_deadline for process in self._processes]
        limit = min(starts, default=math.inf) - time.monotonic()
        if self._queue or any(process.requests for process in self._processes):
            limit = LOOK_S
        for process in wait_for(self._processes, self._wake, limit):
            while self._receive(process) and process.connection.poll():
                pass
        for process in list(self._processes):
            if process.connection.poll():
                continue
            if not process.ready and time.monotonic() > process.start_deadline:
                self._start_anew(process, is_late=True)
            elif process.ready and process.hangs(self.step_s):
                self._replace(process, "timeout", self.late)

    def _receive(self, process: SandboxProcess) -> bool:
        """Handle a message; False for a process that has died, or answers garbage."""
        if not process.ready:
            return self._take_ready(process)
        try:
            answers = process.receive()
        except (EOFError, OSError, ValueError):
            self._replace(process, "crash", "")
            return False
        return all(self._take(process, answer) for answer in answers)

    def _take(self, process: SandboxProcess, sent: bytes) -> bool:
        """Handle an answer; False for garbage, which costs none of the answers before it."""
        try:
            number, *answer = process.answer(sent)
            if number == UNREAD:
                number, error = answer
                self._cannot_be_read(process, number, str(error))
                return True
            if not answer:
                process.wait_on(number)
                return True
            task: Any = process.requests[number]
            read = self._read(task, answer)
        except (ValueError, LookupError, TypeError, AttributeError):
            self._replace(process, "crash", "")
            return False
        process.end(number)
        process.num_answers += 1
        if not process.requests:
            self._note_busy(process)
        if task.due:
            task.suspect = False
        self._answered(task, read)
        return True

    def _cannot_be_read(self, process: SandboxProcess, number: int, error: str) -> None:
        """A process could not unpickle a request; raises KeyError for one that it has not."""
        task: Any = process.requests[number]
        process.end(number)
        process.leave(task)
        if not process.requests:
            self._note_busy(process)
        self._fail(task, "error", error)

    def _take_ready(self, process: SandboxProcess) -> bool:
        try:
            details = process.read_ready()
        except (EOFError, OSError):
            self._start_anew(process)
            return False
        if details is None:
            return True
        logger.debug("%s process %d is ready", self.name, process.popen.pid)
        self._bad_starts = 0
        self._is_ready(process, details)
        self._note_ready()
        return True

    def _note_ready(self) -> None:
        self._ready.set()
        if all(process.ready for process in self._processes):
            self._all_ready.set()

    def _fail(
        self, task: AnyTask, kind: str, error: BaseException | str, patience: int = 1
    ) -> None:
        """A task has failed: serve it again, once or so many times, or tell the owner."""
        task.strikes += 1
        if self.tries_again and kind in ("error", "crash") and task.strikes <= patience:
            self._again(task)
        else:
            self._failed(task, kind, error)

    def _replace(self, process: SandboxProcess, kind: str, error: str) -> None:
        """Replace a hung or dead process; the task whose code ran is to blame."""
        number, _ = process.mark.read()
        ended = process.kill()
        if process.requests:
            self._note_busy(process)
        error = error or f"{self.ended} ({ended})"
        logger.debug("%s process %d is replaced: %s", self.name, process.popen.pid, error)
        served = [task for task in process.requests.values() if task.due]
        guilty: list[Any] = [task for task in served if task.number == number]
        patience = PATIENCE if ended == signal.SIGKILL.name and not number else 1
        if not number and len(served) == 1:
            guilty = served
        self._start_again(process)
        bereaved: list[Any] = sorted(process.tasks, key=lambda task: task.number)
        for task in bereaved:
            task.home = None
            if task not in guilty:
                # One that is due is queued for its turn: it is served again, and blamed then.
                is_own = task.number == number and not task.due
                its_own = (kind, error) if is_own else None
                self._bereaved(task, not (number or guilty), its_own)
        for task in guilty:
            self._fail(task, kind, error, patience)

    def _start_anew(self, process: SandboxProcess, is_late: bool = False) -> None:
        """Replace a process that has ended before it was ready, if it was killed from outside.

        So it was where others were ready, or where SIGKILL ended it.
        """
        self._bad_starts += 1
        ended = process.kill()
        was_killed = self._ready.is_set() or (ended == signal.SIGKILL.name and not is_late)
        if not was_killed or self._bad_starts > PATIENCE:
            raise process.no_start()
        self._start_again(process)

    def _start_again(self, process: SandboxProcess) -> None:
        place = self._processes.index(process)
        self._processes[place] = self._start(self.settings[place])

    def _start(self, settings: Settings) -> SandboxProcess:
        process = SandboxProcess(settings, self.name, self._warned, self.closes_s)
        logger.debug("%s process %d starts", self.name, process.popen.pid)
        return process

    def _note_busy(self, process: SandboxProcess) -> None:
        """A process has worked until now."""
        place, now = self._processes.index(process), max(time.time(), process.busy_since)
        self.spans.append(BusySpan(place, process.busy_since, now, process.num_answers))
