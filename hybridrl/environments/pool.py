"""Episodes in processes, as the driver has them: many at a time on few event loops."""

import itertools
import logging
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from typing import Any, Literal

from hybridrl.config import EnvironmentConfig, JailKind, JailLimits, SourceConfig
from hybridrl.environments.episode_process import (
    EpisodeId,
    EpisodeProcess,
    ServedEpisode,
    settle,
)
from hybridrl.environments.task import (
    ChatMessage,
    EpisodeStart,
    EpisodeStep,
    EpisodeTask,
    FailureKind,
    ModelTurn,
    PastTurn,
    failed,
)
from hybridrl.environments.tool_calls import CallForm
from hybridrl.rewards.process import wait_for

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at whose code runs, while answers are due."""
PATIENCE = 5
"""Times that an episode is served again whose process was killed while nobody's code ran: most
likely from outside, since memory is short say."""
GRACE_S = 5.0
"""Seconds beyond the limits for a process to tell that one was reached."""
MOST_SPANS = 10_000
"""Stretches of work that are kept until somebody takes them."""


@dataclass(frozen=True, slots=True)
class BusySpan:
    """A process had answers due from `start` to `end`, in seconds since the epoch; it gave some."""

    place: int
    start: float
    end: float
    answers: int


@dataclass(eq=False, slots=True)
class _Command:
    kind: Literal["start", "turn", "end"]
    id: EpisodeId
    episode: ServedEpisode | None = None
    turn: ModelTurn | None = None
    future: "Future[Any]" = field(default_factory=Future)


class EpisodePool:
    """Runs episodes in `num_processes` processes; each has one event loop for all that it has.

    Life of an episode: `start`, then a `turn` for each turn of the model's. It is over when a step
    says that it has ended or failed, or `end` gives it up. At most one answer is due at a time.

    A process says whose code it is about to run (`Mark`). If it hangs or dies, that episode has
    failed. The others are rebuilt by replay, when their next turn comes: their programs run again
    on the turns already made, and must answer the same. Where nobody's code was running, those that
    were being served are suspects. The new process serves one of them at a time, so that the next
    death tells who it is. An episode that fails is replayed once at that turn, unless it took too
    long: a second try would cost the limit again.

    Invariant: each future is resolved once. A thread owns the processes, which end with it.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        sources: Mapping[str, SourceConfig] | None = None,
        *,
        seed: int = 0,
        jail: JailKind = JailKind.auto,
        limits: JailLimits | None = None,
        call_form: CallForm | None = None,
    ) -> None:
        """`seed` is the run's; the jail is that of `reward.jail` and `reward.limits`.

        `call_form` is how the model writes calls of tools; None: in any form.
        """
        self.config, self.seed = config, seed
        paths = list(sys.path)
        judged = jail, limits or JailLimits()
        self._settings = (config, dict(sources or {}), paths, *judged, call_form or CallForm())
        self.counts: Counter[str] = Counter()
        """Of this pool so far: `episodes`, `turns`, `replays`, `failed/KIND`, `close_errors`, and
        `replaced_surrogates`, each of which is a question mark in what a program said."""
        self.spans: deque[BusySpan] = deque(maxlen=MOST_SPANS)
        """What the processes did; for the driver to take."""
        self.tools: tuple[dict[str, Any], ...] = ()
        """Schemas of the tools that the model may call, once a process is ready."""
        self._ready, self._all_ready = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._commands: deque[_Command] = deque()
        self._wake, self._waker = Pipe(duplex=False)
        self._processes: list[EpisodeProcess] = []
        self._episodes: dict[EpisodeId, ServedEpisode] = {}
        self._queue: deque[ServedEpisode] = deque()
        self._numbers, self._requests = itertools.count(1), itertools.count(1)
        self._closed, self._bad_starts = False, 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="episode-pool", daemon=True)
        self._thread.start()

    def wait_ready(self, every: bool = False) -> None:
        """Wait for a process, or for `every` one; raises ConfigError or RuntimeError where it
        cannot start."""
        (self._all_ready if every else self._ready).wait()
        if self._error is not None:
            raise self._error

    def start(
        self,
        id: EpisodeId,
        task: EpisodeTask,
        past: Sequence[PastTurn] = (),
        opening: tuple[ChatMessage, ...] | None = None,
    ) -> "Future[EpisodeStart]":
        """Start the episode of a sample, or take it up again after those of the `past`.

        `opening` are the first messages that it must have, if they are known: those of the task.
        """
        future: Future[EpisodeStart] = Future()
        number = next(self._numbers)
        first = task.opening if opening is None else opening
        episode = ServedEpisode(id, number, task, future, list(past), first)
        self._send(_Command("start", id, episode, future=future))
        return future

    def turn(self, id: EpisodeId, turn: ModelTurn) -> "Future[EpisodeStep]":
        """Hand an episode the model's turn; its next step comes when it waits again or has ended.

        A step that has ended or failed is the last: the pool has forgotten the episode then.
        """
        command = _Command("turn", id, turn=turn)
        self._send(command)
        return command.future

    def end(self, id: EpisodeId) -> None:
        """Give an episode up, and close its environment; one that has ended is passed over."""
        self._send(_Command("end", id))

    def close(self) -> None:
        """Close all environments and end the processes; what is due is cancelled. May be called
        twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waker.send_bytes(b"0")
        self._thread.join()

    def _send(self, command: _Command) -> None:
        with self._lock:
            if self._error is not None or self._closed:
                error = self._error or ValueError("the pool of episodes is closed")
                command.future.set_exception(error)
                return
            self._commands.append(command)
            self._waker.send_bytes(b"1")

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._processes = [self._start(place) for place in range(self.config.num_processes)]
            while not self._closed:
                self._take_commands()
                self._give()
                self._step()
        except BaseException as error:
            self._error = error
        finally:
            with self._lock:
                self._closed = True
                left = [episode.future for episode in self._episodes.values() if episode.due]
                left += [command.future for command in self._commands]
            for process in self._processes:
                process.finish()
            for future in left:
                settle(future, self._error)
            self._ready.set()
            self._all_ready.set()

    def _take_commands(self) -> None:
        """What the driver asks for."""
        while self._commands:
            command = self._commands.popleft()
            episode = self._episodes.get(command.id)
            if command.kind == "start":
                assert command.episode is not None
                if episode is not None:
                    error = ValueError(f"the episode of sample {command.id} is there already")
                    settle(command.future, error)
                    continue
                self.counts["episodes"] += 1
                self._episodes[command.id] = command.episode
                self._queue.append(command.episode)
            elif command.kind == "turn":
                if episode is None or episode.due:
                    error = ValueError(f"no episode of sample {command.id} waits for a turn")
                    settle(command.future, error)
                    continue
                self.counts["turns"] += 1
                episode.turn, episode.future, episode.due = command.turn, command.future, True
                if episode.lost is not None:
                    (kind, reason), episode.lost = episode.lost, None
                    self._fail(episode, kind, reason)
                else:
                    self._queue.append(episode)
            elif episode is not None:
                self._forget(episode)
                if episode.process is not None:
                    episode.process.send("end", episode.number)
                self._leave(episode)
                if episode.due:
                    episode.settle(None)

    def _give(self) -> None:
        """Send what is queued to processes that can take it.

        A suspect waits for a process without requests. One of those that are ready is kept for the
        first of them: what is queued behind it does not go there.
        """
        waiting: deque[ServedEpisode] = deque()
        kept: EpisodeProcess | None = None
        while self._queue:
            episode = self._queue.popleft()
            if not episode.due:
                continue
            mine = self._processes if episode.process is None else [episode.process]
            able = [process for process in mine if process is not kept and process.takes(episode)]
            if able:
                self._serve(min(able, key=lambda process: process.num_episodes), episode)
                continue
            waiting.append(episode)
            if episode.suspect and kept is None:
                ready = (process for process in self._processes if process.ready)
                kept = min(ready, key=EpisodeProcess.until_alone, default=None)
        self._queue = waiting

    def _serve(self, process: EpisodeProcess, episode: ServedEpisode) -> None:
        """Send an episode's start, its turn, or both."""
        request = next(self._requests)
        if not process.requests:
            process.busy_since, process.num_answers = time.time(), 0
        process.requests[request] = episode
        steps = 1
        try:
            if episode.process is None:
                episode.process = process
                process.num_episodes += 1
                # The 0 was a part of ids in earlier versions, whose runs resume.
                key = "/".join(map(str, (self.seed, *episode.id, 0)))
                past, steps = tuple(episode.past), 2 + len(episode.past)
                process.send(
                    "begin", request, episode.number, episode.task, key, past, episode.opening,
                    episode.turn,
                )  # fmt: skip
            else:
                process.send("step", request, episode.number, episode.turn)
        except Exception as error:  # what pickle raises for a row's values
            del process.requests[request]
            self._leave(episode)
            self._fail(episode, "error", error)
            return
        process.limits[request] = steps * self.config.turn_timeout_s + GRACE_S
        process.wait_on(request)

    def _step(self) -> None:
        """Wait for answers, commands, deaths or a limit of time, and handle them."""
        limit = min(process.deadline for process in self._processes) - time.monotonic()
        if self._queue or any(process.requests for process in self._processes):
            limit = LOOK_S
        for process in wait_for(self._processes, self._wake, limit):
            self._receive(process)
        for process in list(self._processes):
            if process.connection.closed or process.connection.poll():
                continue
            if not process.ready and time.monotonic() > process.deadline:
                self._start_anew(process)
            elif process.hangs(self.config.turn_timeout_s):
                seconds = self.config.turn_timeout_s
                error = f"no answer within environment.turn_timeout_s={seconds:g}"
                self._replace(process, "timeout", error)

    def _receive(self, process: EpisodeProcess) -> None:
        if not process.ready:
            try:
                process.set_ready()
            except (EOFError, OSError):
                self._start_anew(process)
                return
            self.tools, self._bad_starts = process.tools, 0
            self._ready.set()
            if all(other.ready for other in self._processes):
                self._all_ready.set()
            return
        try:
            request, *answer = process.receive()
            if not answer:
                process.wait_on(request)
                return
            start, step, close_error, replaced = answer
            episode = process.requests.pop(request)
            process.deadlines.pop(request)
            process.limits.pop(request)
            started = None if start is None else EpisodeStart.from_json(start)
            stepped = None if step is None else EpisodeStep.from_json(step)
        except (EOFError, OSError, ValueError, LookupError, TypeError):
            self._replace(process, "crash", "")
            return
        process.num_answers += 1
        if not process.requests:
            self._note_busy(process)
        self.counts["replaced_surrogates"] += replaced
        if close_error:
            self.counts["close_errors"] += 1
            logger.warning("environment of sample %s: close failed: %s", episode.id, close_error)
        if episode.due:
            episode.suspect = False
            self._answered(episode, started, stepped)

    def _answered(
        self, episode: ServedEpisode, start: EpisodeStart | None, step: EpisodeStep | None
    ) -> None:
        """Hand an answer to the driver, or see to a failure."""
        for answer in (start, step):
            if answer is not None and answer.failure is not None:
                self._leave(episode)
                self._fail(episode, answer.failure, answer.error)
                return
        if start is not None:
            episode.opening = start.messages
            episode.past = [
                PastTurn(known.turn, step)
                for known, step in zip(episode.past, start.steps, strict=True)
            ]
        episode.strikes = 0  # of other turns: who dies of bad luck has a second one
        if episode.turn is None:
            episode.settle(start)
            return
        assert step is not None
        episode.past.append(PastTurn(episode.turn, step))
        episode.turn = None
        if step.messages is None:
            self._forget(episode)
            self._leave(episode)
        episode.settle(step)

    def _fail(
        self,
        episode: ServedEpisode,
        kind: FailureKind,
        error: BaseException | str,
        patience: int = 1,
    ) -> None:
        """An episode has failed: run it again, once or so many times, or tell the driver."""
        episode.strikes += 1
        again = self.config.replay and kind in ("error", "crash")
        if again and episode.strikes <= patience:
            self.counts["replays"] += 1
            self._queue.append(episode)
            return
        self.counts[f"failed/{kind}"] += 1
        step = failed(kind, error)
        self._forget(episode)
        is_start = episode.turn is None
        episode.settle(EpisodeStart((), (), kind, step.error) if is_start else step)

    def _replace(self, process: EpisodeProcess, kind: FailureKind, error: str) -> None:
        """Replace a hung or dead process; the episode whose code ran is to blame."""
        number, _ = process.mark.read()
        ended = process.kill()
        if process.requests:
            self._note_busy(process)
        error = error or f"its process ended ({ended})"
        logger.debug("environment process %d is replaced: %s", process.popen.pid, error)
        served = [episode for episode in process.requests.values() if episode.due]
        guilty = [episode for episode in served if episode.number == number]
        patience = PATIENCE if ended == signal.SIGKILL.name and not number else 1
        if not number and len(served) == 1:
            guilty = served
        for episode in list(self._episodes.values()):
            if episode.process is not process:
                continue
            if episode.number == number and not episode.due:  # a task that its program has left
                episode.process, episode.lost = None, (kind, error)
                continue
            self._bereave(episode, is_guilty=episode in guilty, known=bool(number or guilty))
        place = self._processes.index(process)
        self._processes[place] = self._start(place)
        for episode in guilty:
            self._fail(episode, kind, error, patience)

    def _start_anew(self, process: EpisodeProcess) -> None:
        """Replace a process that has ended before it was ready, if others were: it was killed."""
        self._bad_starts += 1
        if not self._ready.is_set() or self._bad_starts > PATIENCE:
            raise process.no_start()
        process.kill()
        place = self._processes.index(process)
        self._processes[place] = self._start(place)

    def _bereave(self, episode: ServedEpisode, is_guilty: bool, known: bool) -> None:
        """An episode whose process is gone: it is replayed when an answer is due."""
        episode.process = None
        if is_guilty:
            return
        if not self.config.replay:
            reason = "its process ended with another episode, and environment.replay=false"
            if episode.due:
                self._fail(episode, "crash", reason)
            else:
                episode.lost = "crash", reason
            return
        self.counts["replays"] += 1
        if episode.due:
            episode.suspect = not known
            if episode not in self._queue:
                self._queue.append(episode)

    def _note_busy(self, process: EpisodeProcess) -> None:
        """A process has worked until now."""
        place, now = self._processes.index(process), max(time.time(), process.busy_since)
        self.spans.append(BusySpan(place, process.busy_since, now, process.num_answers))

    def _leave(self, episode: ServedEpisode) -> None:
        """An episode's program has ended in its process."""
        if episode.process is not None:
            episode.process.leave()
            episode.process = None

    def _forget(self, episode: ServedEpisode) -> None:
        self._episodes.pop(episode.id, None)

    def _start(self, place: int) -> EpisodeProcess:
        port = self.config.port and self.config.port + place
        return EpisodeProcess((*self._settings, port), self.config.kind.value)
