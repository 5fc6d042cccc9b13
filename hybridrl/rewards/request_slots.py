"""At most so many requests in flight; those that were tried before go first."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestSlots:
    """`number` slots; of requests that wait for one, that of the most tries goes first.

    In the order of their coming, retries would follow all that is new. At the end they alone would
    be left, few at a time, and fill few of the slots. To be used in one event loop.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def one(self, retry: int) -> AsyncIterator[None]:
        """Hold a slot; `retry` counts the tries before this one."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (-retry, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Hand a slot to the next that waits and was not canceled."""
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
