"""Training and held-out items of a run, and the stream of prompts."""

import itertools
import logging
import random
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hybridrl.config import ConfigError, DataConfig, EvalSetConfig
from hybridrl.config.patterns import compiled
from hybridrl.data.prompts import Ids, Item, Opening, make_items
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
    reserved: Collection[str] = (),
    opening: Opening | None = None,
) -> Data:
    """Items of all sources, each prompt once (of conversations each whole one), split into training
    and held-out items.

    `max_context` is the longest sequence of the model and `max_new_tokens` the longest response,
    both in tokens. `columns` hold responses besides the answer (`Flow.targets`). Items whose
    identity is `reserved`, for separate evaluation sets, are left out. `opening` is that of the
    environment. Sources contribute held-out items in proportion to their weights, and generated
    sources the `data.size` training items likewise (fewer if a source lacks different prompts,
    which is logged). Raises ConfigError, with the key to change.
    """
    if not config.sources:
        raise ConfigError("data.sources", {}, "at least one source")
    weights = _weights(config)
    collector = _Collector(config, tokenizer, max_new_tokens, max_context, columns, opening)
    collector.seen.update(reserved)
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
        _check_task_column(config, name, items)
        held_out += items[: eval_sizes[name]]
        train += items[eval_sizes[name] :]
    _warn_of_unknown_characters(train, tokenizer)
    return Data(train, held_out, weights, collector.skipped)


def load_eval_set(
    name: str,
    settings: EvalSetConfig,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_context: int,
    max_new_tokens: int,
    opening: Opening | None = None,
) -> list[Item]:
    """Items of an evaluation set that has its own source, each once as in `load_data`.

    `config` has the templates and limits of all prompts; lengths as in `load_data`. Raises
    ConfigError, with the key to change.
    """
    key, source = f"eval.sets.{name}", settings.source
    assert source is not None, key
    template = settings.prompt_template or config.prompt_template
    of_set = replace(
        config, sources={key: source}, keep=None, prompt_template=template, answer_template="",
        privileged_template=None,
    )  # fmt: skip
    collector = _Collector(of_set, tokenizer, max_new_tokens, max_context, (), opening)
    size = settings.num_prompts or (config.eval_size if source.kind in GENERATED else None)
    try:
        items = collector.load(key, f"{key}.source", size)
    except ConfigError as error:
        if error.key == "data.prompt_template" and settings.prompt_template:
            raise ConfigError(f"{key}.prompt_template", error.value, error.allowed) from None
        raise
    if not items:
        raise ConfigError(f"{key}.source.name", source.name, "a source with a prompt")
    return items


def mixture_parts(config: DataConfig, item: Item) -> list[str]:
    """The parts of a mixture that an item belongs to, which have separate metrics.

    `source/NAME` where there are several sources, `task/TASK` where its source has a `task_column`.
    """
    parts = [f"source/{item.source}"] if len(config.sources) > 1 else []
    if config.sources[item.source].task_column:
        parts.append(f"task/{task_of(config, item)}")
    return parts


def task_of(config: DataConfig, item: Item) -> str:
    """The task of an item; empty where its source has no `task_column`."""
    column = config.sources[item.source].task_column
    if not column:
        return ""
    task: Any = item.item
    for name in column.split("."):
        task = task.get(name, "") if isinstance(task, Mapping) else ""
    return str(task)


def _check_task_column(config: DataConfig, name: str, items: Sequence[Item]) -> None:
    """Raise ConfigError where no row of a source has its `task_column`."""
    column = config.sources[name].task_column
    if column and items and not any(task_of(config, item) for item in items):
        columns = ", ".join(sorted(map(str, items[0].item)))
        allowed = f"a column of the rows, a field of one after a dot (columns: {columns})"
        raise ConfigError(f"data.sources.{name}.task_column", column, allowed)


