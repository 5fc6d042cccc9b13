"""RUN/first_samples.txt shows what is seen, trained and judged, before a process starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import Config
from hybridrl.data import Item
from hybridrl.data.turns import TurnTemplate
from hybridrl.environments.tool_calls import CallForm
from hybridrl.models.tiny import make_char_tokenizer, make_tiny_model
from hybridrl.preflight.first_samples import FirstSamples
from hybridrl.preflight.prepare import build_recipe, prepare

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def shown(
    make_config: Callable[..., Config], tmp_path: Path, tiny_run: list[str]
) -> Callable[..., str]:
    """The first samples of a run on `rows`, with a model that has a chat template."""

    def run(rows: list[dict[str, Any]], *settings: str) -> str:
        file, model = tmp_path / "rows.jsonl", tmp_path / "model"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tiny = make_config(*tiny_run, "run.dir=out").model.tiny
        tiny.alphabet = "".join(map(chr, range(32, 127))) + "\n"
        make_tiny_model(model, tiny, 0)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        source = ["data=jsonl", f"data.sources.main.name={file}", "data.chat=true"]
        small = ["data.eval_size=2", "rollout.max_new_tokens=12", "warm_start.steps=0"]
        where = [f"run.dir={tmp_path / 'run'}", f"model.path={model}", "model=pretrained"]
        return prepare(make_config(*where, *source, *small, *settings)).first_samples

    return run


ROWS = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(6)]
PAIRS = [
    {"prompt": f"{n}+1?", "chosen": f"{n + 1}", "rejected": "no", "answer": "1"} for n in range(6)
]


def test_a_recipe_that_generates(shown: Callable[..., str]) -> None:
    text = shown(ROWS, "recipe=grpo", "reward=exact", "reward.extract='(\\d+)'",
                 "data.answer_template='It is {answer}'")  # fmt: skip
    number = int(text.split("main, row ")[1].split(" ")[0]) - 1
    first = text.split(" ========\n")[1].split("\n\n")[0]
    assert first.split("\n") == [
        f"---- the model sees ({len('<|user|>') + 4 + 2 + len('<|assistant|>')} tokens)",
        f"<|user|>{number}+1?<eos>",
        "<|assistant|>",
        "---- the model writes: what it writes is trained",
        "a turn ends at '<eos>'; a response at 12 tokens at the latest",
        "---- reward.kind=exact",
        f"is given the text of the response, and the answer: '{number + 1}'",
        f"of the response 'It is {number + 1}' (7 tokens) (it judges '{number + 1}') it says 1",
    ]
    assert text.count("======== main, row ") == 4


def test_answers_that_are_trained(shown: Callable[..., str]) -> None:
    text = shown(ROWS, "recipe=sft", "reward=exact", "reward.extract=null",
                 "data.answer_template='It is {answer}'")  # fmt: skip
    assert "the model writes" not in text
    assert "---- trained: the row's response (8 of 8 tokens)\n[[It is " in text
    assert "<eos>]]\nits turn ends with '<eos>'\n" in text
    assert " it says 0\n" in text  # 'It is 4' is not '4'


def test_turns_of_a_conversation_are_marked(shown: Callable[..., str]) -> None:
    rows = []
    for n in range(6):
        turns = [("user", f"{n}?"), ("assistant", "2"), ("user", "and?"), ("assistant", "3")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    text = shown(rows, "recipe=sft", "data.sources.main.messages_column=messages",
                 "reward.extract=null")  # fmt: skip
    assert "[[2<eos>]]\n<|user|>and?<eos>\n<|assistant|>[[3<eos>]]\nits turn ends with" in text


def test_control_tokens_that_are_spelled_are_marked(shown: Callable[..., str]) -> None:
    rows = [{"prompt": f"{n}<eos>?", "answer": f"<eos>{n}"} for n in range(6)]
    text = shown(rows, "recipe=sft", "reward.extract=null")
    assert text.count("\\<eos>?<eos>\n<|assistant|>\n") == 4
    assert text.count("[[\\<eos>") == 4
    assert text.count("<eos>]]\nits turn ends with '<eos>'\n") == 4


@pytest.mark.parametrize("recipe", ["dpo", "rm"])
def test_pairs_show_both_responses(shown: Callable[..., str], recipe: str) -> None:
    text = shown(PAIRS, f"recipe={recipe}")
    assert text.count("---- trained: the column 'chosen' (2 of 2 tokens)") == 4
    assert text.count("---- trained: the column 'rejected' (3 of 3 tokens)\n[[no<eos>]]\n") == 4


@pytest.mark.long
def test_an_environment_answers(
    make_config: Callable[..., Config], tmp_path: Path, tiny_run: list[str]
) -> None:
    settings = [
        *tiny_run,
        "environment=grid",
        "data=grid_walks",
        "reward=environment",
        f"run.dir={tmp_path / 'run'}",
    ]
    text = prepare(make_config(*settings)).first_samples
    assert "\nenvironment.kind=grid answers up to " in text
    assert "---- reward.kind=environment\n" in text


@pytest.mark.parametrize("form", ["hermes", ""])
def test_the_form_of_calls_is_shown(make_config: Callable[..., Config], form: str) -> None:
    config = make_config("environment=tools", "environment.path=mine.py:TOOLS", "run.dir=out")
    tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 512)
    tokenizer.chat_template = TEMPLATE
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    item = Item("q", (1,), "", (), "main", {}, place="row 1")
    for offered, lines in ((tools, 1), ([], 0)):
        turns = TurnTemplate(tokenizer, offered, True, CallForm(form))
        samples = FirstSamples(config, build_recipe(config.recipe), tokenizer, [2], {}, turns)
        line = f"\ncalls of tools are read in {form or 'any form'} (environment.tool_calls=auto)\n"
        assert samples.text([item]).count(line) == lines
