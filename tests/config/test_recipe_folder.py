"""A recipe is copied, found by its path, and is the same algorithm."""

import importlib.resources
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from hybridrl.config import ConfigError
from hybridrl.config.compose import check, register, resolve_arguments
from hybridrl.config.recipe_folder import new_recipe
from hybridrl.preflight.prepare import build_recipe

RECIPES = sorted(
    folder.name
    for folder in importlib.resources.files("hybridrl.recipes").iterdir()
    if (folder / "config.yaml").is_file()
)


@pytest.fixture(autouse=True)
def _known_recipes() -> Iterator[None]:
    """What a command line makes known ends with its process; here, with the test."""
    register()
    group = ConfigStore.instance().repo["recipe"]
    known = set(group)
    yield
    for name in set(group) - known:
        del group[name]


def _stages(arguments):
    graph = build_recipe(check(resolve_arguments(arguments)).recipe)
    return [
        (stage.name, type(stage), stage.upstream, stage.role, stage.method, stage.outputs)
        for stage in graph.stages.values()
    ]


COPIED = ("dapo", "distill", "ppo")  # all are copied by the same lines; these use most of them


@pytest.mark.parametrize(
    "source",
    [r if r in COPIED else pytest.param(r, marks=pytest.mark.slow) for r in RECIPES],
)
def test_a_copy_is_the_same_recipe(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_recipe("mine", source, tmp_path)
    assert {file.name for file in folder.iterdir()} == {"__init__.py", "config.yaml", "README.md"}
    assert _stages(["recipe=./mine"]) == _stages([f"recipe={source}"])
    assert f"def {source}(" not in (folder / "__init__.py").read_text()


def test_a_copy_is_changed_where_it_lies(tmp_path: Path) -> None:
    folder = new_recipe("other", "grpo", tmp_path)
    code = (folder / "__init__.py").read_text()
    (folder / "__init__.py").write_text(code.replace("flow.reward.score(samples)", "samples"))
    with pytest.raises((ConfigError, ValueError), match="reward"):
        _stages([f"recipe={folder}"])


def test_wrong_input(tmp_path: Path) -> None:
    for name, source, words in (
        ("Mine", "grpo", "NAME=Mine"),
        ("mine", "grop", r"--from=grop: .*did you mean grpo"),
        (".", "grpo", "NAME="),
        ("class", "rm", r"^NAME=class: wanted .*; no keyword of Python$"),
        ("2nd", "rm", "NAME=2nd"),
    ):
        with pytest.raises(ConfigError, match=words):
            new_recipe(name, source, tmp_path)
    assert not list(tmp_path.iterdir())
    new_recipe("mine", "grpo", tmp_path)
    with pytest.raises(ConfigError, match="not there yet"):
        new_recipe("mine", "grpo", tmp_path)
    (tmp_path / "mine" / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"a folder with config\.yaml"):
        resolve_arguments([f"recipe={tmp_path}/mine"])


IMPORTS = """
import json, sys
from hybridrl.config import ConfigError
from hybridrl.config.compose import check, register

register()
for wrong in ("trainer.stepz=1", "recipe=grop"):
    try:
        check([wrong])
    except ConfigError:
        continue
    raise SystemExit(f"{wrong} was not refused")
before = set(sys.modules)
check(["recipe=sft"])
names = [sorted(name for name in modules if name.startswith("hybridrl.recipes."))
         for modules in (before, set(sys.modules))]
print(json.dumps([*names, "torch" in before]))
"""


@pytest.mark.long
def test_a_recipe_is_imported_when_it_is_chosen() -> None:
    """Nor is torch, which it imports, for a key or a recipe that does not exist."""
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS], check=True, capture_output=True, text=True
    )
    assert json.loads(ended.stdout) == [[], ["hybridrl.recipes.sft"], False]


def test_a_mapping_is_no_path() -> None:
    arguments = ["recipe={target: '/somewhere/mine.py:mine'}"]
    assert resolve_arguments(arguments) == arguments


@pytest.mark.parametrize(
    ("yaml", "allowed"),
    [
        ("", "no key but target: this recipe's yaml lists no settings"),
        ("size: 8\n", "a known key: one of size"),
    ],
)
@pytest.mark.parametrize("way", ["path", "config dir"])
def test_a_wrong_key_of_a_recipe_without_a_dataclass(
    yaml: str, allowed: str, way: str, tmp_path: Path
) -> None:
    """The line says what the recipe's yaml has, wherever the yaml is."""
    file = tmp_path / ("config.yaml" if way == "path" else "recipe/mine.yaml")
    file.parent.mkdir(exist_ok=True)
    code = tmp_path / "mine.py"
    code.write_text("def mine(flow, cfg):\n    pass\n")
    file.write_text(f"target: {code}:mine\n{yaml}")
    config_dir = str(tmp_path) if way == "config dir" else None
    recipe = "mine" if config_dir else str(tmp_path)
    with pytest.raises(ConfigError) as raised:
        check(resolve_arguments([f"recipe={recipe}", "recipe.group=3"]), config_dir)
    assert str(raised.value) == f"recipe.group=3: wanted {allowed}"


def test_a_copy_has_the_settings_that_its_yaml_leaves_out(tmp_path: Path) -> None:
    folder = new_recipe("other", "grpo", tmp_path)
    (folder / "config.yaml").write_text("target: :other\ngroup_size: 3\n")
    recipe = check(resolve_arguments([f"recipe={folder}", "recipe.clip_low=0.1"])).recipe
    settings = check(["recipe=grpo"]).recipe
    own = {"target": f"{folder}/__init__.py:other", "group_size": 3, "clip_low": 0.1}
    assert recipe == settings | own
    with pytest.raises(ConfigError, match=r"recipe\.clip=1: wanted a known key: one of baseline,"):
        check(resolve_arguments([f"recipe={folder}", "recipe.clip=1"]))
