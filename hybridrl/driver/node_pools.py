"""Sandboxes on every node: a pool on the driver's, and on Ray one on each other node."""

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import os
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from hybridrl.runtime.launcher import CallFailed, OtherNode
from hybridrl.sandbox import BusySpan, SandboxPool
from hybridrl.sandbox.process import settle

logger = logging.getLogger(__name__)

CLOSE_S = 15.0
"""Seconds for the other nodes' pools to close what their tasks have left."""


class Lost(Enum):
    """What a call gives instead of its answer."""

    LOST = "lost"


LOST: Final = Lost.LOST
"""What a call gives whose node has died: it must be made again."""


class PoolServer:
    """An actor that has a pool; it begins calls in the order of their numbers."""

    def __init__(self) -> None:
        self.pool: Any = None
        self._next, self._order = 0, asyncio.Condition()

    def open(self, make: Callable[[], SandboxPool[Any]], variables: Mapping[str, str]) -> None:
        """Make the pool, whose code finds the driver's variables that the node lacks."""
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        self.pool = make()
        self.pool.wait_ready()

    async def call(
        self, number: int, name: str, *args: Any
    ) -> tuple[Any, Counter[str], list[BusySpan]]:
        """The answer of a method, None for a task that was given up; counts so far and spans."""
        async with self._order:  # Ray does not promise an order
            await self._order.wait_for(lambda: self._next == number)
            try:
                owner = self.pool or self  # which opens it
                answer = await asyncio.to_thread(getattr(owner, name), *args)
            finally:
                self._next += 1
                self._order.notify_all()
        if isinstance(answer, Future):
            waited, answer = asyncio.wrap_future(answer), None
            with contextlib.suppress(asyncio.CancelledError):
                answer = await waited
        spans = [self.pool.spans.popleft() for _ in range(len(self.pool.spans))]
        return answer, Counter(self.pool.counts), spans


class NodePool(ABC):
    """A node's pool, which has `share` processes, or calls at a time."""

    def __init__(self, share: int) -> None:
        self.share = share
        self._calls: set[Future[Any]] = set()

    def call(self, name: str, *args: Any) -> "Future[Any]":
        """Have a method called; gives its answer, or `LOST`."""
        future = self._begin(name, *args)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    @abstractmethod
    def _begin(self, name: str, *args: Any) -> "Future[Any]":
        """Have a method called; a future of nothing is cancelled."""

    @property
    def load(self) -> float:
        """Calls in flight for its share."""
        return len(self._calls) / self.share


class _Here(NodePool):
    """The pool of the driver's process."""

    def __init__(self, pool: SandboxPool[Any], share: int) -> None:
        super().__init__(share)
        self.pool = pool

    def _begin(self, name: str, *args: Any) -> "Future[Any]":
        answer = getattr(self.pool, name)(*args)
        if not isinstance(answer, Future):
            answer = Future()
            settle(answer, None)
        return answer


class _There(NodePool):
    """The pool of another node; it takes calls once it `is_up`, until the node dies."""

    def __init__(self, node: OtherNode, make: Callable[[], Any], share: int, name: str) -> None:
        super().__init__(share)
        self.node, self.name = node, name
        self.is_up, self.is_lost, self._num_calls = False, False, 0
        self.counts, self.spans = Counter[str](), deque[BusySpan]()
        """They are those of the last answer."""
        self.remote = node.start(PoolServer)
        # A call goes from process to process: no server of the cluster's keeps what is a secret.
        self.ready = self.call("open", make, dict(os.environ))

    def _begin(self, name: str, *args: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        done = self.remote.call(self._num_calls, name, *args)
        self._num_calls += 1
        done.add_done_callback(functools.partial(self._answered, future, name))
        return future

    def _answered(self, future: "Future[Any]", name: str, done: "Future[Any]") -> None:
        try:
            answer, self.counts, spans = done.result()
            self.spans += spans
            self.is_up = not self.is_lost
        except CallFailed as error:
            answer = error.cause or error
            if error.died or name == "open":
                self._lose(answer)
                answer = LOST
        settle(future, answer)

    def _lose(self, error: BaseException) -> None:
        if not self.is_lost:
            self.is_up, self.is_lost = False, True
            why, where = " ".join(str(error).split()), self.node.name
            logger.warning("%s: node %s is lost, and others do its work: %s", self.name, where, why)


class NodePools:
    """A pool on each node: the driver's own, and others, each with its share of the work.

    States of another node's pool: starting; up, when it takes calls; lost, when its calls give
    `LOST`. The driver's own is up from the start, so no call waits for a node that starts.
    """

    def __init__(
        self,
        make: Callable[[int], Callable[[], SandboxPool[Any]]],
        number: int,
        nodes: Sequence[OtherNode],
        least: int = 0,
    ) -> None:
        """`number` processes, or calls at a time, are shared by the nodes' CPUs.

        `make(share)` makes the pool of a node, whose share is `least` or more. A node without a
        share has none.
        """
        shares = [max(least, int(number * node.share)) for node in nodes]
        share = max(1, number - sum(shares))
        self.local = make(share)()
        self._here = _Here(self.local, share)
        self._shares = [share, *filter(None, shares)]
        self._there = [
            _There(node, make(share), share, self.local.name)
            for node, share in zip(nodes, shares, strict=True)
            if share
        ]

    @property
    def _up(self) -> list[NodePool]:
        return [self._here, *(node_pool for node_pool in self._there if node_pool.is_up)]

    def freest(self) -> NodePool:
        """The pool with the fewest calls in flight for its share."""
        return min(self._up, key=lambda node_pool: node_pool.load)

    @property
    def is_full(self) -> bool:
        """Whether a call that is made now waits until others are answered."""
        return self.freest().load >= 1

    def wait_ready(self) -> None:
        """Wait until the pools of all nodes are up, or lost."""
        self.local.wait_ready()
        concurrent.futures.wait([node_pool.ready for node_pool in self._there])

    @property
    def counts(self) -> Counter[str]:
        """Counts so far of all nodes, by name."""
        total = Counter(self.local.counts)
        for node_pool in self._there:
            total.update(node_pool.counts)
        return total

    def spans(self) -> Iterator[BusySpan]:
        """What the processes did since the last call, numbered through all nodes."""
        first = 0
        deques = [self.local.spans, *(node_pool.spans for node_pool in self._there)]
        for spans, share in zip(deques, self._shares, strict=True):
            while spans:
                span = spans.popleft()
                yield replace(span, place=first + span.place)
            first += share

    def close(self) -> None:
        """End all processes."""
        ended = [node_pool.call("close") for node_pool in self._there if node_pool.is_up]
        for node_pool in self._there:  # what they still answer is no loss
            node_pool.is_up, node_pool.is_lost = False, True
        try:
            self.local.close()
            concurrent.futures.wait(ended, CLOSE_S)
        finally:
            for node_pool in self._there:
                node_pool.remote.kill()
