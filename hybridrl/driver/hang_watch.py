"""The watch over ranks that are stuck: what each is in, and which ones the others wait for.

Ranks record what they are in (`system.activity`). A stretch of a call that lasts many times as long
as it ever did is a hang. Ranks in a collective are past their bound as well, since they wait for
the one that has not come: stacks tell them apart.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
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
    | {"load_tensors", "finish_records", "finish_save", "close"}
    | {"create_model", "save_model", "load_model", "read_snapshot"}
)
"""Calls whose seconds follow from files, which no earlier call tells."""
OF_CLIENTS = frozenset({"add_gradient", "draw", "score_tokens"})
"""Calls of a server, each as long as its client's request is large."""
_LOOK_S = 1.0
_STACKS_S = 10.0  # between two looks at stacks, which signal all ranks
_PAUSE_S = 10.0  # without a look: the driver was busy, or the whole run was stopped


@dataclass(frozen=True)
class Hang:
    """Ranks that are stuck, and lines that say what every rank is in."""

    stuck: tuple[int, ...]
    reason: str
    lines: tuple[str, ...]


class HangWatch:
    """Looks at ranks while the driver waits for them, once a second.

    A rank is late if its stretch lasts longer than `bound`. It is stuck if it is past `most` and in
    no collective, or has been stopped for `hang_floor_s`. One that waits in a collective is stuck
    only where all others do, too: else it waits for those that do not, however long they may take.
    """

    def __init__(self, config: ClusterConfig, run_dir: Path) -> None:
        self.config, self.run_dir = config, run_dir
        self._looked = self._resumed = time.monotonic()
        self._stacks_read = -_STACKS_S
        self._stopped: dict[int, float] = {}  # since when, by rank
        self._named: set[tuple[int, float]] = set()

    def check(self, ranks: Sequence[int], awaited: Iterable[int]) -> Hang | None:
        """A hang among `ranks`, all that live; those of `awaited` have calls to answer."""
        now = time.monotonic()
        if not self.config.hang_factor or now - self._looked < _LOOK_S:
            return None
        if now - self._looked > _PAUSE_S:
            self._resumed = now
        self._looked = now
        activities = {rank: activity.read(activity.file_of(self.run_dir, rank)) for rank in ranks}
        known = {rank: one for rank, one in activities.items() if one is not None}
        busy = {rank: one for rank, one in known.items() if one.call}
        stopped = self._stopped_ranks(known, busy.keys() | {*awaited}, now)
        late = {rank for rank, one in busy.items() if self._seconds(one, now) > self.bound(one)}
        if not (late or stopped) or now - self._stacks_read < _STACKS_S:
            return None
        news = {(rank, known[rank].since) for rank in late} - self._named
        over = [rank for rank in late if self._seconds(known[rank], now) > self.most(known[rank])]
        if not (news or over or stopped):
            return None
        self._stacks_read = time.monotonic()
        looks = look(self.run_dir, known)
        lines, seen = tuple(map(str, looks)), {one.rank for one in looks}
        stuck = stopped or self._stuck(looks, busy, over, now)
        if stuck := [rank for rank in stuck if rank in seen]:
            return Hang(tuple(stuck), self._reason(looks, stuck, now), lines)
        if news:
            self._named |= news
            seconds = max(self._seconds(known[rank], now) for rank in late)
            logger.warning("nothing has ended for %.0f s:\n%s", seconds, "\n".join(lines))
        return None

    def bound(self, one: Activity) -> float:
        """Seconds after which a line says what ranks are in."""
        most = self.most(one)
        return min(most, self.config.start_timeout_s) if self._is_new(one) else most

    def most(self, one: Activity) -> float:
        """Seconds that a stretch of a call may last."""
        if self._is_new(one):
            return self.config.timeout_s
        return max(self.config.hang_floor_s, self.config.hang_factor * one.longest)

    def _is_new(self, one: Activity) -> bool:
        return one.call in OF_FILES | OF_CLIENTS or one.times < LEARNED

    def _seconds(self, one: Activity, now: float) -> float:
        return now - max(one.since, self._resumed)

    def _stopped_ranks(
        self, known: Mapping[int, Activity], at_work: Set[int], now: float
    ) -> list[int]:
        """Ranks with work to do that have been stopped for `hang_floor_s`, as far as was seen."""
        states = {rank: process_state(one.pid) for rank, one in known.items() if rank in at_work}
        self._stopped = {r: self._stopped.get(r, now) for r, state in states.items() if state}
        floor = self.config.hang_floor_s
        return [r for r, since in self._stopped.items() if now - max(since, self._resumed) > floor]

    def _stuck(
        self,
        looks: Sequence[RankLook],
        busy: Mapping[int, Activity],
        over: Sequence[int],
        now: float,
    ) -> list[int]:
        """Return ranks past their bound that wait for nobody; all of them if nobody else works."""
        waiting = {one.rank for one in looks if one.collective}
        if away := [rank for rank in over if rank not in waiting]:
            return away
        others = [self.most(one) for rank, one in busy.items() if rank not in waiting]
        idle = [one.rank for one in looks if one.rank not in busy]
        most = max([*others, *[self.config.timeout_s] * bool(idle)], default=0.0)
        return [rank for rank in over if self._seconds(busy[rank], now) > most]

    def _reason(self, looks: Sequence[RankLook], stuck: Sequence[int], now: float) -> str:
        first = next(one for one in looks if one.rank == stuck[0])
        what = f"in {first.activity}" if first.activity.call else "before it takes its call"
        since = max(first.activity.since, self._resumed)
        all_of = f" as ranks {', '.join(map(str, stuck))} are" if len(stuck) > 1 else ""
        return f"it is stuck{all_of} {what}, for {now - since:.0f} s; it {first.place}"
