"""A process of an environment, as the driver has it, and the episodes that it serves."""

import contextlib
import pickle
import threading
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from hybridrl.environments.episode import CLOSE_S
from hybridrl.environments.mark import Mark
from hybridrl.environments.task import (
    ChatMessage,
    EpisodeTask,
    FailureKind,
    ModelTurn,
    PastTurn,
)
from hybridrl.rewards.process import SandboxedProcess

PROGRAM = "hybridrl.environments.worker"
"""The module that its processes run."""
LARGEST_ANSWER = 64 << 20
"""Bytes of one answer, which a replay may fill with all of an episode."""
BUSY_S = 1.0
"""A process whose code runs so long without a pause gets no work: its time would count already."""
FINISH_LOOK_S = 0.02
"""Seconds between two looks at whether a process has ended that was asked to."""

EpisodeId = tuple[Any, ...]
"""The identity of a sample: it keys the episode's random numbers."""


@dataclass(eq=False, slots=True)
class ServedEpisode:
    """An episode of the pool; `process` is where its program is, None where it must be started.

    `turn` and `future` are what it is to answer: without a turn its start. `strikes` counts its
    failures. A suspect was being served when a process died, and nobody knows through whom. One is
    `lost`, of a kind and with an error, where its process ended while no answer was due.
    """

    id: EpisodeId
    number: int
    task: EpisodeTask
    future: "Future[Any]"
    past: list[PastTurn]
    opening: tuple[ChatMessage, ...] | None = None
    turn: ModelTurn | None = None
    process: "EpisodeProcess | None" = None
    due: bool = True
    strikes: int = 0
    suspect: bool = False
    lost: "tuple[FailureKind, str] | None" = None

    def settle(self, result: Any) -> None:
        """Give the answer that is due."""
        self.due = False
        settle(self.future, result)


class EpisodeProcess(SandboxedProcess):
    """A process with the episodes that it is serving, and when each must be answered.

    The `deadlines` of requests are so many seconds (`limits`) after they were sent, or after the
    process has said that their programs are queued.
    """

    def __init__(self, settings: tuple[Any, ...], kind: str) -> None:
        self.mark = Mark()
        self.tools: tuple[dict[str, Any], ...] = ()
        self.requests: dict[int, ServedEpisode] = {}
        self.limits: dict[int, float] = {}
        self.deadlines: dict[int, float] = {}
        self.num_episodes = self.num_answers = 0
        self.busy_since = 0.0
        self._closes_until = 0.0
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="episode-sender", daemon=True)
        name = f"environment ({kind})"
        super().__init__(
            PROGRAM,
            settings,
            name,
            largest_answer=LARGEST_ANSWER,
            shared=[self.mark.descriptor],
        )
        self._sender.start()

    def on_ready(self, details: list[Any]) -> None:
        """The tools that its environment offers."""
        self.tools = tuple(details[0])

    def send(self, *request: Any) -> None:
        """Have a request sent; a process that does not read, or has died, is seen later.

        Raises what pickle raises for its values.
        """
        self._outbox.put(pickle.dumps(request))

    def _send_all(self) -> None:
        """The thread that sends: it alone waits where the process does not read."""
        with contextlib.suppress(OSError):
            while (request := self._outbox.get()) is not None:
                self.connection.send_bytes(request)

    def leave(self) -> None:
        """One of its episodes has ended, and may be closing its environment."""
        self.num_episodes -= 1
        self._closes_until = time.monotonic() + CLOSE_S

    def wait_on(self, request: int) -> None:
        """A request has its time from now on. Raises KeyError for one that is not here."""
        self.deadlines[request] = time.monotonic() + self.limits[request]

    @property
    def serves_suspect(self) -> bool:
        """Whether it is serving one."""
        return any(episode.suspect for episode in self.requests.values())

    def until_alone(self) -> tuple[bool, int]:
        """Orders processes by when a suspect can be served there."""
        return not self.serves_suspect, len(self.requests)

    def takes(self, episode: ServedEpisode) -> bool:
        """Whether an episode can be served now; a suspect is served alone."""
        if not self.ready or self.serves_suspect:
            return False
        number, since = self.mark.read()
        if number and time.monotonic() - since > BUSY_S:
            return False
        return not (episode.suspect and self.requests)

    def hangs(self, seconds: float) -> bool:
        """Whether a step of someone's code takes longer than that, or an answer is overdue."""
        number, since = self.mark.read()
        now = time.monotonic()
        overdue = any(now > deadline for deadline in self.deadlines.values())
        return overdue or (number > 0 and now - since > seconds)

    def finish(self) -> None:
        """Let it close its environments, then end it."""
        if self.connection.closed:
            return
        now = time.monotonic()
        until = now + CLOSE_S if self.ready and self.num_episodes else self._closes_until
        until = max(until, now + 0.5)
        self._outbox.put(None)
        self._sender.join(until - now)
        self.disconnect()
        while not self.has_ended and time.monotonic() < until:
            time.sleep(FINISH_LOOK_S)
        self.kill()

    def disconnect(self) -> None:
        """As the base class, once nothing is being sent any more."""
        if self.connection.closed:
            return
        self.hang_up()  # what is still being sent fails
        self._outbox.put(None)
        self._sender.join()
        super().disconnect()

    def kill(self) -> str:
        """As the base class; its mark is given up."""
        ended = super().kill()
        self.mark.close()
        return ended


def settle(future: "Future[Any]", result: Any) -> None:
    """Resolve a future, with None cancel it; one that is resolved stays as it is."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, BaseException):
            future.set_exception(result)
        elif result is not None:
            future.set_result(result)
        elif future.cancel():
            future.set_running_or_notify_cancel()
