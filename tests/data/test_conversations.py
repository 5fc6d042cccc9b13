"""Whole conversations: who wrote which token, tools, responses of several turns, refusals."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.data import Data
from hybridrl.models.tiny import make_char_tokenizer

Load = Callable[..., Data]
END = "<eos>"
BARE = (
    "{% if tools %}<tools>{{ tools | tojson }}<eos>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}[{{ call.function.name }}]{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = BARE.replace(
    "<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}[{{ call.function.name }}]"
    "{% endfor %}<eos>\n",
    "<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls %}[{{ call.function.name }}]{% endfor %}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}<eos>{% endif %}{{ '\n' }}",
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def tokenizer_of(template: str) -> Any:
    tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 4096)
    tokenizer.chat_template = template
    return tokenizer


def conversation(n: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"{n}+1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": str(n + 1)},
        {"role": "assistant", "content": f"It is {n + 1}."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Any time."},
        {"role": "user", "content": "Bye"},
    ]


def rows(num: int = 14) -> list[dict[str, Any]]:
    return [{"messages": conversation(n), "tools": TOOLS} for n in range(num)]


def source(name: str, kind: SourceKind = SourceKind.jsonl, **settings: Any) -> SourceConfig:
    columns = {"messages_column": "messages", "tools_column": "tools"}
    return SourceConfig(kind=kind, name=name, **{**columns, **settings})


def written(item: Any, tokenizer: Any) -> tuple[str, list[str]]:
    """The whole text, and the stretches of it that are trained."""
    ids, mask = item.response(None)
    stretches, last = [], False
    for token, is_trained in zip(ids, mask, strict=True):
        if is_trained and not last:
            stretches.append([])
        if is_trained:
            stretches[-1].append(token)
        last = is_trained
    whole = tokenizer.decode([*item.prompt_ids, *ids])
    return whole, [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize("template", [BARE, MARKED], ids=["bare", "marked"])
def test_the_assistants_turns_are_trained(load: Load, jsonl: Any, template: str) -> None:
    tokenizer = tokenizer_of(template)
    data = load(source(jsonl(rows())), tokenizer=tokenizer, chat=True, eval_size=2)
    item = data.train[0]
    n = int(item.item["messages"][2]["content"]) - 1
    whole, stretches = written(item, tokenizer)
    assert stretches == [f"[add]{END}", f"It is {n + 1}.{END}", f"Any time.{END}"]
    rendered = tokenizer.apply_chat_template(conversation(n), tools=TOOLS, tokenize=False)
    assert rendered.startswith(whole)
    assert rendered.removeprefix(whole) == f"\n<user>Bye{END}\n"  # no one learns from it
    assert item.prompt == f"<tools>{json.dumps(TOOLS)}{END}\n<user>{n}+1?{END}\n<assistant>"
    assert tokenizer.decode(item.prompt_ids) == item.prompt
    assert len(data.train) == 12


def test_the_mask_is_that_of_transformers(load: Load, jsonl: Any) -> None:
    """Marked, it is theirs; without marks the turns' texts give the same tokens."""
    marked, bare = tokenizer_of(MARKED), tokenizer_of(BARE)
    settings: dict[str, Any] = {"chat": True, "eval_size": 2}
    ours = load(source(jsonl(rows())), tokenizer=bare, **settings).train
    for item in ours:
        encoded = marked.apply_chat_template(
            item.item["messages"], tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = item.response(None)
        whole = [*item.prompt_ids, *ids]
        assert encoded["input_ids"][: len(whole)] == whole
        theirs = [bool(x) for x in encoded["assistant_masks"]]
        assert theirs[: len(whole)] == [*[False] * len(item.prompt_ids), *mask]
        assert not any(theirs[len(whole) :])
    theirs_too = load(source(jsonl(rows())), tokenizer=marked, **settings).train
    assert [x.response(None) for x in theirs_too] == [x.response(None) for x in ours]


ARGUMENTS = {
    "as JSON": ("{{ call.function.arguments | tojson }}", '{"a": 1, "b": "x"}'),
    "of text": ("{{ '<' + call.function.arguments + '>' }}", '<{"a": 1, "b": "x"}>'),
    "printed": ("{{ call.function.arguments }}", '{"a": 1, "b": "x"}'),
    "by name": (
        "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }},{% endfor %}", "a=1,b=x,"
    ),
    "either": (
        "{{ call.function.arguments if call.function.arguments is string else "
        "call.function.arguments | tojson }}", '{"a": 1, "b": "x"}'
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ARGUMENTS)
def test_arguments_of_calls_mean_the_same_as_an_object_and_as_json(
    load: Load, jsonl: Any, form: str
) -> None:
    """Datasets have both, and each template writes out one of them."""
    written_out, expected = ARGUMENTS[form]
    template = BARE.replace("{{ call.function.name }}", written_out)
    tokenizer = tokenizer_of(template)
    arguments: dict[str, Any] = {"a": 1, "b": "x"}
    texts = set()
    for value in (arguments, json.dumps(arguments)):
        call = {"type": "function", "function": {"name": "add", "arguments": value}}
        turns = [[*conversation(n)] for n in range(6)]
        for messages in turns:
            messages[1] = {**messages[1], "tool_calls": [call]}
        name = jsonl([{"messages": messages, "tools": None} for messages in turns])
        data = load(source(name), tokenizer=tokenizer, chat=True, eval_size=1, generates=False)
        texts.add(tuple(sorted(written(item, tokenizer)[1][0] for item in data.train)))
    assert texts == {(f"[{expected}]{END}",) * 5}


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_columns_of_structs_have_null_fields(
    load: Load, jsonl: Any, tmp_path: Path, kind: str
) -> None:
    """Arrow gives every message every field, null where it has none."""
    import datasets

    table = datasets.Dataset.from_list(rows())
    assert table[0]["messages"][0]["tool_calls"] is None
    path = tmp_path / kind
    if kind == "parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(path)
    tokenizer = tokenizer_of(BARE)
    settings: dict[str, Any] = {"tokenizer": tokenizer, "chat": True, "eval_size": 2}
    same = load(source(str(path), SourceKind(kind)), **settings)
    expected = load(source(jsonl(rows())), **settings)
    assert [x.response(None) for x in same.train] == [x.response(None) for x in expected.train]


def test_prompts_with_tools_and_a_tools_answer(load: Load, jsonl: Any) -> None:
    """A prompt may end with what a tool has answered; tools may be JSON, or none of a row."""
    tokenizer = tokenizer_of(BARE)
    prompts = [
        {"prompt": conversation(n)[:3], "answer": "x", "tools": json.dumps(TOOLS) if n else None}
        for n in range(14)
    ]
    prompts[1]["prompt"] = "as text?"
    item = source(jsonl(prompts), messages_column=None)
    data = load(item, tokenizer=tokenizer, chat=True, eval_size=2, prompt_template="{question} !")
    texts = {x.prompt for x in [*data.train, *data.eval]}
    tools = f"<tools>{json.dumps(TOOLS)}{END}\n"
    asked = "<user>{}+1?<eos>\n<assistant>[add]<eos>\n<tool>{}<eos>\n<assistant>"
    assert tools + asked.format(5, 6) in texts
    assert asked.format(0, 1) in texts
    assert f"{tools}<user>as text? !{END}\n<assistant>" in texts


def test_preferences_in_turns(load: Load, jsonl: Any) -> None:
    """A text, one message, several, and a list that begins with the prompt: one way to train."""
    tokenizer = tokenizer_of(BARE)

    def row(n: int) -> dict[str, Any]:
        prompt, rest = conversation(n)[:1], conversation(n)[1:4]
        chosen: list[Any] = [rest, [*prompt, *rest], rest, rest]
        rejected: list[Any] = ["No.", [{"role": "assistant", "content": "No."}]] * 2
        return {
            "prompt": prompt, "chosen": chosen[n % 4], "rejected": rejected[n % 4],
            "answer": str(n),
        }  # fmt: skip

    data = load(
        source(jsonl([row(n) for n in range(14)]), messages_column=None, tools_column=None),
        tokenizer=tokenizer, chat=True, eval_size=2, columns=("chosen", "rejected"),
    )  # fmt: skip
    for item in data.train:
        n = int(item.answer)
        ids, mask = item.response("chosen")
        assert (
            tokenizer.decode(ids)
            == f"[add]{END}\n<tool>{n + 1}{END}\n<assistant>It is {n + 1}.{END}"
        )
        trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
        assert tokenizer.decode(trained) == f"[add]{END}It is {n + 1}.{END}"
        ids, mask = item.response("rejected")
        assert (tokenizer.decode(ids), all(mask)) == (f"No.{END}", True)


@pytest.mark.parametrize("asked", ["text", "messages"])
def test_preferences_that_repeat_the_prompt(load: Load, jsonl: Any, asked: str) -> None:
    """As in UltraFeedback, whose prompt is a text; a system message before it is left out."""
    tokenizer = tokenizer_of(BARE)

    def row(n: int) -> dict[str, Any]:
        user = {"role": "user", "content": f"{n}+1?"}
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"It is {n + 1}."}]}
        system = {"role": "system", "content": "Be brief."}
        turns = [answer, {"role": "user", "content": "Sure?"}, answer]
        chosen = [[user, answer], [system, user, answer], [user, *turns], [system, user, *turns]]
        prompt = user["content"] if asked == "text" else [user]
        return {"prompt": prompt, "chosen": chosen[n % 4], "answer": str(n)}

    data = load(
        source(jsonl([row(n) for n in range(14)]), messages_column=None, tools_column=None),
        tokenizer=tokenizer, chat=True, eval_size=2, columns=("chosen",),
    )  # fmt: skip
    for item in data.train:
        n = int(item.answer)
        turn = f"It is {n + 1}.{END}"
        again = f"\n<user>Sure?{END}\n<assistant>{turn}"
        assert item.prompt == f"<user>{n}+1?{END}\n<assistant>"
        assert tokenizer.decode(item.response("chosen")[0]) == turn + again * (n % 4 > 1)


def test_a_response_that_another_begins(load: Load, jsonl: Any) -> None:
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    of_another = [{"prompt": f"{n}?", "chosen": turns, "answer": "4"} for n in range(4)]
    message = r"sources\.s=chosen: wanted messages that begin and end with the assistant's.*row 1"
    with pytest.raises(ConfigError, match=message):
        load(
            source(jsonl(of_another), messages_column=None, tools_column=None),
            tokenizer=tokenizer_of(BARE), chat=True, eval_size=1, columns=("chosen",),
        )  # fmt: skip


def test_conversations_that_begin_alike_are_all_there(
    load: Load, jsonl: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No prompt is both held out and trained on."""
    hello = [{"role": "user", "content": "Hello"}]
    said = [[*hello, {"role": "assistant", "content": f"I am {n}."}] for n in range(8)]
    alike = [{"messages": turns} for turns in [*said, said[0]]]
    own = [{"messages": conversation(n)} for n in range(3)]
    settings: dict[str, Any] = {"tokenizer": tokenizer_of(BARE), "chat": True}
    rows_of_both = source(jsonl([*alike, *own]), tools_column=None)
    settings |= {"generates": False}
    data = load(rows_of_both, eval_size=2, **settings)
    assert {item.answer for item in data.train} >= {f"I am {n}." for n in range(8)}
    assert (len(data.train), len(data.eval)) == (10, 2)  # a row that is there twice counts twice
    assert not caplog.messages
    with pytest.raises(ConfigError, match=r"eval_size=4: wanted fewer held-out items"):
        load(rows_of_both, eval_size=4, **settings)
    reserved = load(
        rows_of_both, eval_size=1, reserved=["<user>Hello<eos>\n<assistant>"], **settings
    )
    assert len(reserved.train) == 2


def test_a_privileged_prompt_of_a_conversation(load: Load, jsonl: Any) -> None:
    """The template fills the user's last message before the first answer."""
    tokenizer = tokenizer_of(BARE)
    data = load(
        source(jsonl([{"messages": conversation(n)[4:6], "n": n} for n in range(3)][:1] + rows(3)),
               tools_column=None),
        tokenizer=tokenizer, chat=True, eval_size=1, privileged_template="{question} ({answer})",
    )  # fmt: skip
    told = {item.prompt: tokenizer.decode(item.privileged_ids) for item in data.train + data.eval}
    assert told[f"<user>Thanks{END}\n<assistant>"] == f"<user>Thanks (Any time.){END}\n<assistant>"
    assert told[f"<user>1+1?{END}\n<assistant>"] == f"<user>1+1? (){END}\n<assistant>"


REWRITES = BARE.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:1] }}")
NO_TOOLS = BARE.partition("{% endif %}")[2]


