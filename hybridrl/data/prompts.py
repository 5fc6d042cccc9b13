"""Converts rows to prompts and targets: templates, chat, tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from hybridrl.config import ConfigError, DataConfig, EnvironmentConfig, SourceKind
from hybridrl.config.row_fields import field_of, fill, is_missing, text_of
from hybridrl.data.chat import (
    ChatTemplate,
    Place,
    as_message,
    content_text,
    has_assistant,
    read_messages,
    read_prompt,
    read_tools,
)
from hybridrl.data.left_out import RowNotes
from hybridrl.data.plain_texts import PlainTexts
from hybridrl.data.records import (
    SourceRecord,
    form_of,
    is_messages,
    messages_of,
)
from hybridrl.environments.task import ChatMessage, EpisodeTask
from hybridrl.models.control_tokens import special_tokens
from hybridrl.models.image_files import Images, digest_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.data.images import PromptImages


Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One question, ready for the model."""

    prompt: str
    """The text that the model reads, chat template included."""
    prompt_ids: tuple[int, ...]
    """Its tokens."""
    answer: str
    """The text of the expected answer, the first where there are several; empty without one."""
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
    """Whether the assistant wrote each token of a response in several turns, by column.

    The mask of `target_ids` is under the empty name. A response without a mask is all the
    assistant's.
    """

    task: EpisodeTask | None = field(default=None, repr=False)
    """What its episodes start from, where an environment answers the model."""
    answers: tuple[str, ...] = field(default=(), repr=False)
    """The texts of all right answers; none where no text follows from `expected`."""
    expected: Any = field(default=None, repr=False)
    """The answer's column as the source has it, where it is no text. Judges of the user's get a
    list or a struct in place of a text."""
    question: Any = field(default=None, compare=False, repr=False)
    """What its prompt's column has, a text or messages; null where it has none."""
    messages: tuple[ChatMessage, ...] = field(default=(), compare=False, repr=False)
    """The messages that the prompt was rendered from; none where `data.chat` is false."""
    place: str = field(default="", compare=False, repr=False)
    """Where its row stands, for messages: `row 3 of part-2.jsonl`."""
    images: Images = field(default=(), repr=False)
    """The files of its prompt's images, whose pads are among its tokens."""

    @property
    def tokens(self) -> int:
        """Tokens of its longest trained sequence: the prompt and a target, or another response."""
        return len(self.prompt_ids) + max(map(len, self.responses.values()), default=0)

    @property
    def responses(self) -> dict[str, tuple[int, ...]]:
        """Tokens of every response that is trained, by column."""
        target = {"answer": self.target_ids} if self.target_ids else {}
        return {**target, **self.columns}

    @property
    def identity(self) -> str:
        """What tells it from other items: its prompt, or its row where games share theirs."""
        return self.asked if self.task is None else self.task.digest

    @property
    def asked(self) -> str:
        """What tells its prompt from others: the text, and digests of its images."""
        return "\0".join([self.prompt, *(digest_of(image).hex() for image in self.images)])

    def response(self, column: str | None) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Tokens of a column, None for the target, and which of them are to be trained."""
        ids = self.target_ids if column is None else self.columns[column]
        return ids, self.masks.get(column or "", (True,) * len(ids))


@dataclass(frozen=True, slots=True)
class RowUses:
    """What a recipe does with the rows of a dataset."""

    columns: tuple[str, ...] = ()
    """The columns that hold a response to train on (`Flow.targets`)."""
    targets: bool = True
    """Whether it trains on the filled answer template, in a warm start, too."""
    generates: bool = True
    """Whether prompts generate; each prompt is drawn once then."""


class Opening(Protocol):
    """An environment as prompts need it: `hybridrl.environments.Openings`."""

    config: EnvironmentConfig
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
    longest = max((item.tokens for item in items), default=0)
    joined = []
    for item, other in zip(items, [*items[1:], *items[:1]], strict=True):
        room = longest - len(item.prompt_ids)
        columns = {name: ids[:room] for name, ids in other.columns.items()}
        masks = {name: mask[:room] for name, mask in other.masks.items()}
        target = other.target_ids[:room]
        joined.append(replace(item, target_ids=target, columns=columns, masks=masks))
    return joined


def end_token_id(tokenizer: "PreTrainedTokenizerBase", chat: bool) -> int:
    """The token that ends a response: the chat template's end of turn, else end of text.

    In some chat models the end of text is not the token that ends a turn (SmolLM2-Instruct:
    `<|im_start|>` against `<|im_end|>`), so the template has priority.
    """
    eos = tokenizer.eos_token_id
    if chat:
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
        text = ChatTemplate(tokenizer).text(messages, Place("data.chat", "true", ""))
        after = tokenizer(text.rpartition("A")[2].strip(), add_special_tokens=False)
        if after["input_ids"] and after["input_ids"][0] in special_tokens(tokenizer):
            return int(after["input_ids"][0])
    if eos is None:
        raise ConfigError("model.path", tokenizer.name_or_path, "a tokenizer with an eos token")
    return int(eos)


def make_items(
    source: str,
    records: Sequence[SourceRecord],
    config: DataConfig,
    tokenizer: Any,
    uses: RowUses = RowUses(),
    opening: Opening | None = None,
    notes: RowNotes | None = None,
    images: "PromptImages | None" = None,
) -> list[Item]:
    """Items of `records`, in order: templates filled, one tokenizer call for all prompts.

    `notes` takes what a user is to know of them.

    The columns of `uses` hold a response each: a text, or a list of messages. Where targets are not
    used, the answer template is not filled. With an `opening` a row's prompt is what its
    environment says first. `images` puts those of records into prompts. Raises ConfigError if a row
    lacks a column or a field of a template, if its messages cannot be read, or without a chat
    template.
    """
    if not records:
        return []
    notes = notes if notes is not None else RowNotes()
    conversations = config.sources[source].messages_column is not None
    if images:
        images.check(_key(source), records, config, bool(opening) or conversations)
    reader = None
    if config.chat:
        reader = _ChatReader(source, config, tokenizer, notes)
        records = [_with_lists(source, record, config) for record in records]
    if conversations:
        if reader is None:
            raise ConfigError("data.chat", False, f"true, since {source} has conversations")
        if opening:
            place = _place(source, config, "messages_column", records[0])
            raise ConfigError(place.key, place.column, "null, with an environment")
        return [reader.conversation(record) for record in records]
    if not config.chat:
        _check_without_chat(source, config, records[0], opening)
    end, key = end_token_id(tokenizer, config.chat), _key(source)
    whole = config.sources[source].prompt_column is None
    if whole and not records[0].question and (reader or uses.generates):
        place = _place(source, config, "prompt_column", records[0])
        raise place.refuse("a column, unless data.chat=false and the recipe trains whole texts")
    begin = (
        end_token_id(tokenizer, False) if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    )
    plain = PlainTexts(records, tokenizer, notes, (int(begin),) if whole else ())

    def filled(key: str, template: str) -> list[list[ChatMessage]]:
        return [_prompt(source, record, config, key, template) for record in records]

    def ended(responses: list[str]) -> list[Ids]:
        if not reader:
            return [(*ids, end) for ids in plain.answers(responses)]
        answers = [reader.answer(*each) for each in zip(records, texts, responses, strict=True)]
        return [(*ids, end) for ids in reader.template.ids_of(answers)]

    prompts = filled("data.prompt_template", config.prompt_template)
    tasks: list[EpisodeTask | None] = [None] * len(records)
    if opening:
        episodes = _episodes(source, records, prompts)
        firsts = opening(episodes)
        prompts = [list(first) for first in firsts]
        tasks = [replace(x, opening=tuple(y)) for x, y in zip(episodes, firsts, strict=True)]
        if reader:
            reader.tools = list(opening.tools)
            reader.template.tools_place = Place("environment.path", str(opening.config.path), "")
    rest = records, reader, plain, images, key, opening is not None
    texts, encoded = _rendered(prompts, *rest)
    privileged: list[Ids] = [()] * len(records)
    if config.privileged_template is not None:
        told = filled("data.privileged_template", config.privileged_template)
        _, privileged = _rendered(told, *rest)
    target_ids: list[Ids] = [()] * len(records)
    if uses.targets:
        template = config.answer_template
        if not reader and any(is_messages(r.expected) and len(r.expected) > 1 for r in records):
            allowed = f"true, since {source} has answers of several messages"
            raise ConfigError("data.chat", False, allowed)
        _note_several(records, notes)
        target_ids = ended([_fill("data.answer_template", template, r) for r in records])
    others = {
        name: ended([_response(source, record, name, config) for record in records])
        for name in uses.columns
    }
    items = []
    for number, (record, text, ids) in enumerate(zip(records, texts, encoded, strict=True)):
        of_columns = {name: responses[number] for name, responses in others.items()}
        item = Item(
            reader.template.control.plain(text) if reader else text,
            ids, record.first_answer, target_ids[number], source, record.item, of_columns,
            privileged[number], task=tasks[number], answers=record.right_answers,
            expected=record.untold, place=record.place, question=record.question,
            messages=tuple(prompts[number]) if reader else (), images=record.images,
        )  # fmt: skip
        if reader:
            item = reader.with_turns(item, record, prompts[number], uses)
        items.append(item)
    return items


def _rendered(
    prompts: Sequence[list[ChatMessage]],
    records: Sequence[SourceRecord],
    reader: "_ChatReader | None",
    plain: PlainTexts,
    images: "PromptImages | None",
    key: str,
    joined: bool,
) -> tuple[list[str], list[Ids]]:
    """Texts and tokens of prompts; without a chat template all messages of one are `joined`.

    Refusals of images name the `key` of the source.
    """
    if images:
        pairs = zip(prompts, records, strict=True)
        prompts = [images.marked(key, prompt, record) for prompt, record in pairs]
    if reader:
        texts = [reader.prompt(*pair) for pair in zip(records, prompts, strict=True)]
    else:
        spoken = [prompt if joined else prompt[-1:] for prompt in prompts]
        texts = ["".join(message["content"] for message in prompt) for prompt in spoken]
        plain.note("prompts", texts)
    if images:
        texts = list(map(images.spelled, texts))
    encoded = reader.template.ids_of(texts) if reader else plain.prompts(texts)
    ids = [tuple(each) for each in encoded]
    if images:
        ids = [images.expanded(*pair, key) for pair in zip(ids, records, strict=True)]
    return texts, ids


def _note_several(records: Sequence[SourceRecord], notes: RowNotes) -> None:
    for record in records:
        if len(record.right_answers) > 1:
            notes.add("the first of several right answers is trained on", record.place)


def _check_without_chat(
    source: str, config: DataConfig, first: SourceRecord, opening: Opening | None
) -> None:
    """Raise ConfigError for settings that plain prompts have no use for."""
    if config.system_prompt is not None and not opening:
        raise ConfigError("data.system_prompt", config.system_prompt, "null with data.chat=false")
    if config.sources[source].tools_column is not None:
        place = _place(source, config, "tools_column", first)
        raise ConfigError(place.key, place.column, "null with data.chat=false")


def _episodes(
    source: str, records: Sequence[SourceRecord], prompts: Sequence[list[ChatMessage]]
) -> list[EpisodeTask]:
    """What the episodes of rows start from, before their environment says anything."""
    pairs = zip(records, prompts, strict=True)
    return [
        EpisodeTask(
            tuple(prompt), record.item, record.first_answer, source,
            answers=record.right_answers, expected=record.untold, asked=record.question,
        )
        for record, prompt in pairs
    ]  # fmt: skip


class _ChatReader:
    """Rows of a source through the chat template: prompts, conversations, responses in turns."""

    def __init__(self, source: str, config: DataConfig, tokenizer: Any, notes: RowNotes) -> None:
        self.source, self.config, self.notes = source, config, notes
        self.tools: list[dict[str, Any]] = []
        """The tools of the environment, for every row."""
        self.template = ChatTemplate(tokenizer)
        self.template.check_system(config.system_prompt)
        self.end = end_token_id(tokenizer, True)

    def prompt(self, record: SourceRecord, messages: list[ChatMessage]) -> str:
        """The text of a row's prompt, up to where the assistant begins to write.

        Control tokens that the row spells are marked in it: see `ChatTemplate.text`.
        """
        place = _place(self.source, self.config, "prompt_column", record)
        text = self.template.text(messages, place, self._tools(record), prompt=True)
        self._note(record, messages, text)
        return text

    def _note(self, record: SourceRecord, messages: list[ChatMessage], text: str) -> None:
        """Note what the template does not render of a row's prompt."""
        for what in self.template.left_out(messages, text):
            self.notes.add(f"the chat template leaves out {what}", record.place)
        if self.template.header:
            self.notes.add(
                "the chat template ignores add_generation_prompt, and prompts get what it writes "
                f"before an answer, {self.template.header!r}; it should write this itself",
                record.place,
            )

    def answer(self, record: SourceRecord, prompt: str, response: str) -> str:
        """What the assistant writes after the text of a prompt, control tokens marked."""
        if misfit := self.template.misfit(prompt, response):
            self.notes.add(misfit, record.place)
        return self.template.answer(prompt, self._without_end(record, response))

    def _without_end(self, record: SourceRecord, content: str) -> str:
        text = self.template.without_end(content)
        if text != content:
            self.notes.add("a response ends with a control token, which is left out", record.place)
        return text

    def _read(self, record: SourceRecord, value: Any, place: Place) -> list[ChatMessage]:
        """Messages of a row; the template alone ends an assistant's."""
        return [
            {**message, "content": self._without_end(record, message["content"])}
            if message["role"] == "assistant"
            else message
            for message in read_messages(value, place)
        ]

    def conversation(self, record: SourceRecord) -> Item:
        """A whole conversation: its target is all from the assistant's first turn on."""
        place = _place(self.source, self.config, "messages_column", record)
        messages = _with_system(self.config, self._read(record, record.question, place))
        if not has_assistant(messages):
            raise place.refuse("conversations with a turn of the assistant's")
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        if not first:
            raise place.refuse("conversations that the assistant does not begin")
        tools = self._tools(record)
        whole = self.template.conversation(messages, place, tools, self.end).cut()
        start = whole.start
        mask = whole.written[start:]
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        asked = [m for m in messages[:last] if m["role"] != "assistant"]
        text = self.template.text(messages[: last + 1], place, tools)
        self._note(record, asked, text)
        answer = str(messages[first]["content"])
        privileged: Ids = ()
        if self.config.privileged_template is not None:
            told = _filled(
                messages[:first], replace(record, expected=answer), "data.privileged_template",
                self.config.privileged_template,
            )  # fmt: skip
            text = self.template.text(told, place, tools, prompt=True)
            privileged = tuple(self.template.ids(text))
        prompt = self.template.text(messages[:first], place, tools, prompt=True)
        return Item(
            self.template.control.plain(prompt),
            whole.ids[:start],
            answer,
            whole.ids[start:],
            self.source,
            record.item,
            privileged_ids=privileged,
            masks={} if all(mask) else {"": mask},
            answers=(answer,),
            messages=tuple(messages[:first]),
            place=record.place,
            question=record.question,
        )

    def with_turns(
        self, item: Item, record: SourceRecord, prompt: list[ChatMessage], uses: RowUses
    ) -> Item:
        """The item with those responses replaced that are several messages."""
        for name in (*uses.columns, *([""] if uses.targets else [])):
            place = _place(self.source, self.config, name or "answer_column", record)
            value = record.expected
            if name:
                value = _messages_of(field_of(record.item, name), place)
            if not is_messages(value):
                continue
            turns = _after_prompt(self._read(record, value, place), record.question, place)
            if not turns or any(turns[i]["role"] != "assistant" for i in (0, -1)):
                raise place.refuse(
                    "messages that begin and end with the assistant's, after the row's prompt or"
                    " without it"
                )
            if len(turns) == 1 and not turns[0].get("tool_calls"):
                continue
            messages = [*prompt, *turns]
            tools = self._tools(record)
            whole = self.template.conversation(messages, place, tools, self.end, len(prompt)).cut()
            start = whole.start
            if whole.ids[:start] != item.prompt_ids:
                raise place.refuse("turns that the chat template renders after the prompt")
            ids, mask = whole.ids[start:], whole.written[start:]
            masks = item.masks if all(mask) else {**item.masks, name: mask}
            if name:
                item = replace(item, columns={**item.columns, name: ids}, masks=masks)
            else:
                item = replace(item, target_ids=ids, masks=masks)
        return item

    def _tools(self, record: SourceRecord) -> list[dict[str, Any]] | None:
        column = self.config.sources[self.source].tools_column
        if self.tools or column is None:
            return self.tools or None
        place = self.template.tools_place = _place(self.source, self.config, "tools_column", record)
        return read_tools(field_of(record.row, column), place)


def _key(source: str) -> str:
    """The place of a source in the config; an evaluation set's own one is named by the set."""
    return f"{source}.source" if source.startswith("eval.sets.") else f"data.sources.{source}"


def _place(source: str, config: DataConfig, setting: str, record: SourceRecord) -> Place:
    """A setting of a source that names a column, or a column that the recipe reads."""
    key = _key(source)
    if setting.endswith("_column"):
        column = str(getattr(config.sources[source], setting))
        return Place(f"{key}.{setting}", column, record.place)
    return Place(key, setting, record.place)


def _messages_of(value: Any, place: Place) -> Any:
    """As `messages_of`, with a refusal that names the place."""
    try:
        return messages_of(value)
    except ValueError as error:
        raise place.refuse(str(error)) from None


def _with_lists(source: str, record: SourceRecord, config: DataConfig) -> SourceRecord:
    """The record with messages that its file has as JSON."""
    column = "messages_column" if config.sources[source].messages_column else "prompt_column"
    question = _messages_of(record.question, _place(source, config, column, record))
    record = replace(record, question=question)
    if config.sources[source].kind is not SourceKind.csv:  # an answer of JSON may be a text
        return record
    place = _place(source, config, "answer_column", record)
    return replace(record, expected=_messages_of(record.expected, place))


