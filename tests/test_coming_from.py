"""The page for users of TRL, verl and OpenRLHF: what it says of them, and of hybridrl, is so."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridrl.config import ConfigError, RewardConfig, RewardKind
from hybridrl.config.compose import check, register, resolve_arguments
from hybridrl.rewards.functions import user_function
from hybridrl.rewards.results import RewardInput

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/coming_from.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| `(.+?)`.* \|$", PAGE, re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
FUNCTIONS = re.findall(r"^\| ([\w, ]+) \| `(def .+?)` \| (.+?) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("what", [what for what, *_ in ROWS])
def test_settings_compose_and_have_the_values(what: str) -> None:
    register()
    (line,) = (ours for each, *_, ours in ROWS if each == what)
    overrides = resolve_arguments(shlex.split(line))
    config: Any = check(overrides)
    for override in overrides:
        key, _, text = override.lstrip("+").partition("=")
        value = yaml.safe_load(text)
        if "." not in key or not isinstance(value, bool | int | float):
            continue
        held = config.recipe if key.startswith("recipe.") else config
        for name in key.removeprefix("recipe.").split("."):
            held = held[name] if isinstance(held, dict) else getattr(held, name)
        assert held == value, override


def named(column: int, pattern: str) -> Iterator[str]:
    """The names in a column of the tables that a pattern matches as a whole."""
    for row in ROWS:
        yield from (name for name in CODE.findall(row[column]) if re.fullmatch(pattern, name))


def test_verls_settings_are_those_of_the_installed_verl() -> None:
    verl = pytest.importorskip("verl", reason="verl is not installed")
    file = Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml"
    known = yaml.safe_load(file.read_text())
    names = [*named(2, r"[a-z_]+(\.\w+)+")]
    assert len(names) > 30
    for name in names:
        if name.startswith("verl."):
            assert (Path(verl.__file__).parent / name.split(".")[1]).is_dir()
            continue
        node = known
        for key in name.split("."):
            assert key in node, name
            node = node[key]


@pytest.mark.contracts
def test_trls_settings_are_those_of_its_configs() -> None:
    """The arguments of transformers, which TRL's configs extend, count as well."""
    from transformers import TrainingArguments

    (root,) = (ROOT / ".cache/foreign").glob("trl-*/trl/trainer")
    known = set(TrainingArguments.__dataclass_fields__)
    for file in ("grpo_config", "dpo_config", "base_config"):
        for node in ast.walk(ast.parse((root / f"{file}.py").read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                known.add(node.target.id)
    trainer = ast.parse((root / "grpo_trainer.py").read_text())
    known |= {node.arg for node in ast.walk(trainer) if isinstance(node, ast.arg)}
    names = [*named(1, r"[a-z_]+")]
    others = {"prompt", "load_dataset", "resume_from_checkpoint"}  # a column, functions
    assert len(names) > 25
    assert set(names) - known - others == set()


SCORES = {
    "TRL": [1.0, 1.0],
    "TRL, with a column": [1.0, 0.0],
    "verl": [1.0, 0.0],
    "verl, a dict": [1.0, 1.0],
    "verl, a batch": [1.0, 1.0],
}


def loaded(source: str, folder: Path) -> Any:
    """The function of a row, as a reward function of a run."""
    (folder / "mine.py").write_text(source)
    name = re.match(r"def (\w+)", source)[1]  # type: ignore[index]
    path = f"{folder / 'mine.py'}:{name}"
    return user_function(RewardConfig(kind=RewardKind.function, function=path))


@pytest.mark.parametrize("origin", [origin for origin, *_ in FUNCTIONS])
def test_functions_are_called_as_the_page_says(origin: str, tmp_path: Path) -> None:
    ((source, said),) = ((s, said) for name, s, said in FUNCTIONS if name == origin)
    if said != "as it is":
        assert said.startswith("refused")
        with pytest.raises(ConfigError, match=r"reward\.function"):
            loaded(source, tmp_path)
        (ours,) = (f for f in CODE.findall(said) if f.startswith("def"))
        assert loaded(ours, tmp_path)
        return
    function = loaded(source, tmp_path)
    row = {"prompt": "2+2=", "answer": "4", "data_source": "sums"}
    items = [RewardInput("2+2=", response, "4", row) for response in ("4", "5")]
    batches = [items] if function.signature.is_of_several else [[item] for item in items]
    values: list[Any] = []
    for batch in batches:
        texts = [item.response for item in batch]
        returned = function.function(**function.arguments(batch, texts))
        values += function.values(returned, len(batch))
    assert [float(value) for value in values] == SCORES[origin]
