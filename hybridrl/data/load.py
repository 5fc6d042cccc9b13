"""Training and held-out items of a run, and the stream of prompts."""

import itertools
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridrl.config import ConfigError, DataConfig
from hybridrl.data.prompts import Item, make_items
from hybridrl.data.sources import GENERATED, rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Data:
    """A run's training and evaluation items; no prompt is in both."""

    train: list[Item]
    eval: list[Item]
    weights: dict[str, float]
    """Share of every source in the mixture; they sum to 1."""
    skipped: int
    """Number of prompts dropped as too long (`data.skip_long_prompts`)."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its target: supervised training's longest sequence."""
        return max(
            len(item.prompt_ids) + max(map(len, (item.target_ids, *item.columns.values())))
            for item in self.train
        )


def load_data(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_context: int,
    max_new_tokens: int,
    columns: Sequence[str] = (),
) -> Data:
    """Items of all sources, each prompt once, split into training and held-out items.

    `max_context` is the longest sequence of the model and `max_new_tokens` the longest response,
    both in tokens. `columns` hold responses besides the answer (`Flow.targets`). Sources contribute
    held-out items in proportion to their weights, and generated sources the `data.size` training
    items likewise (fewer if a source lacks different prompts, which is logged). Raises ConfigError,
    with the key to change.
    """
    if not config.sources:
        raise ConfigError("data.sources", {}, "at least one source")
    weights = _weights(config)
    longest = min(config.max_prompt_tokens, max_context - max_new_tokens)
    if longest < 1:
        raise ConfigError(
            "rollout.max_new_tokens", max_new_tokens, f"less than the context, {max_context} tokens"
        )
    collector = _Collector(config, tokenizer, longest, max_context, columns)
    # sizes of the held-out and the training part of each source
    generated = {
        name: weights[name] for name, source in config.sources.items() if source.kind in GENERATED
    }
    sizes = _shares(config.size, generated)
    eval_sizes = _shares(config.eval_size, weights)
    # items
    train: list[Item] = []
    held_out: list[Item] = []
    for name in config.sources:
        items = collector.collect(name, eval_sizes[name], sizes.get(name))
        held_out += items[: eval_sizes[name]]
        train += items[eval_sizes[name] :]
    _warn_of_unknown_characters(train, tokenizer)
    return Data(train, held_out, weights, collector.skipped)


