"""Converts rows to prompts and targets: templates, chat, tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from hybridrl.config import ConfigError, DataConfig
from hybridrl.data.chat import (
    ChatTemplate,
    Place,
    content_text,
    has_assistant,
    read_messages,
    read_prompt,
    read_tools,
)
from hybridrl.environments.task import ChatMessage, EpisodeTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One question, ready for the model."""

    prompt: str
    """The text that the model reads, chat template included."""
    prompt_ids: tuple[int, ...]
    """Its tokens."""
    answer: str
    """The expected answer of the source; empty if it has none."""
    target_ids: tuple[int, ...]
    """Tokens of the filled answer template and the token that ends a response (supervised)."""
    source: str
    """Name of its source in `data.sources`."""
    item: dict[str, Any] = field(repr=False)
    """The source's row, for the verifier."""
    columns: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    """Tokens of other responses of the row, by column (`Flow.targets`), with the end token."""
    privileged_ids: tuple[int, ...] = field(default=(), repr=False)
    """Tokens of the prompt of `data.privileged_template`; empty without one."""
    masks: dict[str, tuple[bool, ...]] = field(default_factory=dict, repr=False)
    """Of responses in several turns, which tokens the assistant wrote, by column; `target_ids` are
    under the empty name. A response without a mask is all the assistant's."""

    task: EpisodeTask | None = field(default=None, repr=False)
    """What its episodes start from, where an environment answers the model."""

    @property
    def identity(self) -> str:
        """What tells it from other items: its prompt, or its row where games share theirs."""
        return self.prompt if self.task is None else self.task.digest

    def response(self, column: str | None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Tokens of a column, None for the target, and which of them are to be trained."""
        ids = self.target_ids if column is None else self.columns[column]
        return ids, self.masks.get(column or "", (True,) * len(ids))


class Opening(Protocol):
    """An environment as prompts need it: `hybridrl.environments.Openings`."""

    tools: tuple[dict[str, Any], ...]
    """Schemas of the tools that prompts tell of, once it was asked for first messages."""

    def __call__(self, tasks: Sequence[EpisodeTask]) -> Sequence[Sequence[ChatMessage]]:
        """The first messages of each task, which are its prompt."""
        ...


def with_next_targets(items: Sequence[Item]) -> list[Item]:
    """Each item with the responses of the next one, the last with those of the first.

    They are cut where a prompt with another's response would be longer than all of `items` with
    their own.
    """
    longest = max((len(item.prompt_ids) + _longest_response(item) for item in items), default=0)
    joined = []
    for item, other in zip(items, [*items[1:], *items[:1]], strict=True):
        room = longest - len(item.prompt_ids)
        columns = {name: ids[:room] for name, ids in other.columns.items()}
        masks = {name: mask[:room] for name, mask in other.masks.items()}
        target = other.target_ids[:room]
        joined.append(replace(item, target_ids=target, columns=columns, masks=masks))
    return joined


def _longest_response(item: Item) -> int:
    return max(map(len, (item.target_ids, *item.columns.values())))


def end_token_id(tokenizer: "PreTrainedTokenizerBase", chat: bool) -> int:
    """The token that ends a response: the chat template's end of turn, else end of text.

    In some chat models the end of text is not the token that ends a turn (SmolLM2-Instruct:
    `<|im_start|>` against `<|im_end|>`), so the template has priority.
    """
    eos = tokenizer.eos_token_id
    if chat:
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
        text = ChatTemplate(tokenizer).text(messages, Place("data.chat", "true", 0))
        after = tokenizer(text[text.rindex("A") + 1 :].strip(), add_special_tokens=False)
        if after["input_ids"] and after["input_ids"][0] in tokenizer.all_special_ids:
            return int(after["input_ids"][0])
    if eos is None:
        raise ConfigError("model.path", tokenizer.name_or_path, "a tokenizer with an eos token")
    return int(eos)


def make_items(
    source: str,
    rows: Sequence[Mapping[str, Any]],
    config: DataConfig,
    tokenizer: Any,
    columns: Sequence[str] = (),
    opening: Opening | None = None,
) -> list[Item]:
    """Items of `rows`, in order: templates filled, one tokenizer call for all prompts.

    `columns` hold a response each: a text, or a list of messages. With an `opening` a row's prompt
    is what its environment says first. Raises ConfigError if a row lacks a column or a field of a
    template, if its messages cannot be read, or without a chat template.
    """
    if not rows:
        return []
    reader = _ChatReader(source, config, tokenizer) if config.chat else None
    if config.sources[source].messages_column is not None:
        if reader is None:
            raise ConfigError("data.chat", False, f"true, since {source} has conversations")
        if opening:
            place = _place(source, config, "messages_column", 1)
            raise ConfigError(place.key, place.column, "null, with an environment")
        return [reader.conversation(row, number) for number, row in enumerate(rows, 1)]
    end = end_token_id(tokenizer, config.chat)

    def filled(key: str, template: str) -> list[list[ChatMessage]]:
        return [_prompt(source, x, config, n, key, template) for n, x in enumerate(rows, 1)]

    def rendered(prompts: Sequence[list[ChatMessage]]) -> tuple[list[str], list[Ids]]:
        """Texts and tokens of prompts."""
        texts = [prompt[-1]["content"] for prompt in prompts]
        if opening:
            texts = ["".join(message["content"] for message in prompt) for prompt in prompts]
        if reader:
            pairs = enumerate(zip(rows, prompts, strict=True), 1)
            texts = [reader.prompt(row, prompt, number) for number, (row, prompt) in pairs]
        # A chat template writes its own special tokens.
        encoded = tokenizer(texts, add_special_tokens=not config.chat, verbose=False)["input_ids"]
        if not config.chat:  # tokenizers that close every text would end the response here
            eos = tokenizer.eos_token_id
            encoded = [ids[:-1] if ids and ids[-1] == eos else ids for ids in encoded]
        return texts, [tuple(ids) for ids in encoded]

    def ended(responses: list[str]) -> list[tuple[int, ...]]:
        ids = tokenizer(responses, add_special_tokens=False, verbose=False)["input_ids"]
        return [(*response, end) for response in ids]

    prompts = filled("data.prompt_template", config.prompt_template)
    tasks: list[EpisodeTask | None] = [None] * len(rows)
    if opening:
        pairs = zip(rows, prompts, strict=True)
        episodes = [EpisodeTask(tuple(x), dict(row), _answer(row), source) for row, x in pairs]
        firsts = opening(episodes)
        prompts = [list(first) for first in firsts]
        tasks = [replace(x, opening=tuple(y)) for x, y in zip(episodes, firsts, strict=True)]
        if reader:
            reader.tools = list(opening.tools)
    texts, encoded = rendered(prompts)
    privileged: list[Ids] = [()] * len(rows)
    if config.privileged_template is not None:
        _, privileged = rendered(filled("data.privileged_template", config.privileged_template))
    targets = [_fill("data.answer_template", config.answer_template, row) for row in rows]
    target_ids = ended(targets)
    others = {
        name: ended([_response(source, row, name, config) for row in rows]) for name in columns
    }
    # items
    items = []
    for number, (row, text, ids) in enumerate(zip(rows, texts, encoded, strict=True)):
        target, with_more = target_ids[number], privileged[number]
        of_columns = {name: responses[number] for name, responses in others.items()}
        values = (_answer(row), target, source, dict(row), of_columns, with_more)
        item = Item(text, ids, *values, task=tasks[number])
        items.append(
            reader.with_turns(item, prompts[number], columns, number + 1) if reader else item
        )
    return items


class _ChatReader:
    """Rows of a source through the chat template: prompts, conversations, responses in turns."""

    def __init__(self, source: str, config: DataConfig, tokenizer: Any) -> None:
        self.source, self.config = source, config
        self.tools: list[dict[str, Any]] = []
        """Those of the environment, for every row."""
        self.template = ChatTemplate(tokenizer)
        self.end = end_token_id(tokenizer, True)

    def prompt(self, row: Mapping[str, Any], messages: list[ChatMessage], number: int) -> str:
        """The text of a row's prompt, up to where the assistant begins to write."""
        place = _place(self.source, self.config, "prompt_column", number)
        return self.template.text(messages, place, self._tools(row, number), prompt=True)

    def conversation(self, row: Mapping[str, Any], number: int) -> Item:
        """A whole conversation: its target is all from the assistant's first turn on."""
        place = _place(self.source, self.config, "messages_column", number)
        messages = _with_system(self.config, read_messages(row["question"], place))
        if not has_assistant(messages):
            raise place.refuse("conversations with a turn of the assistant's")
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        if not first:
            raise place.refuse("conversations that the assistant does not begin")
        tools = self._tools(row, number)
        whole = self.template.conversation(messages, place, tools, self.end).cut()
        start = whole.start
        mask = whole.written[start:]
        answer = str(messages[first]["content"])
        privileged: Ids = ()
        if self.config.privileged_template is not None:
            asked = _filled(
                messages[:first], {**row, "answer": answer}, "data.privileged_template",
                self.config.privileged_template,
            )  # fmt: skip
            text = self.template.text(asked, place, tools, prompt=True)
            privileged = tuple(self.template.ids(text))
        return Item(
            self.template.text(messages[:first], place, tools, prompt=True),
            whole.ids[:start],
            answer,
            whole.ids[start:],
            self.source,
            dict(row),
            privileged_ids=privileged,
            masks={} if all(mask) else {"": mask},
        )

    def with_turns(
        self, item: Item, prompt: list[ChatMessage], columns: Sequence[str], number: int
    ) -> Item:
        """The item with those responses replaced that are several messages."""
        for name in columns:
            value = item.item[name]
            if isinstance(value, str):
                continue
            place = _place(self.source, self.config, name, number)
            turns = _after_prompt(read_messages(value, place), item.item["question"], place)
            if not turns or any(turns[i]["role"] != "assistant" for i in (0, -1)):
                raise place.refuse(
                    "messages that begin and end with the assistant's, after the row's prompt or"
                    " without it"
                )
            if len(turns) == 1 and not turns[0].get("tool_calls"):
                continue
            tools = self._tools(item.item, number)
            messages = [*prompt, *turns]
            whole = self.template.conversation(messages, place, tools, self.end, len(prompt)).cut()
            start = whole.start
            if whole.ids[:start] != item.prompt_ids:
                raise place.refuse("turns that the chat template renders after the prompt")
            ids, mask = whole.ids[start:], whole.written[start:]
            masks = item.masks if all(mask) else {**item.masks, name: mask}
            item = replace(item, columns={**item.columns, name: ids}, masks=masks)
        return item

    def _tools(self, row: Mapping[str, Any], number: int) -> list[dict[str, Any]] | None:
        column = self.config.sources[self.source].tools_column
        if self.tools or column is None:
            return self.tools or None
        return read_tools(row[column], _place(self.source, self.config, "tools_column", number))


def _place(source: str, config: DataConfig, setting: str, number: int) -> Place:
    """A setting of a source that names a column, or a column that the recipe reads."""
    key = f"{source}.source" if source.startswith("eval.sets.") else f"data.sources.{source}"
    if setting.endswith("_column"):
        column = str(getattr(config.sources[source], setting))
        return Place(f"{key}.{setting}", column, number)
    return Place(key, setting, number)


def _after_prompt(turns: list[ChatMessage], question: Any, place: Place) -> list[ChatMessage]:
    """A response's own messages: in some datasets they begin with the prompt's.

    Those may have a system message before them, which the `question` lacks.
    """
    asked: list[ChatMessage] = [{"role": "user", "content": question}]
    if not isinstance(question, str):
        asked = read_messages(question, place)
    before = turns[0]["role"] in ("system", "developer") and asked[0]["role"] == "user"
    end = before + len(asked)
    return turns[end:] if _spoken(turns[before:end]) == _spoken(asked) else turns


def _spoken(messages: Sequence[ChatMessage]) -> list[tuple[Any, ...]]:
    return [(m["role"], m["content"], m.get("tool_calls")) for m in messages]


def _prompt(
    source: str, row: Mapping[str, Any], config: DataConfig, number: int, key: str, template: str
) -> list[ChatMessage]:
    """The messages of one row, the last one's content filled into the `template` at `key`."""
    question = row["question"]
    messages: list[ChatMessage] = [{"role": "user", "content": question}]
    if not isinstance(question, str):
        if not config.chat:
            raise ConfigError("data.chat", False, f"true, since {source} has lists of messages")
        messages = read_prompt(question, _place(source, config, "prompt_column", number))
    return _with_system(config, _filled(messages, row, key, template))


def _filled(
    messages: list[ChatMessage], row: Mapping[str, Any], key: str, template: str
) -> list[ChatMessage]:
    """Messages with the content of the last one, where it is the user's, filled into a template."""
    *before, last = messages
    if last["role"] != "user":
        return messages
    content = _fill(key, template, {**row, "question": last["content"]})
    return [*before, {**last, "content": content}]


def _with_system(config: DataConfig, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Messages that begin with `data.system_prompt`, unless they have one."""
    if config.system_prompt is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _response(source: str, row: Mapping[str, Any], column: str, config: DataConfig) -> str:
    """The text of a column that holds a response, or the last of its messages."""
    response = row.get(column)
    if isinstance(response, Sequence) and response and isinstance(response[-1], Mapping):
        if not config.chat and [m.get("role") for m in response].count("assistant") > 1:
            allowed = f"true, since {source} has responses of several turns ({column})"
            raise ConfigError("data.chat", False, allowed)
        response = content_text(response[-1].get("content") or "")
    if not isinstance(response, str):
        allowed = f"rows whose {column!r} is a response, a text or messages, as the recipe wants"
        raise ConfigError(f"data.sources.{source}", sorted(row), allowed)
    return response


def _fill(key: str, template: str, row: Mapping[str, Any]) -> str:
    """`template` with the row's fields; metadata's fields may be named without `metadata`."""
    metadata = row.get("metadata")
    fields = {**metadata, **row} if isinstance(metadata, Mapping) else row
    fields = {**fields, "answer": _answer(row)}
    try:
        return template.format_map(fields)
    except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(
            key,
            template,
            f"fields among {', '.join(sorted(map(str, fields)))}; {{{{ and }}}} for braces "
            f"({type(error).__name__}: {error})",
        ) from error


def _answer(row: Mapping[str, Any]) -> str:
    return "" if row["answer"] is None else str(row["answer"])
