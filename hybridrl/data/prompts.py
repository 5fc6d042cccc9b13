"""Converts rows to prompts and targets: templates, chat, tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hybridrl.config import ConfigError, DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        joined.append(replace(item, target_ids=other.target_ids[:room], columns=columns))
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
        text = _chat_texts(tokenizer, [messages], add_generation_prompt=False)[0]
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
) -> list[Item]:
    """Items of `rows`, in order: templates filled, one tokenizer call for all prompts.

    `columns` hold a response each: a text, or the last of a list of messages. Raises ConfigError if
    a row lacks a column or a field of a template, or if messages or a chat template are missing.
    """
    if not rows:
        return []
    # texts
    prompts = [_prompt(source, row, config) for row in rows]
    if config.chat:
        texts = _chat_texts(tokenizer, prompts, add_generation_prompt=True)
    else:
        texts = [prompt[-1]["content"] for prompt in prompts]
    targets = [_fill("data.answer_template", config.answer_template, row) for row in rows]
    # tokens; a chat template writes its own special tokens
    encoded = tokenizer(texts, add_special_tokens=not config.chat, verbose=False)["input_ids"]
    end = end_token_id(tokenizer, config.chat)

    def ended(responses: list[str]) -> list[tuple[int, ...]]:
        ids = tokenizer(responses, add_special_tokens=False, verbose=False)["input_ids"]
        return [(*response, end) for response in ids]

    target_ids = ended(targets)
    others = {name: ended([_response(source, row, name) for row in rows]) for name in columns}
    # items
    items = []
    for number, (row, text, ids) in enumerate(zip(rows, texts, encoded, strict=True)):
        if not config.chat and ids and ids[-1] == tokenizer.eos_token_id:
            ids = ids[:-1]  # tokenizers that close every text would end the response here
        target = target_ids[number]
        tokens_of_columns = {name: responses[number] for name, responses in others.items()}
        items.append(
            Item(text, tuple(ids), _answer(row), target, source, dict(row), tokens_of_columns)
        )
    return items


def _prompt(source: str, row: Mapping[str, Any], config: DataConfig) -> list[dict[str, str]]:
    """The messages of one row, the last one's content filled into the prompt template."""
    question = row["question"]
    messages = [{"role": "user", "content": question}]
    if not isinstance(question, str):
        if not config.chat:
            raise ConfigError("data.chat", False, f"true, since {source} has lists of messages")
        messages = [dict(message) for message in question]
    filled = {**row, "question": messages[-1]["content"]}
    messages[-1]["content"] = _fill("data.prompt_template", config.prompt_template, filled)
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def _response(source: str, row: Mapping[str, Any], column: str) -> str:
    """The text of a column that holds a response, or the last of its messages."""
    response = row.get(column)
    if isinstance(response, Sequence) and response and isinstance(response[-1], Mapping):
        response = response[-1].get("content")
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


def _chat_texts(tokenizer: Any, prompts: list[Any], *, add_generation_prompt: bool) -> list[str]:
    if not tokenizer.chat_template:
        raise ConfigError(
            "data.chat", True, f"false, since {tokenizer.name_or_path} has no chat template"
        )
    return list(
        tokenizer.apply_chat_template(
            prompts, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )
