"""Ranks of an emulated device (`cluster=emulated`), all in the driver's process: they sleep.

Calls go through the same worker groups as those of real ranks.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hybridrl.config import ClusterConfig, Config
from hybridrl.runtime.launcher import POLL_S, CallFailed
from hybridrl.runtime.process_launcher import Call, ProcessGroup, ProcessLauncher
from hybridrl.workers.base_worker import Reply
from hybridrl.workers.emulated_ranks import EmulatedRanks


class EmulatedLauncher(ProcessLauncher):
    """See `Launcher`. Calls end within `wait`, when their seconds have passed."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self.note = f"emulated: {config.ranks} ranks hold no model, their work takes modeled times"
        self._emulated: EmulatedRanks | None = None

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> ProcessGroup:
        """See `Launcher`; of `args` the config counts."""
        config: Config = args[0]
        ranks = range(config.cluster.ranks)
        self._emulated = EmulatedRanks(ranks, config, self.data_plane)
        return ProcessGroup(worker, [_SleepingRank(self._emulated, rank) for rank in ranks])

    def after(self, seconds: float) -> Any:
        """Return a call that ends after so many seconds, with an empty reply."""
        assert self._emulated is not None
        call = Call()
        self._emulated.at(time.time() + seconds, partial(_end, call, Reply(None, ()), None))
        return call

    def wait(self, references: Sequence[Call], timeout: float = POLL_S) -> list[Call]:
        """See `Launcher`."""
        assert self._emulated is not None
        until = time.time() + timeout
        while True:
            now = time.time()
            self._emulated.end_due(now)
            if ready := [call for call in references if call.done]:
                return ready
            if now >= until:
                return []
            next_end = self._emulated.next_end
            time.sleep(max(0.0, min(until, next_end or until) - now))

    def first_dead(self, group: ProcessGroup) -> None:
        """None dies but with the driver."""

    def log(self, file: str, logs: object) -> str:
        """They log with the driver."""
        return f"{logs}/driver.log"


class _SleepingRank:
    """A rank in this process."""

    def __init__(self, ranks: EmulatedRanks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Begin a method."""
        call = Call()
        self.ranks.call(self.rank, name, args, kwargs, time.time(), partial(_end, call))
        return call

    def kill(self) -> None:
        """It ends with the driver."""


def _end(call: Call, reply: Reply[Any] | None, error: Exception | None) -> None:
    call.done, call.value = True, reply
    call.failure = None if error is None else CallFailed(str(error), error)