class _Collector:
    """Collects items with distinct prompts over all sources; counts the long ones it drops."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        longest: int,
        max_context: int,
        columns: Sequence[str],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.longest = longest
        self.max_context = max_context
        self.columns = columns
        self.keep = _pattern(config.keep)
        self.seen: set[str] = set()
        self.skipped = 0

    def collect(self, name: str, num_eval: int, num_train: int | None) -> list[Item]:
        """Items of the source `name`, the held-out ones first; `num_train` None takes all."""
        source = self.config.sources[name]
        wanted = None if num_train is None else num_eval + num_train
        stream = rows(f"data.sources.{name}", source, self.config.seed, wanted or 0)
        items = self._all(name, stream) if wanted is None else self._draw(name, stream, wanted)
        if wanted is None:  # a file may be sorted
            random.Random(f"{self.config.seed}/{name}").shuffle(items)
        if len(items) <= num_eval:
            raise ConfigError(
                "data.eval_size",
                self.config.eval_size,
                f"fewer held-out items: source {name} should give {num_eval} of them and has "
                f"{len(items)} different prompts in all, some of which training needs",
            )
        if wanted is not None and len(items) < wanted:
            log.warning(
                "data.sources.%s has %d different prompts: %d held out, %d to train on instead of "
                "the %d of data.size",
                name, len(items), num_eval, len(items) - num_eval, num_train,
            )  # fmt: skip
        return items

    def _all(self, name: str, stream: Iterator[dict]) -> list[Item]:
        return self._accept(self._items(name, list(stream)))

    def _items(self, name: str, rows: list[dict]) -> list[Item]:
        return make_items(name, rows, self.config, self.tokenizer, self.columns)

    def _draw(self, name: str, stream: Iterator[dict], wanted: int) -> list[Item]:
        """Up to `wanted` items; stops when a round of drawing yields almost nothing new."""
        items: list[Item] = []
        while len(items) < wanted:
            chunk = list(itertools.islice(stream, max(wanted - len(items), 64)))
            skipped = self.skipped
            new = self._accept(self._items(name, chunk))
            items += new
            if len(new) + (self.skipped - skipped) < max(1, len(chunk) // 50) or (
                self.skipped > 10 * wanted
            ):
                break
        return items[:wanted]

    def _accept(self, items: list[Item]) -> list[Item]:
        accepted = []
        for item in items:
            if item.prompt in self.seen or not self.keep.fullmatch(item.prompt):
                continue
            self.seen.add(item.prompt)
            if len(item.prompt_ids) > self.longest:
                if not self.config.skip_long_prompts:
                    raise self._too_long(item)
                self.skipped += 1
                continue
            accepted.append(item)
        return accepted

    def _too_long(self, item: Item) -> ConfigError:
        tokens = len(item.prompt_ids)
        limit = f"(or data.skip_long_prompts=true): {item.source} has {item.prompt[:80]!r}"
        if tokens > self.config.max_prompt_tokens:
            return ConfigError(
                "data.max_prompt_tokens", self.config.max_prompt_tokens, f"{tokens} or more {limit}"
            )
        return ConfigError(
            "rollout.max_new_tokens",
            self.max_context - self.longest,
            f"at most {self.max_context - tokens}, the model's context of {self.max_context} less "
            f"a prompt of {tokens} tokens {limit}",
        )


def _pattern(keep: str | None) -> re.Pattern[str]:
    try:
        return re.compile(keep or ".*", re.DOTALL)
    except re.error as error:
        raise ConfigError("data.keep", keep, f"a regular expression ({error})") from None


def _warn_of_unknown_characters(
    items: Sequence[Item], tokenizer: "PreTrainedTokenizerBase"
) -> None:
    unk = tokenizer.unk_token_id
    if unk is None or unk == tokenizer.eos_token_id:
        return
    unknown = [item for item in items if unk in item.prompt_ids or unk in item.target_ids]
    if unknown:
        log.warning(
            "%d of %d training items hold characters that the tokenizer does not know, such as %r "
            "(tiny model: model.tiny.alphabet)",
            len(unknown), len(items), unknown[0].prompt[:80],
        )  # fmt: skip


def _weights(config: DataConfig) -> dict[str, float]:
    total = sum(source.weight for source in config.sources.values())
    return {name: source.weight / total for name, source in config.sources.items()}


def _shares(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """`total` split by `weights` into whole numbers, the largest remainders rounded up."""
    scale = total / sum(weights.values()) if weights else 0.0
    exact = {name: weight * scale for name, weight in weights.items()}
    shares = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


class PromptStream:
    """Endless, deterministic stream of `(position, item)` over training items.

    State: `position`, the number of items drawn so far. Invariant: the item at a position depends
    on the items, the weights and the seed alone, so `seek` resumes exactly.

    Sources alternate by smooth weighted round robin: with weights 2 and 1 the order is a b a, a b
    a, and so on. Over n positions a source gets its share of n to within one item per source. Each
    source is reshuffled in every epoch over it. With items x, y and seed 0 the order is, say, y x,
    then x y, and so on.
    """

    def __init__(
        self, items: Sequence[Item], seed: int, weights: Mapping[str, float] | None = None
    ) -> None:
        self.seed = seed
        self.position = 0
        self._items: dict[str, list[Item]] = {}
        for item in items:
            self._items.setdefault(item.source, []).append(item)
        if not self._items:
            raise ValueError("a prompt stream needs at least one item")
        shares = weights or {
            name: float(len(items_of_source)) for name, items_of_source in self._items.items()
        }
        self._weights = {name: shares[name] for name in self._items}
        self._reset()

    def __iter__(self) -> Iterator[tuple[int, Item]]:
        return self

    def __next__(self) -> tuple[int, Item]:
        position = self.position
        source, number = self._turn()
        epoch, index = divmod(number, len(self._items[source]))
        return position, self._items[source][self._order(source, epoch)[index]]

    def at(self, position: int) -> Item:
        """The item at `position`; the stream keeps its own position."""
        before = self.position
        self.seek(position)
        _, item = next(self)
        self.seek(before)
        return item

    def seek(self, position: int) -> None:
        """Move to `position`: the next item is the one that a new stream has there."""
        if position < 0:
            raise ValueError(f"position {position}: wanted 0 or more")
        if position < self.position:
            self._reset()
        if len(self._items) == 1:
            (source,) = self._items
            self.position = self._num_drawn[source] = position
        while self.position < position:
            self._turn()

    def _reset(self) -> None:
        self.position = 0
        self._credit = dict.fromkeys(self._items, 0.0)
        self._num_drawn = dict.fromkeys(self._items, 0)
        self._orders: dict[str, tuple[int, list[int]]] = {}

    def _turn(self) -> tuple[str, int]:
        """The next source, and how many of its items were drawn before."""
        self.position += 1
        for name, weight in self._weights.items():
            self._credit[name] += weight
        source = max(self._credit, key=self._credit.__getitem__)
        self._credit[source] -= sum(self._weights.values())
        number = self._num_drawn[source]
        self._num_drawn[source] += 1
        return source, number

    def _order(self, source: str, epoch: int) -> list[int]:
        cached = self._orders.get(source)
        if cached is None or cached[0] != epoch:
            order = list(range(len(self._items[source])))
            random.Random(f"{self.seed}/{source}/{epoch}").shuffle(order)
            cached = self._orders[source] = (epoch, order)
        return cached[1]
