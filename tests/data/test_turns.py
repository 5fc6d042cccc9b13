"""The tokens between turns are those of a full rendering; the model's own are never made anew."""

import json
from typing import Any

import pytest

from hybridrl.config import ConfigError, EnvironmentConfig, SourceConfig, SourceKind
from hybridrl.data.turns import TurnTemplate
from hybridrl.environments import EpisodeTask
from hybridrl.models.tiny import make_char_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: reasoning of earlier turns is left out.
DROPS = CHATML.replace(
    "{{ m.content }}",
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>\n\n')[-1] }}"
    "{% endif %}",
)
# As GLM: no token ends a turn, the next role's does.
OPENERS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
# As Gemma 3: no tools.
ALTERNATES = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def tokenizer_of(template: str) -> Any:
    tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 4096)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def call(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": {"a": number}}}


ASKED = [{"role": "user", "content": "2+3?"}]
CASES = {
    "user": ({"role": "assistant", "content": "So."}, [{"role": "user", "content": "Go on"}]),
    "tool": (
        {"role": "assistant", "content": "", "tool_calls": [call(2)]},
        [{"role": "tool", "name": "add", "content": "5"}],
    ),
    "two results": (
        {"role": "assistant", "content": "", "tool_calls": [call(2), call(3)]},
        [{"role": "tool", "name": "add", "content": c} for c in ("5", "6")],
    ),
}


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut off"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("template", [CHATML, DROPS], ids=["chatml", "drops"])
def test_composed_tokens_are_those_of_a_full_rendering(
    template: str, case: str, tools: Any, cut: bool
) -> None:
    tokenizer = tokenizer_of(template)
    turn, reply = CASES[case]

    def rendered(messages: list[Any], opens: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=opens
        )

    prompt, whole = rendered(ASKED, True), rendered([*ASKED, turn, *reply], True)
    written = rendered([*ASKED, turn], False)[len(prompt) :].rstrip()
    own = ids(tokenizer, written.removesuffix("<|im_end|>") if cut else written)
    between = TurnTemplate(tokenizer, tools or ()).between(own, reply)
    assert [*ids(tokenizer, prompt), *own, *between] == ids(tokenizer, whole)


def test_what_the_model_wrote_is_not_followed_into_a_rewriting() -> None:
    """The turn keeps its reasoning; what follows it is the template's."""
    tokenizer = tokenizer_of(DROPS)
    template = TurnTemplate(tokenizer)
    assert template.rewrites
    assert not TurnTemplate(tokenizer_of(CHATML)).rewrites
    own = ids(tokenizer, "<think>\nhm\n</think>\n\nSo.<|im_end|>")
    between = template.between(own, CASES["user"][1])
    assert (
        tokenizer.decode(between) == "\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_role_that_ends_a_turn_comes_once() -> None:
    tokenizer = tokenizer_of(OPENERS)
    template = TurnTemplate(tokenizer)
    assert tokenizer.decode(template.between(ids(tokenizer, "So."), CASES["user"][1])) == (
        "<|user|>Go on<|assistant|>"
    )
    opened = template.between(ids(tokenizer, "So.<|user|>"), CASES["user"][1])
    assert tokenizer.decode(opened) == "Go on<|assistant|>"


def test_without_a_template_a_reply_is_its_text() -> None:
    tokenizer = tokenizer_of(CHATML)
    template = TurnTemplate(tokenizer, chat=False)
    reply = [{"role": "tool", "content": "5"}, {"role": "user", "content": "; on"}]
    assert tokenizer.decode(template.between(ids(tokenizer, "2+3"), reply)) == "5; on"


def test_without_a_template_control_tokens_are_said(caplog: pytest.LogCaptureFixture) -> None:
    template = TurnTemplate(tokenizer_of(CHATML), chat=False)
    for _ in range(2):
        template.between((), [{"role": "tool", "content": "5<|im_end|>"}])
    (record,) = caplog.records
    assert "a reply has the control token '<|im_end|>'" in record.getMessage()


@pytest.mark.parametrize("most", [45, 60, 61, 500])
def test_a_long_reply_is_cut(most: int) -> None:
    tokenizer = tokenizer_of(CHATML)
    template, reply = TurnTemplate(tokenizer), [{"role": "user", "content": "x" * 400}]
    tokens, was_cut = template.reply((), reply, most)
    assert was_cut == (most < 400)
    frame = len(template.between((), [{"role": "user", "content": ""}]))
    assert len(tokens) == min(most, frame + 400)
    assert tokenizer.decode(tokens).endswith("x<|im_end|>\n<|im_start|>assistant\n")


def test_a_frame_that_is_longer_than_the_limit_stays() -> None:
    tokenizer = tokenizer_of(CHATML)
    tokens, was_cut = TurnTemplate(tokenizer).reply((), [{"role": "user", "content": "xy"}], 3)
    assert was_cut
    assert "x" not in tokenizer.decode(tokens)


def test_templates_without_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path=here: .*no tools here"):
        TurnTemplate(tokenizer_of(ALTERNATES), TOOLS).check("here")
    dropped = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
    )
    with pytest.raises(ConfigError, match="leaves messages of tools out"):
        TurnTemplate(tokenizer_of(dropped), TOOLS).check("here")
    TurnTemplate(tokenizer_of(CHATML), TOOLS).check("here")


class Fixed:
    """An environment that asks the same of every row."""

    def __init__(self, tools: Any = ()) -> None:
        self.tools = tuple(tools)
        self.config = EnvironmentConfig(path="mine.py:TOOLS")
        self.tasks: list[EpisodeTask] = []

    def __call__(self, tasks: Any) -> list[Any]:
        self.tasks += tasks
        game = ({"role": "system", "content": "A game."}, {"role": "user", "content": "Go"})
        return [game] * len(tasks)


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_what_the_environment_says_first(load: Any, jsonl: Any, chat: bool) -> None:
    """Rows are told apart though their prompts are one; the program gets the row's messages."""
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in [*range(30), *range(30)]]
    source = SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows))
    opening = Fixed(TOOLS)
    data = load(source, tokenizer=tokenizer_of(CHATML), chat=chat, opening=opening)
    assert len(data.train) + len(data.eval) == 30
    assert not {i.identity for i in data.train} & {i.identity for i in data.eval}
    item = data.train[0]
    told = f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>system\nA game."
    asked = "<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    assert item.prompt == (told + asked if chat else "A game.Go")
    assert item.task is not None
    assert item.task.question == item.item["question"]
    assert len({task.seed for task in opening.tasks}) == 30


def test_tools_that_no_template_takes_are_the_environments(load: Any, jsonl: Any) -> None:
    name = jsonl([{"prompt": f"{n}?", "answer": str(n)} for n in range(30)])
    message = (
        r"data\.chat_template with one .* no tools: environment\.path=mine\.py:TOOLS has some$"
    )
    with pytest.raises(ConfigError, match=message):
        load(
            SourceConfig(kind=SourceKind.jsonl, name=name),
            tokenizer=tokenizer_of(OPENERS),
            chat=True,
            opening=Fixed(TOOLS),
        )
