"""Training and held-out items of a run, and the stream of prompts."""

import hashlib
import itertools
import logging
import random
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hybridrl.config import ConfigError, DataConfig, EvalSetConfig
from hybridrl.config.patterns import compiled
from hybridrl.config.row_fields import kind_of
from hybridrl.data.known_rows import KnownRows
from hybridrl.data.left_out import RowNotes
from hybridrl.data.limits import RowLimits
from hybridrl.data.prompts import Item, Opening, RowUses, make_items
from hybridrl.data.records import SourceRecord, UnusableRowError
from hybridrl.data.sources import GENERATED, records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.data.images import PromptImages

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Data:
    """A run's training and evaluation items; no prompt is in both."""

    train: list[Item]
    eval: list[Item]
    weights: dict[str, float]
    """Share of every source in the mixture; they sum to 1."""
    dropped: dict[str, int]
    """Number of rows left out by why they cannot be used (`data.skip_unusable_rows`)."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its target: supervised training's longest sequence."""
        return max(item.tokens for item in self.train)


def load_data(
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_context: int,
    max_new_tokens: int,
    uses: RowUses = RowUses(),  # noqa: B008 (frozen)
    vocab_size: int | None = None,
    reserved: Collection[str] = (),
    opening: Opening | None = None,
    known: Mapping[str, KnownRows] = MappingProxyType({}),
    images: "PromptImages | None" = None,
) -> Data:
    """Items of all sources, split into training and held-out items.

    `max_context` is the longest sequence of the model and `max_new_tokens` the longest response,
    both in tokens; `vocab_size` is the number of rows of its embedding. `uses` says what the recipe
    does with a row: where prompts generate, each prompt is there once. Items whose identity is
    `reserved`, for separate evaluation sets, are left out. `opening` is that of the environment,
    `images` reads those of rows.
    Of the rows `known` by source those held out stay so, in their order; new ones are trained on.
    Sources contribute held-out items in proportion to their weights, and generated sources the
    `data.size` training items likewise (fewer if a source lacks different prompts, which is
    logged). Raises ConfigError, with the key to change.
    """
    if not config.sources:
        raise ConfigError("data.sources", {}, "at least one source")
    weights = _weights(config)
    limits = RowLimits(
        config, tokenizer.name_or_path, max_context, max_new_tokens, vocab_size, images
    )
    collector = _Collector(
        config, tokenizer, limits, uses, opening, frozenset(reserved), known, images
    )
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
    if collector.dropped:
        log.warning("data.skip_unusable_rows: %s", collector.told)
    _warn_of_unknown_characters(train, tokenizer)
    return Data(train, held_out, weights, dict(collector.dropped))


def load_eval_set(
    name: str,
    settings: EvalSetConfig,
    config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_context: int,
    max_new_tokens: int,
    vocab_size: int | None = None,
    opening: Opening | None = None,
    known: KnownRows | None = None,
    images: "PromptImages | None" = None,
) -> list[Item]:
    """Items of an evaluation set that has its own source, each once as in `load_data`.

    `config` has the templates and limits of all prompts; lengths as in `load_data`. With rows
    `known` it is of these alone. Raises ConfigError, with the key to change.
    """
    key, source = f"eval.sets.{name}", settings.source
    assert source is not None, key
    template = settings.prompt_template or config.prompt_template
    of_set = replace(
        config, sources={key: source}, keep=None, prompt_template=template, answer_template="",
        privileged_template=None,
    )  # fmt: skip
    uses = RowUses(targets=False)
    limits = RowLimits(
        of_set, tokenizer.name_or_path, max_context, max_new_tokens, vocab_size, images
    )
    collector = _Collector(of_set, tokenizer, limits, uses, opening, images=images)
    size = settings.num_prompts or (config.eval_size if source.kind in GENERATED else None)
    try:
        grows = known is not None and source.kind not in GENERATED
        items = collector.load(key, f"{key}.source", None if grows else size)
        if known is not None:
            items = known.arranged(items)[0]
    except ConfigError as error:
        if error.key == "data.prompt_template" and settings.prompt_template:
            raise ConfigError(f"{key}.prompt_template", error.value, error.allowed) from None
        raise
    if not items:
        told = f" ({collector.told})" if collector.dropped else ""
        raise ConfigError(f"{key}.source.name", source.name, f"a source with a prompt{told}")
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
    return str(_task_value(column, item)) if column else ""


def _task_value(column: str, item: Item) -> Any:
    value: Any = item.item
    for name in column.split("."):
        value = value.get(name, "") if isinstance(value, Mapping) else ""
    return value


