"""The watch over ranks that are stuck: what each is in, and which ones the others wait for.

Ranks record what they are in (`system.activity`). A stretch of a call that lasts many times as long
as it ever did is a hang. Ranks in a collective are past their bound as well, since they wait for
the one that has not come: stacks tell them apart.
"""

import logging
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config import ClusterConfig
from hybridrl.system import activity
from hybridrl.system.activity import Activity
from hybridrl.system.rank_looks import RankLook, look, process_state

logger = logging.getLogger(__name__)

LEARNED = 2
"""Stretches of a kind that have ended, from which on they are a bound."""
OF_FILES = frozenset(
    {"listen", "setup", "begin", "load", "load_weights", "load_pushed", "load_pending"}
    | {"save_state", "save_weights", "save_pushed", "save_pending", "save_tensors"}
    | {"load_tensors", "finish_records", "close"}
)
"""Calls whose seconds follow from files, which no earlier call tells."""
_LOOK_S = 1.0


@dataclass(frozen=True)
class Hang:
    """Ranks that are stuck, and lines that say what every rank is in."""

    stuck: tuple[int, ...]
    reason: str
    lines: tuple[str, ...]


class HangWatch:
    """Looks at ranks while the driver waits for them, once a second."""

    def __init__(self, config: ClusterConfig, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self._looked = time.monotonic()
        self._idle_since: dict[int, tuple[float, float]] = {}  # begin of idleness, first look
        self._named: set[tuple[int, float]] = set()

    def check(self, ranks: Sequence[int], awaited: Iterable[int]) -> Hang | None:
        """A hang among `ranks`, all that live; those of `awaited` have calls to answer."""
        now = time.monotonic()
        if not self.config.hang_factor or now - self._looked < _LOOK_S:
            return None
        self._looked = now
        doing = {rank: activity.read(activity.file_of(self.run_dir, rank)) for rank in ranks}
        waited = self._waited(doing, frozenset(awaited))
        late = {rank for rank, (one, seconds) in waited.items() if seconds > self.bound(one)}
        if not late:
            return None
        looks = look(self.run_dir, ranks)
        lines, stuck = tuple(map(str, looks)), _stuck(looks, late, waited)
        late_s = {rank: waited[rank][1] for rank in late}
        if any(seconds > self.most(waited[rank][0]) for rank, seconds in late_s.items()):
            first = next(one for one in looks if one.rank == stuck[0])
            what = f"in {first.activity}" if first.activity.call else "before it takes its call"
            reason = f"it is stuck {what}, for {max(late_s.values()):.0f} s; it {first.place}"
            return Hang(tuple(stuck), reason, lines)
        news = {(rank, waited[rank][0].since) for rank in late}
        if not news <= self._named:
            self._named |= news
            text = "\n".join(lines)
            logger.warning("nothing has ended for %.0f s:\n%s", max(late_s.values()), text)
        return None

    def bound(self, one: Activity) -> float:
        """Seconds after which a line says what ranks are in."""
        most = self.most(one)
        return min(most, self.config.start_timeout_s) if self._is_new(one) else most

    def most(self, one: Activity) -> float:
        """Seconds after which a stretch of a call, or a call that is not taken, is a hang."""
        learned = one.call and not self._is_new(one)
        if learned or process_state(one.pid):  # a process that is stopped needs no comparison
            longest = one.longest if learned else 0.0
            return max(self.config.hang_floor_s, self.config.hang_factor * longest)
        return self.config.timeout_s if one.call else self.config.start_timeout_s

    def _is_new(self, one: Activity) -> bool:
        return one.call in OF_FILES or one.times < LEARNED

    def _waited(
        self, doing: dict[int, Activity | None], awaited: frozenset[int]
    ) -> dict[int, tuple[Activity, float]]:
        """What ranks in a call are in, or before one that is awaited, and for how long."""
        now, waited = time.monotonic(), {}
        for rank, one in doing.items():
            if one is None:
                continue
            if one.call or rank not in awaited:
                self._idle_since.pop(rank, None)
                if one.call:
                    waited[rank] = one, one.seconds
                continue
            since, first = self._idle_since.get(rank, (one.since, now))
            first = first if since == one.since else now
            self._idle_since[rank] = one.since, first
            waited[rank] = one, now - first
        return waited


def _stuck(looks: Sequence[RankLook], late: set[int], waited: Container[int]) -> list[int]:
    """Return the ranks that the others wait for; all that are late where nothing tells them apart.

    A rank that has not come to a collective may be within its own bound: it is in another call, or
    does not take one.
    """
    stopped = [one.rank for one in looks if one.state]
    away = [one.rank for one in looks if one.rank in late and not one.collective]
    others = [one.rank for one in looks if one.rank in waited and not one.collective]
    return stopped or away or others or sorted(late)