def _after_prompt(turns: list[ChatMessage], question: Any, place: Place) -> list[ChatMessage]:
    """A response's own messages: in some datasets they begin with the prompt's.

    A system message may stand before them that the `question` lacks.
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
    source: str, record: SourceRecord, config: DataConfig, key: str, template: str
) -> list[ChatMessage]:
    """The messages of one row, the last one's content filled into the `template` at `key`."""
    question, place = record.question, _place(source, config, "prompt_column", record)
    if isinstance(question, list | tuple):
        if not config.chat:
            raise ConfigError("data.chat", False, f"true, since {source} has lists of messages")
        messages = read_prompt(question, place)
    else:
        try:
            messages = [{"role": "user", "content": text_of(question)}]
        except TypeError as error:
            raise place.refuse(f"a text, or a list of messages: {error}") from None
    return _with_system(config, _filled(messages, record, key, template))


def _filled(
    messages: list[ChatMessage], record: SourceRecord, key: str, template: str
) -> list[ChatMessage]:
    """Messages with the content of the last one, where it is the user's, filled into a template."""
    *before, last = messages
    if last["role"] != "user":
        return messages
    content = _fill(key, template, replace(record, question=last["content"]))
    return [*before, {**last, "content": content}]


def _with_system(config: DataConfig, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Messages that begin with `data.system_prompt`, unless they have one."""
    if config.system_prompt is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _response(source: str, record: SourceRecord, column: str, config: DataConfig) -> str:
    """The text of a column that holds a response, or the last of its messages; empty for null."""
    try:
        response = field_of(record.item, column)
        if config.chat:
            response = _messages_of(response, _place(source, config, column, record))
        response = "" if is_missing(response) else response
    except KeyError:
        response = None
    if is_messages(response):
        messages = list(map(as_message, response))
        if not config.chat and [m.get("role") for m in messages].count("assistant") > 1:
            allowed = f"true, since {source} has responses of several turns ({column})"
            raise ConfigError("data.chat", False, allowed)
        response = content_text(messages[-1].get("content") or "")
    if not isinstance(response, str):
        allowed = (
            f"rows whose {column!r} is a response, a text or messages, as the recipe wants"
            f" ({record.place}){form_of(record.row)}"
        )
        raise ConfigError(f"data.sources.{source}", sorted(record.row), allowed)
    return response


def _fill(key: str, template: str, record: SourceRecord) -> str:
    """`template` with the fields of a record; raises ConfigError."""
    fields = record.fields()
    if texts := record.right_answers:
        fields["answer"] = texts[0]
    try:
        return fill(template, fields)
    except TypeError as error:
        allowed = f"fields that are text or numbers ({record.place}: {error}; a dot leads into it)"
        raise ConfigError(key, template, allowed) from error
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        known = ", ".join(sorted(map(str, fields)))
        allowed = (
            f"fields among {known}; {{{{ and }}}} for braces "
            f"({record.place}: {type(error).__name__}: {error})"
        )
        raise ConfigError(key, template, allowed) from error