def _check_task_column(config: DataConfig, name: str, items: Sequence[Item]) -> None:
    """Raise ConfigError where no row of a source has its `task_column`, or one no text in it."""
    column = config.sources[name].task_column
    if not column:
        return
    for item in items:
        if isinstance(value := _task_value(column, item), Mapping | list | tuple):
            allowed = f"a column of texts or numbers ({item.place} has {kind_of(value)})"
            raise ConfigError(f"data.sources.{name}.task_column", column, allowed)
    if items and not any(task_of(config, item) for item in items):
        columns = ", ".join(sorted(map(str, items[0].item)))
        allowed = f"a column of the rows, a field of one after a dot (columns: {columns})"
        raise ConfigError(f"data.sources.{name}.task_column", column, allowed)


class _Collector:
    """Collects the items of all sources that can be used; counts what it leaves out, by why."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: "PreTrainedTokenizerBase",
        limits: RowLimits,
        uses: RowUses,
        opening: Opening | None,
        reserved: frozenset[str] = frozenset(),
        known: Mapping[str, KnownRows] = MappingProxyType({}),
        images: "PromptImages | None" = None,
    ) -> None:
        self.known, self.images = known, images
        self.config, self.tokenizer, self.opening = config, tokenizer, opening
        self.limits, self.uses, self.reserved = limits, uses, reserved
        self.keep = compiled("data.keep", config.keep or ".*", re.DOTALL)
        self.dropped: Counter[str] = Counter()
        self._first_dropped: UnusableRowError | None = None
        self.notes = RowNotes()
        """Notes on the rows of the source that is being loaded."""
        self._seen: set[str] = set()
        self._twice: Counter[str] = Counter()
        self._not_kept: Counter[str] = Counter()

    @property
    def told(self) -> str:
        """What was left out, in a line."""
        counts = ", ".join(f"{number} with {why}" for why, number in self.dropped.items())
        return f"{counts} left out; the first: {self._first_dropped}"

    def collect(self, name: str, num_eval: int, num_train: int | None) -> list[Item]:
        """Items of the source `name`, the held-out ones first; `num_train` None takes all."""
        wanted = None if num_train is None else num_eval + num_train
        items = self.load(name, f"data.sources.{name}", wanted)
        if wanted is None:  # a file may be sorted
            items = sorted(items, key=lambda item: _draw_of(item, self.config.seed))
        if name in self.known:
            held_out, trained, new = self.known[name].arranged(items)
            missing = num_eval - len(held_out)  # rows that are gone: others that were not trained
            if missing > len(new):
                allowed = f"at most {num_eval - missing + len(new)}: the others were trained on"
                raise ConfigError("data.eval_size", self.config.eval_size, allowed)
            items = [*held_out, *new[:missing], *trained, *new[missing:]]
        items = self._separate(name, items, num_eval)
        if len(items) <= num_eval:
            raise ConfigError(
                "data.eval_size",
                self.config.eval_size,
                f"fewer held-out items: source {name} should give {num_eval} of them and has "
                f"{len(items)} different prompts in all, some of which training needs"
                + (f" ({self.told})" if self.dropped else "")
                + (f"; data.keep leaves {out} out" if (out := self._not_kept[name]) else ""),
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

        Where prompts do not generate, several rows may share one. Those that do not are held out
        first.
        """
        if self.uses.generates:
            return items
        if name not in self.known:
            counts = Counter(item.asked for item in items)
            items = sorted(items, key=lambda item: counts[item.asked])
        held_out, rest = items[:num_eval], items[num_eval:]
        prompts = {item.asked for item in held_out}
        train = [item for item in rest if not item.prompt or item.asked not in prompts]
        if len(train) < len(rest):
            log.warning(
                "data.sources.%s: %d rows have the prompt of one that is held out, and are left "
                "out", name, len(rest) - len(train),
            )  # fmt: skip
        return held_out + train

    def load(self, name: str, key: str, wanted: int | None) -> list[Item]:
        """The first `wanted` items of the source `name`, whose place is `key`; None takes all."""
        self.notes = RowNotes()
        items = self._load(name, key, wanted)
        self.notes.say(key)
        return items

    def _load(self, name: str, key: str, wanted: int | None) -> list[Item]:
        source = self.config.sources[name]
        stream = records(key, source, self.config.seed, wanted or 0, self.images)
        if wanted is not None and source.kind in GENERATED:
            return self._draw(name, stream, wanted)
        items = self._accept(self._items(name, stream))[:wanted]
        if self._twice[name]:
            log.warning(
                "%s: %d rows ask what an earlier row asks, and are left out: a prompt that "
                "generates is there once", key, self._twice[name],
            )  # fmt: skip
        return items

    def _items(self, name: str, read: Iterable[SourceRecord | UnusableRowError]) -> list[Item]:
        usable = []
        for record in read:
            if isinstance(record, UnusableRowError):
                self._leave_out(record)
            else:
                usable.append(record)
        return self._items_of(name, usable)

    def _items_of(self, name: str, usable: Sequence[SourceRecord]) -> list[Item]:
        """Items of records; in halves where some of them is of no use, which is then left out."""
        notes = RowNotes()
        try:
            items = make_items(
                name, usable, self.config, self.tokenizer, self.uses, self.opening, notes,
                self.images,
            )  # fmt: skip
        except UnusableRowError as error:
            if len(usable) == 1 or not self.config.skip_unusable_rows:
                self._leave_out(error)
                return []
            middle = len(usable) // 2
            return self._items_of(name, usable[:middle]) + self._items_of(name, usable[middle:])
        self.notes.join(notes)
        return items

    def _leave_out(self, error: UnusableRowError) -> None:
        """Count a row that cannot be used; raises its error where none may be left out."""
        if not self.config.skip_unusable_rows:
            raise error
        self.dropped[error.reason] += 1
        self._first_dropped = self._first_dropped or error

    def _draw(
        self, name: str, stream: Iterator[SourceRecord | UnusableRowError], wanted: int
    ) -> list[Item]:
        """Up to `wanted` items; stops when a round of drawing yields almost nothing new."""
        items: list[Item] = []
        while len(items) < wanted:
            chunk = list(itertools.islice(stream, max(wanted - len(items), 64)))
            dropped = self.dropped.total()
            new = self._accept(self._items(name, chunk))
            items += new
            if len(new) + (self.dropped.total() - dropped) < max(1, len(chunk) // 50) or (
                self.dropped.total() > 10 * wanted
            ):
                break
        return items[:wanted]

    def _accept(self, items: list[Item]) -> list[Item]:
        """The items that can be used; where prompts generate, those with a new prompt.

        In games, which share their prompts, a row is new.
        """
        accepted = []
        for item in items:
            if item.identity in self.reserved:
                continue
            if not self.keep.fullmatch(item.prompt):
                self._not_kept[item.source] += 1
                continue
            if self.uses.generates and item.identity in self._seen:
                self._twice[item.source] += 1
                continue
            self._seen.add(item.identity)
            try:
                self.limits.check(item)
            except UnusableRowError as error:
                self._leave_out(error)
            else:
                accepted.append(item)
        return accepted


