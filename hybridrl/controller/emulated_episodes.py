"""Episodes of emulated ranks (`cluster.turns`): replies of known length, after known seconds."""

import heapq
import itertools
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future

from hybridrl.config import Config
from hybridrl.controller.async_calls import Calling, result_of
from hybridrl.controller.episodes import Episodes
from hybridrl.data import Item
from hybridrl.flow.executor import EpisodeReply, TurnEnded
from hybridrl.flow.graph import Graph
from hybridrl.flow.sample import SampleId
from hybridrl.planner.conversations import ModeledTurn, reply_to
from hybridrl.planner.emulation import (
    emulated_conversations,
    emulated_workload,
    group_size_of,
)


class EmulatedEpisodes(Episodes):
    """Answers as the conversations of `hybridrl plan schedule` do; there are no environments.

    A sample's turns, replies and waits follow from its identity, as on its rank. A wait begins when
    the driver knows of the turn.
    """

    def __init__(self, config: Config, graph: Graph) -> None:
        super().__init__(config, None)
        conversations = emulated_conversations(config)
        assert conversations is not None, "cluster.turns"
        self._conversations = conversations
        self._workload = emulated_workload(config, group_size_of(graph))
        self._turns: dict[SampleId, tuple[tuple[ModeledTurn, ...], str]] = {}
        self._num_turns: dict[SampleId, int] = {}
        self._alarm = _Alarm()

    def start(self, ids: Iterable[SampleId], item: Item, max_new_tokens: int) -> None:
        """See `Episodes`."""
        for id in ids:
            modeled = self._conversations.of(id, self._workload.length_of(id))
            self._turns[id], self._num_turns[id] = modeled.cut_at(max_new_tokens), 0

    @property
    def ids(self) -> frozenset[SampleId]:
        """See `Episodes`."""
        return frozenset(self._turns)

    def _answer(self, ended: TurnEnded) -> Calling[EpisodeReply | None]:
        """The model's reply, after its wait."""
        counts, modeled = self._counts, self._turns[ended.id]
        turns, finish = modeled
        turn = turns[self._num_turns[ended.id]]
        self._num_turns[ended.id] += 1
        counts.turns += 1
        reply = reply_to(ended, turn, self._num_turns[ended.id], finish)
        rung = self._alarm.at(time.monotonic() + turn.wait_s)
        yield from result_of(rung)
        if self._turns.get(ended.id) is not modeled:  # the sample has left meanwhile
            return None
        counts.reply_tokens += len(reply.tokens or ())
        if reply.tokens is None:
            counts.ended += 1
            self.end([ended.id])
        return reply

    def end(self, ids: Iterable[SampleId]) -> None:
        """See `Episodes`."""
        for id in ids:
            self._turns.pop(id, None)
            self._num_turns.pop(id, None)

    def close(self) -> None:
        """End the thread that waits."""
        self._alarm.close()


class _Alarm:
    """One thread that resolves futures at their times."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Future[None]]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)
        self._thread.start()

    def at(self, when: float) -> "Future[None]":
        """A future with its result from `when` on, by the monotonic clock."""
        rings: Future[None] = Future()
        with self._changed:
            heapq.heappush(self._due, (when, next(self._number), rings))
            self._changed.notify()
        return rings

    def close(self) -> None:
        """End the thread; what is not due yet never rings."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._is_open:
                    return
                now = time.monotonic()
                if not self._due or self._due[0][0] > now:
                    self._changed.wait(self._due[0][0] - now if self._due else None)
                    continue
                _, _, rings = heapq.heappop(self._due)
            rings.set_result(None)
