"""Rows of TRL, verl and OpenRLHF: each form is loaded by the line that docs/data.md has for it."""

import ast
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.config import ConfigError, SourceConfig
from hybridrl.config.compose import check, register, resolve_arguments
from hybridrl.data import Data, load_data
from hybridrl.data.prompts import RowUses
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.preflight.judges import check_rows
from hybridrl.preflight.prepare import build_recipe

ROOT = Path(__file__).parents[2]
FORM = re.compile(r"^- (.+?): `(\{.*?\})` by `(recipe=.*?)`$", re.MULTILINE)
FORMS = {form: (json.loads(row), line)
         for form, row, line in FORM.findall((ROOT / "docs/data.md").read_text())}  # fmt: skip
CHAT = (
    "{% if tools %}<tools>{{ tools[0].function.name }}<eos>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}[{{ call.function.name }}]{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = "<user>The sky {n}?<eos>\n<assistant>"
# What the prompt is, and what is trained by its column; or the answer, where prompts generate.
EXPECTED: dict[str, tuple[str, dict[str, str]]] = {
    "text (language modeling)": ("", {"": "The sky {n} is blue.<eos>"}),
    "prompt only": ("The sky {n} is", {}),
    "prompt and completion": ("The sky {n} is", {"": " blue.<eos>"}),
    "preference": ("The sky {n} is", {"chosen": " blue.<eos>", "rejected": " green.<eos>"}),
    "preference, the prompt implicit": (
        "The sky {n} is", {"chosen": " blue.<eos>", "rejected": " green.<eos>"}
    ),
    "messages": (ASKED, {"": "It is blue.<eos>"}),
    "messages of ShareGPT": (ASKED, {"": "It is blue.<eos>"}),
    "prompt only, of messages": (ASKED, {}),
    "prompt and completion, of messages": (ASKED, {"": "It is blue.<eos>"}),
    "preference, of messages": (
        ASKED, {"chosen": "It is blue.<eos>", "rejected": "It is green.<eos>"}
    ),
    "preference of messages, the prompt implicit": (
        ASKED, {"chosen": "It is blue.<eos>", "rejected": "It is green.<eos>"}
    ),
    "tool calls": (
        "<tools>look<eos>\n" + ASKED,
        {"": "[look]<eos>\n<tool>blue<eos>\n<assistant>It is blue.<eos>"},
    ),
    "verl, RL": (ASKED, {"answer": "blue"}),
    "verl, SFT by nested keys": (ASKED, {"": "It is blue.<eos>"}),
    "OpenRLHF, prompts with a label": (ASKED, {"answer": "blue"}),
    "OpenRLHF, SFT with `input_template`": (
        "User: The sky {n}?\nAssistant: ", {"": "It is blue.<eos>"}
    ),
    "unpaired preference": ("The sky {n} is", {"": " blue.<eos>"}),
}  # fmt: skip

LoadForm = Callable[[dict[str, Any], str], Data]


@pytest.fixture
def load_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadForm:
    """`load_form(row, line)`: data of a file with such rows, loaded by a documented line."""

    def run(row: dict[str, Any], line: str) -> Data:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mine.py").write_text("def score(response):\n    return 1.0\n")
        text = json.dumps(row)
        rows = [json.loads(text.replace("The sky", f"The sky {n}")) for n in range(6)]
        if "rows.parquet" in line:
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        else:
            (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        register()
        overrides = ["model=pretrained", "model.path=DIR", "data.eval_size=1"]
        config = check(resolve_arguments([*overrides, *shlex.split(line)]))
        graph = build_recipe(config.recipe)
        uses = RowUses(graph.columns, graph.trains_targets, graph.generates)
        tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 4096)
        tokenizer.chat_template = CHAT
        return load_data(config.data, tokenizer, max_context=1024, max_new_tokens=8, uses=uses)

    return run


@pytest.mark.parametrize("form", EXPECTED)
def test_a_form_is_loaded_by_its_line(load_form: LoadForm, form: str) -> None:
    data = load_form(*FORMS[form])
    tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 4096)
    prompt, responses = EXPECTED[form]
    items = [*data.train, *data.eval]
    assert len(items) == 6
    for item in items:
        n = re.search(r"sky (\d)", json.dumps(item.item))[1]  # type: ignore[index]
        answer = responses.get("answer")
        assert item.prompt == prompt.replace("{n}", n)
        assert answer is None or item.answer == answer
        trained = {name: text for name, text in responses.items() if name != "answer"}
        for name, text in trained.items():
            ids, _ = item.response(name or None)
            assert tokenizer.decode(ids) == text.replace("{n}", n)
        assert bool(item.prompt_ids)
    if form == "tool calls":
        ids, mask = items[0].response(None)
        written = [id for id, is_trained in zip(ids, mask, strict=True) if is_trained]
        assert tokenizer.decode(written) == "[look]<eos>It is blue.<eos>"