def _draw_of(item: Item, seed: int) -> bytes:
    """What orders the rows of a file: a hash, so that further rows leave the order as it is."""
    text = f"{seed}\0{item.source}\0{item.asked}\0{item.answer}\0{item.columns}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


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

    State: `position`, the number of items drawn so far, and `sizes`. Invariant: the item at a
    position depends on the items, the weights and the seed alone, so `seek` resumes exactly. A
    source that has grown since an earlier run keeps what it drew: see `resume`.

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
        self._orders: dict[str, tuple[tuple[int, int], list[int]]] = {}
        self.sizes = {name: [(0, len(of_source))] for name, of_source in self._items.items()}
        """By source: from which of its draws on it has how many items."""
        self._grown: dict[str, int] = {}  # how many items a source had before

    def __iter__(self) -> Iterator[tuple[int, Item]]:
        return self

    def __next__(self) -> tuple[int, Item]:
        position = self.position
        self.position += 1
        return position, self.at(position)

    def at(self, position: int) -> Item:
        """The item at `position`; the stream keeps its own position."""
        source, number = self._turn(position)
        first, size = next(pair for pair in reversed(self.sizes[source]) if pair[0] <= number)
        epoch, index = divmod(number - first, size)
        return self._items[source][self._order(source, epoch, first, size)[index]]

    def resume(self, position: int, sizes: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Move to the `position` of a run in which sources had `sizes`.

        Its items are the first ones of each source. One that has grown begins an epoch of all.
        """
        self.seek(position)
        turns = self._turns(position)
        for name, items in self._items.items():
            if parts := [(first, size) for first, size in sizes.get(name, ())]:
                self.sizes[name] = parts
                if parts[-1][1] != len(items):
                    self._grown[name] = parts[-1][1]
                    self.sizes[name] = [*parts, (turns[name], len(items))]

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

    def _turns(self, position: int) -> Counter[str]:
        """How many items of each source come before a position."""
        return Counter(self._turn(earlier)[0] for earlier in range(position))

    def _order(self, source: str, epoch: int, first: int, size: int) -> list[int]:
        """The order of a source's first `size` items in an `epoch` since its draw `first`."""
        cached = self._orders.get(source)
        if cached is None or cached[0] != (first, epoch):
            order = list(range(size))
            since = f"{first}/" if first else ""
            random.Random(f"{self.seed}/{source}/{since}{epoch}").shuffle(order)
            cached = self._orders[source] = ((first, epoch), order)
        return cached[1]
