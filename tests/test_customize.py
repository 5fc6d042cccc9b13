"""docs/customize.md: each line's key is there, its example composes and changes it, hooks run."""

import asyncio
import functools
import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

from hybridrl.algorithms import KL_ESTIMATORS, NORMALIZATIONS, resolve
from hybridrl.config import Config, JailKind, JailLimits, RewardKind
from hybridrl.config.compose import check, parse_arguments, register, resolve_arguments
from hybridrl.config.dotted import load_function
from hybridrl.config.recipe_folder import new_recipe
from hybridrl.data.sources import records
from hybridrl.environments import EpisodeTask, ModelTurn
from hybridrl.environments.load import load_environment
from hybridrl.environments.program import Model
from hybridrl.flow import Graph
from hybridrl.flow.graph import ByGroupStage, FilterStage, UpdateStage
from hybridrl.preflight.prepare import build_recipe
from hybridrl.rewards import jail, validate_reward

PAGE = (Path(__file__).parents[1] / "docs/customize.md").read_text()
FILE = re.compile(r"<!-- file: (.*?) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^- ([^(`,]+?)(?:,[^(]*)? \(`([\w.]+)`\): .*; `([^`]+)`$", re.MULTILINE)
ROWS = ROW.findall(PAGE)


@pytest.fixture(autouse=True, scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A working directory with the page's files, and a recipe folder."""
    folder = tmp_path_factory.mktemp("customize")
    for name, text in FILE.findall(PAGE):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    new_recipe("forked", "dapo", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield
    composed.cache_clear()


@functools.cache
def composed(example: str) -> Config:
    register()
    options = parse_arguments(resolve_arguments(shlex.split(example)))
    return check(options.overrides, options.config_dir)


def value(config: Any, key: str) -> Any:
    """The value at a dotted key of dataclasses and dicts; None where a dict has none."""
    for name in key.split("."):
        if config is None:
            return None
        config = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return config


def test_every_line_of_the_list_is_read() -> None:
    hooks = PAGE[PAGE.index("Each hook") : PAGE.index("Any config group")]
    assert len(ROWS) == hooks.count("\n- ") > 40


@pytest.mark.parametrize(("hook", "key", "example"), ROWS, ids=[row[0] for row in ROWS])
def test_an_example_composes_and_sets_its_key(hook: str, key: str, example: str) -> None:
    config = composed(example)
    assert value(config, key) != value(composed(""), key), hook
    if "plugins.py" in example or "recipe" in key:
        build_recipe(config.recipe)
    if config.reward.kind is RewardKind.function:
        validate_reward(config.reward, config.data.sources, "reward")


def plugged() -> tuple[Graph, ModuleType]:
    graph = build_recipe(composed("--config-dir my recipe=plugged").recipe)
    return graph, sys.modules["hybridrl_user_plugins"]


def test_the_functions_of_the_recipe_run() -> None:
    graph, module = plugged()
    stages: dict[type, Any] = {type(stage): stage for stage in graph.stages.values()}
    advantages = stages[ByGroupStage].function([1.0, 0.0, 0.0, 0.5])
    assert advantages == [0.5, -0.5, -0.5, 0.0]
    assert module.surprise(torch.tensor([-1.0, -2.0])) == 3.0
    assert not stages[FilterStage].function([1.0, 1.0])
    fields = {"advantages": torch.tensor([1.0, -1.0])}
    loss, metrics = stages[UpdateStage].loss(torch.tensor([-2.0, -1.0]), None, fields)
    assert loss.tolist() == [2.0, -1.0]
    assert metrics["positive_share"].tolist() == [1.0, 0.0]


def test_kl_and_weights_are_found_by_their_names() -> None:
    kl = resolve(KL_ESTIMATORS, "recipe.kl", "my/plugins.py:absolute")
    assert kl(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist() == [2.0]
    weights = resolve(NORMALIZATIONS, "recipe.normalize", "my/plugins.py:by_root")
    assert weights(torch.tensor([4, 1]), 5, 2, 24).tolist() == [0.25, 0.5]


def test_the_environments_run() -> None:
    def schemas(hook: str) -> list[str]:
        (example,) = (row[2] for row in ROWS if row[0] == hook)
        environment = load_environment(composed(example).environment)
        return [tool["function"]["name"] for tool in environment.tools]

    assert schemas("environment") == []
    assert schemas("tools") == ["double"]

    async def episode() -> float | None:
        guess = load_function("environment.path", "my/plugins.py:guess")
        digits = iter("123456789")

        async def ask(messages: Any) -> ModelTurn:
            return ModelTurn(next(digits))

        task = EpisodeTask(({"role": "user", "content": "Guess."},))
        value: float | None = await guess(task, Model(ask, 9, serve), Random(0))
        return value

    async def serve(model: Model) -> tuple[str, str]:
        raise AssertionError("it asks for no endpoint")

    assert asyncio.run(episode()) == 1 / Random(0).randint(1, 9)


def test_the_reward_and_the_generator_run() -> None:
    score = load_function("reward.function", "my/plugins.py:score")
    assert score(prompt="1+1=", response="2", answer="2", item={}) == 1.0
    places = load_function("reward.function", "my/plugins.py:places")
    assert places(prompts=[], responses=["aa", "b", "ccc"], answers=[], items=[]) == [0.5, 1, 0]
    prints = load_function("reward.function", "my/plugins.py:prints")
    jail.configure(JailKind.off, JailLimits())
    assert prints(prompt="", response="print(int(input()) + 1)", answer="2", item={"input": "1"})
    jail.configure(JailKind.auto, JailLimits())
    (example,) = (row[2] for row in ROWS if row[0] == "data generator")
    source = composed(example).data.sources["main"]
    loaded = list(itertools.islice(records("data.sources.main", source, 0, 8), 8))
    assert all({"question", "answer"} <= record.row.keys() for record in loaded)
    assert len(loaded) == 8
