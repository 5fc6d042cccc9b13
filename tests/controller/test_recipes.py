"""Every recipe as it is: a few steps on one rank, by its defaults."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.telemetry.records import read_lines

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/config.yaml"))

TRAINED = {"rm": "reward/"}
"""Prefix of metrics and folder of what a recipe trains, where that is not the actor."""


@pytest.mark.parametrize("name", [*RECIPES, "rloo recipe.kl_coef=0.05"])
def test_a_recipe_runs_by_its_defaults(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path, name: str
) -> None:
    """Whatever it trains has moved; but distill's teacher is by default the start itself."""
    trained, learns = TRAINED.get(name, ""), name != "distill"
    settings = [setting for setting in tiny_run if not setting.startswith("recipe")]
    run = train_here(
        tmp_path / "run",
        *settings,
        *f"recipe={name}".split(),
        "cluster.ranks=1",
        "trainer.steps=2",
        "eval.sets.main.every=null",
    )
    lines = [line for line in read_lines(run.dir / "metrics.jsonl") if f"{trained}loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert math.isfinite(line[f"{trained}loss"])
        assert 0 <= line[f"{trained}grad_norm"] < math.inf
        assert (line[f"{trained}grad_norm"] > 0) == learns
    start = load_file(run.dir / "start" / "model.safetensors")
    final = load_file(run.dir / "final" / trained / "model.safetensors")
    moved = [name for name in start if name in final and not torch.equal(start[name], final[name])]
    assert moved == ([name for name in start if name in final] if learns else [])
    assert run.stored == [0] * len(run.stored)
