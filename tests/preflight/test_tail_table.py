"""The table of docs/schedules.md says of each mechanism of the tail what the code says."""

import copy
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from omegaconf import OmegaConf

from hybridrl.config import Config, ConfigError
from hybridrl.flow.judgements import with_parts
from hybridrl.models.load import load_config
from hybridrl.models.tiny import make_tiny_model
from hybridrl.preflight.prepare import build_recipe
from hybridrl.preflight.schedule_choice import TailMechanism, obstacles_of_tail

ROOT = Path(__file__).parents[2]
BASE = ["schedule=fused", "cluster.ranks=4", "trainer.layout.replicas=4", "run.dir=x"]
OF_SETTINGS = ["recipe=grpo", "recipe.kl_coef=0.05"]
OF_RECIPES = "recipe="
MECHANISMS = {
    "dispatch by length": TailMechanism.dispatch,
    "forward passes": TailMechanism.passes,
    "migration": TailMechanism.migration,
    "schedule.migration=kv": TailMechanism.migration,
    "schedule.early_backward=auto": TailMechanism.early,
    "rollout.tail_tp=auto": TailMechanism.wide,
    "rollout.speculate=auto": TailMechanism.guesses,
}
"""By the heading of a column, which is the setting that turns a mechanism on, if there is one."""


class Row(NamedTuple):
    """Settings, or the recipes of a row, the verdict in each column, and the reasons."""

    settings: str
    recipes: list[str]
    verdicts: dict[str, str]
    why: list[str]


def rows() -> list[Row]:
    _, _, rest = (ROOT / "docs" / "schedules.md").read_text().partition("### What acts where")
    lines = [line for line in rest.partition("\n###")[0].splitlines() if line.startswith("| ")]
    header, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    columns = [name.strip("`") for name in header[1:-1]]
    assert columns == list(MECHANISMS)
    read = []
    for first, *verdicts, why in body:
        _, settings, recipes = first.split("`")
        by_column = dict(zip(columns, verdicts, strict=True))
        listed = recipes.strip().split(", ") if settings == OF_RECIPES else []
        read.append(Row(settings, listed, by_column, why.split("; ") if why else []))
    return read


ROWS = rows()


def settings_of(recipe: str) -> dict[str, Any]:
    """What `recipe=NAME` sets in `recipe`, sooner than by composing all settings."""
    own = OmegaConf.load(ROOT / "recipes" / recipe / "config.yaml")
    read = {"run": {"seed": 0}, "reward": {"parts": {}}, "rollout": {"max_new_tokens": 24}}
    settings = OmegaConf.to_container(OmegaConf.create({**read, "recipe": own}), resolve=True)
    return {key: value for key, value in settings["recipe"].items() if key != "defaults"}


def turned_on(config: Config, setting: str) -> Config:
    """The config with a setting of a column; raises ConfigError where it is refused."""
    config = copy.deepcopy(config)
    name, _, value = setting.partition("=")
    group, _, key = name.partition(".")
    before = getattr(getattr(config, group), key)
    kind = type(before) if isinstance(before, Enum) else str
    setattr(getattr(config, group), key, kind(value))
    config.rollout.check()
    config.check_schedule()
    return config


def said_of(config: Config, column: str, model: Path) -> tuple[str, str]:
    """What the code says of a column, and why."""
    try:
        config = turned_on(config, column) if "=" in column else config
    except ConfigError as error:
        return "refused", str(error)
    graph = with_parts(build_recipe(config.recipe), config)
    reason = obstacles_of_tail(config, graph, load_config(str(model)))[MECHANISMS[column]]
    return ("acts", "") if reason is None else ("falls back", reason)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.settings + ",".join(row.recipes))
def test_a_row_is_what_the_code_says(
    make_config: Callable[..., Config], tmp_path: Path, row: Row
) -> None:
    config = make_config(*BASE, *([] if row.recipes else [*OF_SETTINGS, *row.settings.split()]))
    make_tiny_model(tmp_path, config.model.tiny, seed=0)
    reasons = set()
    for recipe in row.recipes or [None]:
        if recipe is not None:
            config.recipe = settings_of(recipe)
        for column, wanted in row.verdicts.items():
            said, reason = said_of(config, column, tmp_path)
            assert (recipe, column, said) == (recipe, column, wanted), reason
            reasons.add(reason)
    for reason in reasons - {""}:
        assert any(words in reason for words in row.why), reason
    for words in row.why:
        assert any(words in reason for reason in reasons), words


def test_every_recipe_is_in_one_row() -> None:
    recipes = [path.parent.name for path in ROOT.glob("recipes/*/config.yaml")]
    assert sorted(recipe for row in ROWS for recipe in row.recipes) == sorted(recipes)