def test_every_documented_form_is_tested() -> None:
    assert FORMS.keys() == EXPECTED.keys()


def test_a_completion_in_several_turns_is_the_assistants(load_form: LoadForm) -> None:
    turns = FORMS["tool calls"][0]["messages"]
    row = {"prompt": turns[:1], "completion": turns[1:]}
    line = FORMS["prompt and completion, of messages"][1]
    tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 4096)
    for item in load_form(row, line).train:
        ids, mask = item.response(None)
        written = [id for id, is_trained in zip(ids, mask, strict=True) if is_trained]
        assert tokenizer.decode(written) == "[look]<eos>It is blue.<eos>"
        assert item.answer == "It is blue."
    with pytest.raises(ConfigError, match=r"data\.chat=False: wanted true"):
        load_form({**row, "prompt": "The sky?"}, line.replace("data.chat=true", ""))


@pytest.mark.contracts
def test_an_implicit_prompt_is_trls(request: pytest.FixtureRequest, load_form: LoadForm) -> None:
    """Against their function, which only slices."""
    root = ROOT / ".cache/foreign"
    (file,) = root.glob("trl-*/trl/data_utils.py")
    (function,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "extract_prompt"
    )
    scope: dict[str, Any] = {"Sequence": list}
    exec(compile(ast.Module([function], []), str(file), "exec"), scope)
    pairs = {
        ("The sky is blue.", "The sky is black."),
        ("The sky is  blue.", "The sky is  green."),
        ("The sky: a", "The sky: b and c"),
    }
    for chosen, rejected in pairs:
        row = {"chosen": chosen, "rejected": rejected}
        data = load_form(row, FORMS["preference, the prompt implicit"][1])
        for item in data.train:
            theirs = scope["extract_prompt"](
                {name: text.replace("The sky", item.prompt[:9]) for name, text in row.items()}
            )
            assert {name: item.item[name] for name in row} == {n: theirs[n] for n in row}
            assert item.prompt == theirs["prompt"]


@pytest.mark.parametrize("pair", [("a sky", "a sky"), ("sky", "no"), ("no", "")])
def test_pairs_without_a_prompt_are_refused(load_form: LoadForm, pair: tuple[str, str]) -> None:
    row = {"chosen": pair[0], "rejected": pair[1]}
    message = "rows whose chosen and rejected begin alike and then differ"
    with pytest.raises(ConfigError, match=rf"prompt_column=null: wanted .*{message} \(row 1\)"):
        load_form(row, FORMS["preference, the prompt implicit"][1])


def test_forms_that_few_recipes_take_are_named(load_form: LoadForm) -> None:
    steps = {"prompt": "The sky is", "completions": ["blue", "red"], "labels": [True, False]}
    line, pairs = FORMS["prompt and completion"][1], FORMS["preference"][1]
    for changed in (line.replace("=completion", "=completions"), line, pairs):
        with pytest.raises(ConfigError, match=r"row 1.*: stepwise supervision.*no recipe takes"):
            load_form(steps, changed)
    prompts = FORMS["prompt only"][1]
    assert len(load_form(steps, prompts).train) == 5  # they are prompts
    row = FORMS["unpaired preference"][0]
    with pytest.raises(ConfigError, match=r"row 1.*: unpaired preference, which recipe=kto"):
        load_form(row, pairs)
    items = load_form({**row, "label": False}, line).train
    data = SimpleNamespace(sources={"main": SourceConfig(name="x")})
    config: Any = SimpleNamespace(data=data, eval_judges=())
    with pytest.raises(
        ConfigError, match=r"name=x: wanted rows whose label is true \(row \d\): un"
    ):
        check_rows(config, sft_graph(), items)
    check_rows(config, sft_graph(), load_form(row, line).train)


def sft_graph() -> Any:
    return build_recipe({"target": "hybridrl.recipes.sft:sft"})


def test_whole_texts_do_not_generate(load_form: LoadForm) -> None:
    row, line = FORMS["text (language modeling)"]
    for changed in (line.replace("recipe=sft", "recipe=grpo"), f"{line} data.chat=true"):
        with pytest.raises(ConfigError, match=r"prompt_column=None: wanted a column, unless"):
            load_form(row, changed)