class _Collector:
    """Collects items with distinct prompts over all sources; counts the long ones it drops."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        max_new_tokens: int,
        max_context: int,
        columns: Sequence[str],
        opening: Opening | None,
    ) -> None:
        self.config, self.opening = config, opening
        self.tokenizer = tokenizer
        self.longest = min(config.max_prompt_tokens, max_context - max_new_tokens)
        if self.longest < 1:
            allowed = f"less than the context, {max_context} tokens"
            raise ConfigError("rollout.max_new_tokens", max_new_tokens, allowed)
        self.max_context = max_context
        self.columns = columns
        self.keep = compiled("data.keep", config.keep or ".*", re.DOTALL)
        self.seen: set[str] = set()
        self.skipped = 0
        self._conversations: set[tuple[str, Ids]] = set()

    def collect(self, name: str, num_eval: int, num_train: int | None) -> list[Item]:
        """Items of the source `name`, the held-out ones first; `num_train` None takes all."""
        wanted = None if num_train is None else num_eval + num_train
        items = self.load(name, f"data.sources.{name}", wanted)
        if wanted is None:  # a file may be sorted
            random.Random(f"{self.config.seed}/{name}").shuffle(items)
        items = self._separate(name, items, num_eval)
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

    def _separate(self, name: str, items: list[Item], num_eval: int) -> list[Item]:
        """The items in an order in which no prompt of the first `num_eval` comes again.

        Conversations may share their first turns. Those that do not are held out first.
        """
        if self.config.sources[name].messages_column is None:
            return items
        counts = Counter(item.prompt for item in items)
        items = sorted(items, key=lambda item: counts[item.prompt])
        held_out, rest = items[:num_eval], items[num_eval:]
        prompts = {item.prompt for item in held_out}
        train = [item for item in rest if item.prompt not in prompts]
        if len(train) < len(rest):
            log.warning(
                "data.sources.%s: %d conversations begin as one that is held out, and are left out",
                name, len(rest) - len(train),
            )  # fmt: skip
        return held_out + train

    def load(self, name: str, key: str, wanted: int | None) -> list[Item]:
        """The first `wanted` items of the source `name`, whose place is `key`; None takes all."""
        source = self.config.sources[name]
        stream = rows(key, source, self.config.seed, wanted or 0)
        if wanted is None or source.kind not in GENERATED:
            return self._accept(self._items(name, list(stream)))[:wanted]
        return self._draw(name, stream, wanted)

    def _items(self, name: str, rows: list[dict]) -> list[Item]:
        return make_items(name, rows, self.config, self.tokenizer, self.columns, self.opening)

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
        """Those that are new and short enough.

        A prompt is new that no item before has; in games, which share theirs, a row. Conversations
        may share their first turns: new prompts are those that no other source has, with a target
        that is new for the prompt.
        """
        accepted = []
        of_others = frozenset(self.seen)
        for item in items:
            is_conversation = self.config.sources[item.source].messages_column is not None
            conversation = (item.prompt, item.target_ids)
            seen = item.identity in (of_others if is_conversation else self.seen)
            if seen or conversation in self._conversations:
                continue
            if not self.keep.fullmatch(item.prompt):
                continue
            self.seen.add(item.identity)
            if is_conversation:
                self._conversations.add(conversation)
            if max(len(item.prompt_ids), len(item.privileged_ids)) > self.longest:
                if not self.config.skip_long_prompts:
                    raise self._too_long(item)
                self.skipped += 1
                continue
            if is_conversation and not self._fits(item):
                continue
            accepted.append(item)
        return accepted

    def _fits(self, item: Item) -> bool:
        """Whether a whole conversation fits the context; counts or refuses one that does not."""
        tokens = len(item.prompt_ids) + len(item.target_ids)
        if tokens <= self.max_context:
            return True
        if not self.config.skip_long_prompts:
            allowed = (
                f"true: {item.source} has a conversation of {tokens} tokens, of which the model's "
                f"context holds {self.max_context}: {item.prompt[:80]!r}"
            )
            raise ConfigError("data.skip_long_prompts", False, allowed)
        self.skipped += 1
        return False

    def _too_long(self, item: Item) -> ConfigError:
        tokens = max(len(item.prompt_ids), len(item.privileged_ids))
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
        self._names = list(self._items)
        self._credit = dict.fromkeys(self._items, 0.0)
        self._num_drawn = dict.fromkeys(self._items, 0)
        # the source of every position so far, and how many of its items came before
        self._sources, self._numbers = array("H"), array("Q")
        self._orders: dict[str, tuple[int, list[int]]] = {}

    def __iter__(self) -> Iterator[tuple[int, Item]]:
        return self

    def __next__(self) -> tuple[int, Item]:
        position = self.position
        self.position += 1
        return position, self.at(position)

    def at(self, position: int) -> Item:
        """The item at `position`; the stream keeps its own position."""
        source, number = self._turn(position)
        epoch, index = divmod(number, len(self._items[source]))
        return self._items[source][self._order(source, epoch)[index]]

    def seek(self, position: int) -> None:
        """Move to `position`: the next item is the one that a new stream has there."""
        if position < 0:
            raise ValueError(f"position {position}: wanted 0 or more")
        self.position = position

    def observe(self, rewards: Mapping[int, Sequence[float]]) -> dict[str, float]:
        """Take the rewards of the samples by position; a plain stream has no use for them."""
        return {}

    def _turn(self, position: int) -> tuple[str, int]:
        """The source at `position`, and how many of its items come before."""
        if len(self._names) == 1:
            return self._names[0], position
        while len(self._sources) <= position:
            for name, weight in self._weights.items():
                self._credit[name] += weight
            source = max(self._credit, key=self._credit.__getitem__)
            self._credit[source] -= sum(self._weights.values())
            self._sources.append(self._names.index(source))
            self._numbers.append(self._num_drawn[source])
            self._num_drawn[source] += 1
        return self._names[self._sources[position]], self._numbers[position]

    def _order(self, source: str, epoch: int) -> list[int]:
        cached = self._orders.get(source)
        if cached is None or cached[0] != epoch:
            order = list(range(len(self._items[source])))
            random.Random(f"{self.seed}/{source}/{epoch}").shuffle(order)
            cached = self._orders[source] = (epoch, order)
        return cached[1]
