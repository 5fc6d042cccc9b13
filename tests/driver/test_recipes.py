"""Every recipe as it is: a few steps on one rank, by its defaults."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.parent.name for path in ROOT.glob("recipes/*/config.yaml"))

FAST = {"sft", "rm", "dpo", "grpo", "ppo", "distill"}
"""One of each kind of recipe; the others differ in a loss or an advantage, which have own tests."""

TRAINED = {"rm": "reward/"}
"""Prefix of metrics and folder of what a recipe trains, where that is not the actor."""

TURNS = [
    "environment=function",
    f"environment.path={ROOT / 'tests' / 'talking.py'}:talk",
    "+environment.params.fails=0",
    "environment.max_turn_tokens=3",
    "reward=environment",
    "rollout.max_new_tokens=16",
]
NEEDS = {"gigpo": TURNS}
"""What a recipe needs besides its defaults: conversations, whose turns earn something."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.each] + [pytest.mark.layouts] * (name not in FAST))
        for name in [*RECIPES, "rloo recipe.kl_coef=0.05"]
    ],
)
def test_a_recipe_runs_by_its_defaults(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path, name: str
) -> None:
    """Whatever it trains has moved; but a teacher is by default the start itself."""
    trained, learns = TRAINED.get(name, ""), name not in ("distill", "distill_topk")
    settings = [setting for setting in tiny_run if not setting.startswith("recipe")]
    run = train_here(
        tmp_path / "run",
        *settings,
        *f"recipe={name}".split(),
        *NEEDS.get(name, []),
        "cluster.ranks=1",
        "trainer.steps=2",
        "eval.sets.main.every=null",
    )
    lines = [line for line in read_lines(run.dir / "metrics.jsonl") if f"{trained}loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert math.isfinite(line[f"{trained}loss"])
        assert 0 <= line[f"{trained}grad_norm"] < math.inf
        rounding = 1e-4 if name == "distill_topk" else 0  # measured: 9e-6, of two engines
        assert (line[f"{trained}grad_norm"] > rounding) == learns
    start = load_file(run.dir / "start" / "model.safetensors")
    final = load_file(run.dir / "final" / trained / "model.safetensors")
    moved = [name for name in start if name in final and not torch.equal(start[name], final[name])]
    if name != "distill_topk":  # Adam makes steps of rounding, too
        assert moved == ([name for name in start if name in final] if learns else [])
    assert run.stored == [0] * len(run.stored)


@pytest.mark.layouts
def test_gdpo_normalizes_each_reward(
    train_here: Callable[..., Any], tiny_run: list[str], user_rewards: Path, tmp_path: Path
) -> None:
    """The parts of `reward.parts`, by their weights; one of weight 0 is recorded only."""
    function = f"kind: function, function: '{user_rewards}:score'"
    parts = {
        "code": f"{{{function}}}",
        "form": "{kind: regex, pattern: '[a-m].*', weight: -0.5}",
        "exact": "{kind: exact, weight: 0}",
    }
    listed = ", ".join(f"{name}: {judge}" for name, judge in parts.items())
    kept = [setting for setting in tiny_run if not setting.startswith(("reward", "recipe"))]
    run = train_here(
        tmp_path / "run",
        *kept,
        "recipe=gdpo",
        "recipe.group_size=4",
        "reward=sum",
        f"+reward.parts={{{listed}}}",
        "cluster.ranks=1",
        "trainer.steps=1",
        "eval.sets.main.every=null",
    )
    lines = [x for x in read_lines(run.dir / "samples.jsonl") if x["phase"] == "rl"]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["id"].split(".")[0]].append(line)
    assert {len(group) for group in groups.values()} == {4}
    sums = []
    for group in groups.values():
        columns = [standardized([line[f"reward_{name}"] for line in group]) for name in parts]
        sums += [a - 0.5 * b for a, b, _ in zip(*columns, strict=True)]
    advantages = [line["advantage"] for group in groups.values() for line in group]
    assert advantages == pytest.approx(standardized(sums), rel=1e-4, abs=1e-5)
    assert len(set(advantages)) > 4
    assert {line["reward_exact"] for line in lines} == {0}


@pytest.mark.layouts
def test_kto_has_responses_to_other_prompts(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """Each prompt with those of the next one of the batch, the last with those of the first."""
    kept = [setting for setting in tiny_run if not setting.startswith("recipe")]
    settings = ["recipe=kto", "cluster.ranks=2", "trainer.steps=2", "eval.sets.main.every=null"]
    run = train_here(tmp_path / "run", *kept, *settings)
    lines = [x for x in read_lines(run.dir / "samples.jsonl") if x["phase"] == "rl"]
    for step in (1, 2):
        by_id = {line["id"]: line for line in lines if line["step"] == step}
        prompts = sorted({int(id.split(".")[0]) for id in by_id})
        assert len(prompts) > 2
        for prompt, other in zip(prompts, [*prompts[1:], prompts[0]], strict=True):
            for side in ("chosen", "rejected"):
                own, next_own = (by_id[f"{x}.{side}.0"] for x in (prompt, other))
                theirs = by_id[f"{prompt}.other_{side}.0"]
                assert theirs["prompt"] == own["prompt"] != next_own["prompt"]
                assert next_own["response"].startswith(theirs["response"])
    first, second = (line for line in run.metrics if "kl" in line)
    assert first["kl"] == 0
    assert second["kl"] >= 0


@pytest.mark.layouts
def test_kto_trains_on_rows_of_one_response(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """TRL's unpaired preferences: the row's label is its reward."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"a{n:02}", "completion": "bc"[n % 2] * 3, "label": n % 2 == 0}
            for n in range(40)]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [setting for setting in tiny_run if not setting.startswith(("recipe", "data"))]
    settings = [
        "recipe=kto", "recipe.unpaired=true", "data=jsonl", f"data.sources.main.name={file}",
        "data.sources.main.answer_column=completion", "data.eval_size=4", "reward=function",
        "reward.function=hybridrl.rewards.labels:label", "cluster.ranks=2", "trainer.steps=1",
        "eval.sets.main.every=null", "model.tiny.alphabet='abc0123456789'",
    ]  # fmt: skip
    run = train_here(tmp_path / "run", *kept, *settings)
    lines = [x for x in read_lines(run.dir / "samples.jsonl") if x["phase"] == "rl"]
    own = [line for line in lines if "other_answer" not in line["id"]]
    assert len(own) > 2
    for line in own:
        assert line["reward"] == (1.0 if line["response"].startswith("b") else -1.0)
    assert {line["reward"] for line in own} == {1.0, -1.0}
    (step,) = (line for line in run.metrics if "kl" in line)
    assert step["loss"] == pytest.approx(0.5)  # the policy is the reference: 1 - sigmoid(0)


def standardized(values: list[float]) -> list[float]:
    """Mean 0 and deviation 1; zeros where all are equal."""
    deviation = stdev(values) or 1.0
    return [(value - fmean(values)) / deviation for value in values]