def changed(**first: Any) -> Iterator[dict[str, Any]]:
    """Rows of which the third one differs."""
    for n, row in enumerate(rows(4)):
        yield {**row, **first} if n == 2 else row


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "role": (
        {"messages": [{"role": "bot", "content": "x"}]}, BARE,
        r"data\.sources\.s\.messages_column=messages: wanted messages with a role of system, .*"
        r"not 'bot' \(row 3\)",
    ),
    "empty": ({"messages": []}, BARE, r"a list of one message or more.*\(row 3\)"),
    "text": ({"messages": "hello"}, BARE, r"a list of one message or more.*\(row 3\)"),
    "content": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, BARE,
        r"sources\.s\.name=.*wanted rows of text: row 3 has images or other media in 'messages'",
    ),
    "no answer": (
        {"messages": conversation(0)[:1]}, BARE, r"a turn of the assistant's \(row 3\)",
    ),
    "first": (
        {"messages": conversation(0)[3:]}, BARE, r"the assistant does not begin \(row 3\)",
    ),
    "arguments": (
        {"messages": [*conversation(0)[:1], {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": '{"a": '}}]}]}, BARE,
        r"wanted calls whose arguments are an object or its JSON, not '\{\"a\": ' \(row 3\)",
    ),
    "weight": (
        {"messages": [*conversation(0)[:1], {"role": "assistant", "content": "2", "weight": 0}]},
        BARE, r"wanted messages without weight=0: .*\(row 3\)",
    ),
    "tools": ({"tools": "{"}, BARE, r"sources\.s\.tools_column=tools: wanted a list of tools"),
    "no tools": ({}, NO_TOOLS, r"model\.path=.*: wanted a model whose chat template.*data\.chat_te"
                 r".* no tools: data\.sources\.s\.tools_column=tools has some \(row 1\)"),
    "rewrites": (
        {"tools": None}, REWRITES,
        r"a chat template with \{% generation %\} marks, or one that renders a conversation turn by"
        r" turn: turn 2 changes the text before it \(row 1\)",
    ),
    "privileged": (
        {}, BARE, r"privileged_template=\{nothing\}: wanted fields among answer, messages",
    ),
    "raises": (
        {}, "{{ raise_exception('only user and assistant') }}",
        r"messages that the chat template takes: only user and assistant",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_rows(load: Load, jsonl: Any, name: str) -> None:
    first, template, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        load(
            source(jsonl([*changed(**first)])),
            tokenizer=tokenizer_of(template),
            chat=True,
            eval_size=1,
            privileged_template="{nothing}" if name == "privileged" else None,
        )


def test_prompts_that_no_one_answers(load: Load, jsonl: Any) -> None:
    prompts = [{"prompt": conversation(n)[:4], "answer": "x"} for n in range(4)]
    of_prompts = source(jsonl(prompts), messages_column=None, tools_column=None)
    message = (
        r"prompt_column=prompt: wanted messages that end with user or tool, not with assistant"
    )
    with pytest.raises(ConfigError, match=message):
        load(of_prompts, tokenizer=tokenizer_of(BARE), chat=True, eval_size=1)


def test_without_a_chat_template(load: Load, jsonl: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.chat=False: wanted true, since s has conversat"):
        load(source(jsonl(rows())), eval_size=1)


def test_a_column_that_is_not_there(load: Load, jsonl: Any) -> None:
    with pytest.raises(ConfigError, match=r"messages_column=turns: wanted one of messages, t"):
        load(source(jsonl(rows()), messages_column="turns"), chat=True)


def test_conversations_beyond_the_context(load: Load, jsonl: Any) -> None:
    settings: dict[str, Any] = {"tokenizer": tokenizer_of(BARE), "chat": True, "eval_size": 1}
    long = rows(6)
    long[3]["messages"] = [*conversation(3)[:3], {"role": "assistant", "content": "x" * 900}]
    with pytest.raises(
        ConfigError, match=r"skip_unusable_rows=False: wanted true, or .*: s, row 4 has 1045"
    ):
        load(source(jsonl(long)), **settings)
    data = load(source(jsonl(long)), skip_unusable_rows=True, **settings)
    assert (len(data.train), data.dropped) == (4, {"a response beyond the context": 1})


def of_csv(folder: Path, rows: list[dict[str, str]]) -> str:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(folder / "rows.csv")


def test_messages_that_a_file_has_as_json(load: Load, tmp_path: Path, chat_tokenizer: Any) -> None:
    """CSV has no lists. An answer of JSON that is no messages stays a text."""
    asked = [[{"role": "user", "content": f"q{n}"}] for n in range(2)]
    said = [{"role": "assistant", "content": "yes"}]
    rows = [
        {"prompt": json.dumps(asked[0]), "answer": json.dumps(said)},
        {"prompt": json.dumps(asked[1]), "answer": '[{"from": "A", "to": "B"}]'},
    ]
    source = SourceConfig(kind=SourceKind.csv, name=of_csv(tmp_path, rows))
    data = load(source, tokenizer=chat_tokenizer, chat=True, eval_size=1)
    answers = {item.prompt: item.answer for item in [*data.train, *data.eval]}
    assert answers == {
        "<user>q0<eos>\n<assistant>": "yes",
        "<user>q1<eos>\n<assistant>": '[{"from": "A", "to": "B"}]',
    }
    whole = [{"messages": json.dumps([*question, *said])} for question in asked]
    source = SourceConfig(
        kind=SourceKind.csv, name=of_csv(tmp_path, whole), messages_column="messages"
    )
    data = load(source, tokenizer=chat_tokenizer, chat=True, eval_size=1, generates=False)
    assert {item.answer for item in [*data.train, *data.eval]} == {"yes"}


def test_a_text_that_only_begins_as_messages_stays_one(
    load: Load, tmp_path: Path, chat_tokenizer: Any
) -> None:
    """A task may be about Python, or want JSON: only CSV has no lists."""
    row = {
        "prompt": "[{'role': 'user', 'content': 'x'}] What is wrong here?",
        "answer": json.dumps([{"role": "user", "content": "x"}]),
    }
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({**row, "n": n}) for n in range(2)))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(file))
    data = load(source, tokenizer=chat_tokenizer, chat=True, eval_size=0)
    assert data.train[0].prompt == f"<user>{row['prompt']}<eos>\n<assistant>"
    assert data.train[0].answer == row["answer"]


def test_messages_in_the_syntax_of_python_are_refused(
    load: Load, tmp_path: Path, chat_tokenizer: Any
) -> None:
    rows = [{"prompt": "[{'role': 'user', 'content': 'q'}]", "answer": "a"}]
    source = SourceConfig(kind=SourceKind.csv, name=of_csv(tmp_path, rows))
    with pytest.raises(ConfigError, match=r"prompt_column=prompt: .* its JSON, .*\(row 1\)"):
        load(source, tokenizer=chat_tokenizer, chat=True, eval_size=1)


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"system_prompt": "Be brief."}, "data.system_prompt"),
     ({"tools_column": "tools"}, "data.sources.s.tools_column")],
)  # fmt: skip
def test_what_plain_prompts_have_no_use_for_is_refused(
    load: Load, tmp_path: Path, settings: dict[str, str], key: str
) -> None:
    file = of_csv(tmp_path, [{"prompt": "q", "answer": "a", "tools": "[]"}])
    column = settings.pop("tools_column", None)
    source = SourceConfig(kind=SourceKind.csv, name=file, tools_column=column)
    with pytest.raises(ConfigError, match=r"null with data\.chat=false") as caught:
        load(source, eval_size=1, **settings)
    assert caught.value.key == key
