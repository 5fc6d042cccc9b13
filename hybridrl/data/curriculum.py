"""A stream of prompts in which those that are always solved, or never, rest for some epochs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from statistics import fmean
from typing import Any, NamedTuple

from hybridrl.config import Config, CurriculumConfig
from hybridrl.data.load import Data, PromptStream
from hybridrl.data.prompts import Item


class SolvePool(Enum):
    """The pool of a prompt, by the solve rate when it was sampled last."""

    easy = "easy"  # at or above `easy_threshold`
    normal = "normal"
    hard = "hard"  # at or below `hard_threshold`
    unseen = "unseen"  # not sampled yet


class Draw(NamedTuple):
    """The item at a position of the stream, and the epoch over its source that it was drawn in."""

    source: str
    item: int
    epoch: int


class Seen(NamedTuple):
    """The pool of an item that was sampled, and the first epoch in which it may be drawn again."""

    pool: SolvePool
    due: int


class CurriculumStream(PromptStream):
    """A `PromptStream` that passes over the prompts that rest.

    An item is judged in epoch e of its source. A normal one is drawn again in epoch e + 1, an easy
    one in e + 1 + `easy_rest`, a hard one in e + 1 + `hard_rest`. An epoch without any item to draw
    is passed over as a whole.

    State: `position`, the next number of each source, the pools, and the draws whose results have
    not come yet. Invariants: what is drawn depends on the seed and on the results observed before;
    with nothing at rest the order is that of `PromptStream`. Mixture weights hold as there.

    Example, `easy_rest` 2: items x and y are drawn in epoch 0, and x is always solved. Epochs 1 and
    2 are y alone, and 3 has both again.
    """

    def __init__(
        self,
        items: Sequence[Item],
        seed: int,
        weights: Mapping[str, float] | None = None,
        *,
        settings: CurriculumConfig,
    ) -> None:
        super().__init__(items, seed, weights)
        self.settings = settings
        self._rests = {SolvePool.easy: settings.easy_rest, SolvePool.hard: settings.hard_rest}
        self._next = dict.fromkeys(self._items, 0)
        self._seen: dict[str, dict[int, Seen]] = {name: {} for name in self._items}
        self._draws: dict[int, Draw] = {}

    def __next__(self) -> tuple[int, Item]:
        position = self.position
        source, _ = self._turn(position)
        number = self._next_number(source)
        size = len(self._items[source])
        epoch, index = divmod(number, size)
        self._draws[position] = Draw(source, self._order(source, epoch, 0, size)[index], epoch)
        self._next[source] = number + 1
        self.position += 1
        return position, self.at(position)

    def at(self, position: int) -> Item:
        """The item that was drawn at `position`, until its result is observed."""
        draw = self._draws[position]
        return self._items[draw.source][draw.item]

    def seek(self, position: int) -> None:
        """Move to `position`, as if nothing had been observed before."""
        super().seek(position)
        turns = self._turns(position)
        self._next = {name: turns[name] for name in self._items}

    def observe(self, rewards: Mapping[int, Sequence[float]]) -> dict[str, float]:
        """Take the rewards of the samples by position, perhaps none; returns `pool/...` metrics.

        These positions are then forgotten.
        """
        settings = self.settings
        for position in sorted(rewards):
            draw = self._draws.pop(position)
            if not rewards[position]:
                continue
            solved = fmean(reward >= settings.success_threshold for reward in rewards[position])
            pool = SolvePool.normal
            if solved >= settings.easy_threshold:
                pool = SolvePool.easy
            elif solved <= settings.hard_threshold:
                pool = SolvePool.hard
            due = draw.epoch + 1 + self._rests.get(pool, 0)
            self._seen[draw.source][draw.item] = Seen(pool, due)
        return self._metrics()

    def state_dict(self) -> dict[str, Any]:
        """The state besides `position`, in plain JSON types."""
        return {
            "next": dict(self._next),
            "draws": [[position, *draw] for position, draw in self._draws.items()],
            "seen": {
                name: [[index, seen.pool.value, seen.due] for index, seen in items.items()]
                for name, items in self._seen.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, after `resume`: a source that has grown in a new epoch."""
        self._next = dict(state["next"])
        for name, before in self._grown.items():
            epochs = -(-self._next[name] // before)
            self._next[name] = epochs * len(self._items[name])
        self._draws = {position: Draw(*draw) for position, *draw in state["draws"]}
        self._seen = {
            name: {index: Seen(SolvePool(pool), due) for index, pool, due in items}
            for name, items in state["seen"].items()
        }

    def _next_number(self, source: str) -> int:
        """The next number of a source whose item does not rest."""
        number, size, seen = self._next[source], len(self._items[source]), self._seen[source]
        while True:
            epoch, index = divmod(number, size)
            item = seen.get(self._order(source, epoch, 0, size)[index])
            if item is None or item.due <= epoch:
                return number
            number += 1
            if number % size == 0 and len(seen) == size:  # to the epoch that has one, at once
                number = max(number, size * min(item.due for item in seen.values()))

    def _metrics(self) -> dict[str, float]:
        """Shares of all items; with several sources of those of each, too."""
        metrics, all_counts, num_items = dict[str, float](), Counter[str](), 0
        for source, items in self._items.items():
            seen, size = self._seen[source], len(items)
            epoch = self._next[source] // size
            counts = Counter(item.pool.value for item in seen.values())
            counts["unseen"] = size - len(seen)
            resting = (item.due > epoch and self._rests.get(item.pool) for item in seen.values())
            counts["resting"] = sum(map(bool, resting))
            all_counts.update(counts)
            num_items += size
            if len(self._items) > 1:
                metrics |= _shares(f"source/{source}/pool", counts, size)
        return _shares("pool", all_counts, num_items) | metrics


def prompt_stream(config: Config, data: Data) -> PromptStream:
    """The stream of a run's prompts, by solve rate where `data.curriculum` lets any rest."""
    settings, seed = config.data.curriculum, config.run.seed
    if not settings.rests:
        return PromptStream(data.train, seed, data.weights)
    return CurriculumStream(data.train, seed, data.weights, settings=settings)


def _shares(prefix: str, counts: Mapping[str, int], total: int) -> dict[str, float]:
    names = [*(pool.value for pool in SolvePool), "resting"]
    return {f"{prefix}/{name}": counts.get(name, 0) / total for name in names}
