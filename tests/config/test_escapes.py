"""Line breaks in texts on a command line."""

import pytest

from hybridrl.config import compose

BASE = ["experiment=spell_tiny"]
compose.register()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (r'rollout.stop=["\n\n","END"]', ["\n\n", "END"]),
        (r"rollout.stop=['\t', 'a\\nb']", ["\t", r"a\nb"]),
        (r"eval.sets.main.prompt_template='{question}\n'", "{question}\n"),
        (r"data.prompt_template='Q: {question}\nA:'", "Q: {question}\nA:"),
        (r'data.answer_template=" {answer}\\n"', " {answer}\\n"),
        (r"data.system_prompt=Be brief.\nAnd it's right.", "Be brief.\nAnd it's right."),
        ("data.system_prompt='two\nlines'", "two\nlines"),
        (r"reward.extract='#(\d+)\n'", r"#(\d+)\n"),  # an expression has escapes of its own
        (r"data.keep='\\nabla'", r"\\nabla"),
    ],
)
def test_escapes_mean_what_they_do_in_yaml(argument: str, value: object) -> None:
    config = compose.check(compose.resolve_arguments([*BASE, argument]))
    for name in argument.partition("=")[0].split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    assert config == value


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (r"""eval.sets.main={prompt_template: "{question}\n", k: [1]}""", "{question}\n"),
        (r"""+eval.sets={main: {prompt_template: '{question}\\n\n'}}""", "{question}\\n\n"),
    ],
)
def test_escapes_in_a_mapping(argument: str, value: str) -> None:
    config = compose.check(compose.resolve_arguments([*BASE, argument]))
    assert config.eval.sets["main"].prompt_template == value


def test_texts_in_lists_of_a_mapping() -> None:
    (argument,) = compose.resolve_arguments([r"rollout={stop: ['\n', '\\n'], vllm: {a: '\n'}}"])
    assert argument == "rollout={stop: ['\n', '\\n'], vllm: {a: '\\n'}}"


@pytest.mark.parametrize("text", ["\udce9 {question}", "\ud83d"])
@pytest.mark.parametrize("key", ["data.prompt_template", "data.chat_template", "rollout.stop"])
def test_half_a_character_is_named(key: str, text: str) -> None:
    """A terminal that is not UTF-8 gives such texts; no tokenizer takes them."""
    value = f"['{text}']" if key.endswith("stop") else f"'{text}'"
    with pytest.raises(compose.ConfigError, match="wanted text in Unicode") as caught:
        compose.check(compose.resolve_arguments([*BASE, f"{key}={value}"]))
    assert caught.value.key == key
    assert str(caught.value).isascii()


@pytest.mark.parametrize(
    "command", [r"\text", r"\right", r"\nabla", r"\theta", r"\to", r"\tan", r"\newline", r"\nu"]
)
def test_a_command_of_latex_is_no_escape(command: str) -> None:
    """A tab before `ext` would stand in every prompt."""
    key = "data.prompt_template"
    with pytest.raises(compose.ConfigError) as caught:
        compose.resolve_arguments([f"{key}='{{question}} in {command}{{x}} and \\boxed'"])
    told = rf"{key}={command}: wanted \{command} for the command, since {command[:2]} is an escape"
    assert str(caught.value) == told
    (argument,) = compose.resolve_arguments([f"{key}='{{question}} in \\{command}'"])
    assert argument == f"{key}='{{question}} in {command}'"


def test_a_refused_text_stays_one_line() -> None:
    with pytest.raises(compose.ConfigError) as caught:
        compose.check(compose.resolve_arguments([*BASE, r"eval.sets.main.stop=['\n']"]))
    assert str(caught.value).startswith(r"eval.sets.main.stop=['\n']: wanted a known key")
