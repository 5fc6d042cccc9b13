"""The table of docs/async.md: each recipe runs where others generate, or is refused in a line."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import Config, ConfigError
from hybridrl.preflight.prepare import prepare
from hybridrl.telemetry.records import read_lines

ROOT = Path(__file__).parents[2]
RECIPES = {path.parent.name for path in ROOT.glob("recipes/*/config.yaml")}
STALENESS = {"periodic": 0, "one_step": 1}
NEEDS = {
    "gigpo": [
        "environment=function",
        f"environment.path={ROOT / 'tests' / 'talking.py'}:talk",
        "+environment.params.fails=0",
        "environment.max_turn_tokens=3",
        "reward=environment",
        "rollout.max_new_tokens=16",
    ],
    "safe_rlhf": ["cost=regex", "cost.pattern='(?s)[a-m].*'", "cost.extract=null"],
}
"""What a recipe needs besides its defaults."""


def outcomes() -> dict[tuple[str, str], str]:
    """The cell of each recipe and schedule."""
    section = (ROOT / "docs" / "async.md").read_text().partition("## Recipes")[2].partition("##")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {
        (recipe, schedule): cell.strip()
        for names, *cells in rows
        for recipe in re.findall("`(.*?)`", names)
        for schedule, cell in zip(STALENESS, cells, strict=True)
    }


OUTCOMES = outcomes()
RUN = sorted(case for case, cell in OUTCOMES.items() if cell == "runs")
REFUSED = sorted(OUTCOMES.keys() - {*RUN})


def settings_of(tiny_run: list[str], recipe: str, schedule: str) -> list[str]:
    return [
        *(setting for setting in tiny_run if not setting.startswith("recipe")),
        f"recipe={recipe}", *NEEDS.get(recipe, []), f"schedule={schedule}", "cluster.ranks=2",
        "cluster.pools.rollout=1", "trainer.steps=2", "eval.sets.main.every=null",
    ]  # fmt: skip


def test_the_table_has_every_recipe() -> None:
    assert {recipe for recipe, _ in OUTCOMES} == RECIPES
    assert len(RUN) + len(REFUSED) == 2 * len(RECIPES)
    assert all(cell == "runs" or cell.startswith("refused: ") for cell in OUTCOMES.values())


@pytest.mark.parametrize(("recipe", "schedule"), REFUSED)
def test_a_recipe_is_refused_for_the_reason_of_the_table(
    make_config: Callable[..., Config],
    tiny_run: list[str],
    tmp_path: Path,
    recipe: str,
    schedule: str,
) -> None:
    reason = OUTCOMES[recipe, schedule].partition(": ")[2]
    config = make_config(*settings_of(tiny_run, recipe, schedule), f"run.dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=f"^[a-z_.]+=.*: wanted .*{reason}") as caught:
        prepare(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "schedule"),
    [
        pytest.param(
            *case, marks=[] if case == ("self_distill", "one_step") else pytest.mark.layouts
        )
        for case in RUN
    ],
)
def test_a_recipe_runs(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    recipe: str,
    schedule: str,
) -> None:
    """Two steps, of which the second trains on tokens that are as stale as the schedule says."""
    run = train_here(tmp_path / "run", *settings_of(tiny_run, recipe, schedule))
    lines = [line for line in read_lines(run.dir / "metrics.jsonl") if "loss" in line]
    assert [line["samples/staleness"] for line in lines] == [0, STALENESS[schedule]]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] >= 0 for line in lines)
    pushed = [x["version"] for x in read_lines(run.dir / "events.jsonl") if x["kind"] == "push"]
    assert len({*pushed}) == 3
    assert run.stored == [0] * len(run.stored)
