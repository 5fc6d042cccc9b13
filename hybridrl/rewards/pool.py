"""Verifiers in sandboxed processes, each sample under a time limit."""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hybridrl.config import JailKind, JudgeConfig, RewardCall, RewardKind, SourceConfig
from hybridrl.rewards.closing import Closing
from hybridrl.rewards.process import JudgeProcess, wait_for
from hybridrl.rewards.results import RewardInput, RewardResult, result_of
from hybridrl.rewards.verifiers import make_verifier

logger = logging.getLogger(__name__)

PROGRAM = "hybridrl.rewards.worker"
"""The module that its processes run."""


class RewardPool(Closing):
    """Judges batches of responses in `num_processes` separate processes.

    Each is a `JudgeProcess`: a fresh interpreter with a memory limit.

    States of a process: starting (its verifier is being built, START_TIMEOUT_S), idle, busy with a
    chunk. A busy process answers sample by sample, in order. So if it exceeds the time limit or
    dies, the first unanswered sample caused it. It has failed, the remaining chunk returns to the
    queue, and a new process replaces the old. With call=batch the whole chunk is one call, and all
    of it is guilty. Invariant: every input gets exactly one result.

    kind=exact without `extract`, and kind=environment, cannot hang and are judged in this process:
    128 samples take 0.1 ms against 3 ms through a process (docs/rewards.md).
    """

    def __init__(
        self, config: JudgeConfig, sources: Mapping[str, SourceConfig] | None = None
    ) -> None:
        assert config.kind is not RewardKind.model, "a reward model needs no verifier"
        self.config = config
        self.sources = dict(sources or {})
        self._lock = threading.Lock()
        self._inline = None
        self._jail_is_logged = False
        self._processes: list[_Verifying] = []
        # The kernel signals children when the thread that started them ends: keep one thread alive.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="reward-spawner")
        kind, number = config.kind.value, config.num_processes
        plain = config.kind is RewardKind.exact and config.extract is None
        if plain or config.kind is RewardKind.environment:
            logger.debug("the verifier runs in this process, kind %s", kind)
            self._inline = make_verifier(config)
        else:
            logger.debug("starting %d verifier processes, kind %s", number, kind)
            self._processes = [self._start() for _ in range(number)]

    def score(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per input, in order. One that fails by an error is judged once more.

        Blocks without holding the interpreter; calls from several threads are serialized. Raises
        ConfigError or RuntimeError if a verifier process cannot start.
        """
        if self._inline is not None:
            judged = map(self._inline, items)
            return [RewardResult(reward, text=text) for reward, text in judged]
        logger.debug("verifying %d responses", len(items))
        with self._lock:
            if not self._processes:
                raise ValueError("the reward pool is closed")
            with self._closed_on_error():
                results = self._score(items)
                again = [i for i, result in enumerate(results) if result.status == "error"]
                second = self._score([items[i] for i in again])
                for i, result in zip(again, second, strict=True):
                    results[i] = result
            logger.debug("%d responses are verified", len(items))
            return results

    def wait_ready(self) -> None:
        """Wait until every process has its verifier; raises as `score` does.

        `score` waits by itself; this excludes the start from a measurement or finds errors early.
        """
        with self._lock, self._closed_on_error():
            while not all(process.ready for process in self._processes):
                self._step([], deque())

    def close(self) -> None:
        """End all processes and wait for them. May be called twice."""
        logger.debug("ending %d verifier processes", len(self._processes))
        for process in self._processes:
            process.kill()
        self._processes = []
        self._spawner.shutdown()

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close if a call fails: its pending answers would reach the next call."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _score(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        results: list[RewardResult | None] = [None] * len(items)
        # Four chunks a process: few messages, and the processes end at about the same time.
        chunks = len(self._processes) * (1 if self.config.call is RewardCall.batch else 4)
        size = max(1, math.ceil(len(items) / chunks))
        queue = deque(range(i, min(i + size, len(items))) for i in range(0, len(items), size))
        while queue or any(process.pending for process in self._processes):
            for process in self._processes:
                if queue and process.ready and not process.pending:
                    chunk = [items[index] for index in queue[0]]
                    if process.send(chunk):
                        self._assign(process, queue.popleft())
            self._step(results, queue)
        return [result for result in results if result is not None]

    def _assign(self, process: "_Verifying", pending: range) -> None:
        process.pending = pending
        process.deadline = time.monotonic() + self.config.timeout_s if pending else math.inf

    def _step(self, results: list[RewardResult | None], queue: deque[range]) -> None:
        """Wait for answers, deaths or the next time limit, and handle them."""
        limit = min(process.deadline for process in self._processes) - time.monotonic()
        for process in wait_for(self._processes, None, limit):
            self._receive(process, results, queue)
        for process in list(self._processes):
            if time.monotonic() > process.deadline and not process.connection.poll():
                message = f"no reward within {self.config.timeout_s} s"
                self._replace(process, RewardResult(0.0, "timeout", message), results, queue)

    def _receive(
        self, process: "_Verifying", results: list[RewardResult | None], queue: deque[range]
    ) -> None:
        if not process.ready:
            try:
                process.set_ready()
            except (EOFError, OSError) as error:
                raise process.no_start() from error
            logger.debug("verifier process %d is ready", process.popen.pid)
            self._log_jail(process.jail)
            return
        try:
            result = process.result()
        except (EOFError, OSError, ValueError):
            guilty = RewardResult(0.0, "error", f"the verifier process ended ({process.kill()})")
            self._replace(process, guilty, results, queue)
            return
        results[process.pending[0]] = result
        self._assign(process, process.pending[1:])

    def _log_jail(self, jail: str) -> None:
        """Say once what confines the programs of responses."""
        if jail and not self._jail_is_logged:
            self._jail_is_logged = True
            level = logging.WARNING if self.config.jail is JailKind.off else logging.INFO
            logger.log(level, "the programs in responses run in: %s", jail)

    def _replace(
        self,
        process: "_Verifying",
        guilty: RewardResult,
        results: list[RewardResult | None],
        queue: deque[range],
    ) -> None:
        """Replace a hung or dead process, whose first pending sample gets the result `guilty`.

        With call=batch all of them do.
        """
        if not process.ready:
            raise process.no_start()
        logger.debug("verifier process %d is replaced: %s", process.popen.pid, guilty.message)
        process.kill()
        first = len(process.pending) if self.config.call is RewardCall.batch else 1
        for index in process.pending[:first]:
            results[index] = guilty
        if len(process.pending) > first:
            queue.appendleft(process.pending[first:])
        self._processes[self._processes.index(process)] = self._start()

    def _start(self) -> "_Verifying":
        process = self._spawner.submit(_Verifying, PROGRAM, self.config, self.sources).result()
        logger.debug("verifier process %d starts", process.popen.pid)
        return process


class _Verifying(JudgeProcess):
    """The pool's handle of a verifier process. `pending` are the indices without an answer."""

    pending = range(0)

    def send(self, chunk: Sequence[RewardInput]) -> bool:
        """Send a chunk to judge; False if the process died while idle."""
        try:
            self.connection.send(chunk)
        except OSError:
            return False
        return True

    def result(self) -> RewardResult:
        """Its next answer. Raises EOFError or OSError if it is dead, ValueError for garbage."""
        answer = self.receive()
        if not self.pending:
            raise ValueError("an answer to nothing")
        return result_of(answer)
