"""Answers that clients fetch later: request ids, long polls, and the order of a model's requests.

A client sends a request and gets an id at once; it then asks for the answer until it is there. A
model's requests carry numbers, and run in their order whatever the order of their arrival.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from hybridrl.serving.requests import Refused, ServerFailed

logger = logging.getLogger(__name__)

WireReply = bytes | dict[str, Any]
"""An answer: bytes are protobuf, and an object is JSON."""
MakeReply = Callable[[], Awaitable[WireReply]]

LARGEST_SEQ = 1 << 62
"""The largest of a client's numbers."""
POLL_S = 30.0
"""Seconds of a long poll; the SDK gives up at 45."""
KEPT_S = 300.0
"""Seconds that an answer is kept after it was fetched: the client may have lost it."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A request that has an id; `reply` is its answer, or what it failed with."""

    id: str
    reply: asyncio.Future[WireReply]


class Futures:
    """The requests that have not been fetched, by id; `on_failure` is told of ServerFailed."""

    def __init__(self, on_failure: Callable[[str], None], poll_s: float) -> None:
        self._on_failure = on_failure
        self._poll_s = poll_s
        self._pending: dict[str, Pending] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, session: str) -> Pending:
        """A request of a session that will run, or fail, later."""
        reply = asyncio.get_running_loop().create_future()
        pending = Pending(f"{session}:{secrets.token_hex(8)}", reply)
        # What nobody fetches has failed in silence, and is no error of asyncio's.
        pending.reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        self._pending[pending.id] = pending
        return pending

    def start(self, pending: Pending, run: MakeReply) -> None:
        """Run a request. Those started first take their first step first."""
        task = asyncio.create_task(self._resolve(pending, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resolve(self, pending: Pending, run: MakeReply) -> None:
        try:
            reply = await run()
        except (Refused, ServerFailed) as error:
            fail(pending, error)
            if isinstance(error, ServerFailed):
                self._on_failure(str(error))
        except Exception as error:  # of one request, which must not wait for ever
            logger.exception("a request failed")
            fail(pending, ServerFailed(f"{type(error).__name__}: {error}"))
        else:
            if not pending.reply.done():
                pending.reply.set_result(reply)

    async def fetch(self, request_id: str) -> tuple[int, WireReply]:
        """An HTTP status and an answer: 200, or 408 after a long poll in vain.

        Raises KeyError for an id that is unknown, or that was fetched long ago.
        """
        pending = self._pending[request_id]
        done, _ = await asyncio.wait([pending.reply], timeout=self._poll_s)
        if not done:
            return 408, {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        self._forget_later([request_id])
        error = pending.reply.exception()
        if error is None:
            return 200, pending.reply.result()
        category = "user" if isinstance(error, Refused) else "server"
        return 200, {"error": str(error), "category": category}

    def forget(self, session: str) -> None:
        """Keep the answers of a session for a while yet, fetched or not."""
        self._forget_later([name for name in self._pending if name.startswith(f"{session}:")])

    def _forget_later(self, request_ids: list[str]) -> None:
        def drop() -> None:
            for request_id in request_ids:
                self._pending.pop(request_id, None)

        asyncio.get_running_loop().call_later(KEPT_S, drop)

    def fail_all(self, line: str) -> None:
        """Fail every request that has no answer yet."""
        for pending in self._pending.values():
            fail(pending, ServerFailed(line))

    async def close(self) -> None:
        """End the tasks that still run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def fail(pending: Pending, error: Exception) -> None:
    """Fail a request, unless it has an answer."""
    if not pending.reply.done():
        pending.reply.set_exception(error)


def refuser(error: Refused) -> MakeReply:
    """A run that fails with `error`: the request takes its turn, and its number."""

    async def run() -> WireReply:
        raise error

    return run


@dataclass(slots=True)
class RequestOrder:
    """The requests of a model, which run by their numbers from 1.

    Each number is known by the id of its request, waits while one before it is missing, and is
    started once. A number that comes again gets the same id. Example: 2, 3, 2, 1 arrive; the third
    gets the id of the first, and the fourth starts 1, 2 and 3.
    """

    futures: Futures
    session: str
    _ids: dict[int, str] = field(default_factory=dict)
    _waiting: dict[int, tuple[Pending, MakeReply]] = field(default_factory=dict)
    _next: int = 1
    _ended: str | None = None

    def submit(self, number: int, run: MakeReply) -> str:
        """The id of a request. Raises Refused for a number below 1, and after the end."""
        if number in self._ids:
            return self._ids[number]
        if self._ended is not None:
            raise Refused(self._ended)
        if not 1 <= number <= LARGEST_SEQ:
            raise Refused(f"seq_id={number}: wanted 1 to {LARGEST_SEQ}")
        pending = self.futures.open(self.session)
        self._ids[number] = pending.id
        self._waiting[number] = (pending, run)
        while self._next in self._waiting:
            self.futures.start(*self._waiting.pop(self._next))
            self._next += 1
        return pending.id

    def end(self, line: str) -> None:
        """Take no further request; those that wait for a missing number fail with this line."""
        self._ended = line
        for pending, _ in self._waiting.values():
            fail(pending, Refused(line))
        self._waiting.clear()
