"""Prompts that are always solved, or never, in whole runs: the same under every schedule."""

import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridrl.config import ConfigError
from hybridrl.config.compose import register
from hybridrl.config.stored_run import composed_run
from hybridrl.preflight.prepare import prepare
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.sample_files import files_by_step, read

REWARD = """
def score(prompt, response, answer, item):
    length = len(prompt)
    if length % 3 == 2:
        return sum(map(ord, response)) % 2
    return float(length % 3 == 0)
"""
SETTINGS = [
    "reward=function", "reward.extract=null", "data.size=24", "data.eval_size=2",
    "data.curriculum.easy_rest=2", "data.curriculum.hard_rest=1", "recipe=dapo",
    "recipe.group_size=2", "recipe.max_rounds=3", "trainer.steps=8",
    "eval.sets.main.every=null", "eval.sets.main.num_prompts=2", "trainer.save_every=4",
    "deterministic=strict",
    "+data.sources={letters:{name:spell_backward,params:{max_word_len:5}}}",
]  # fmt: skip
POOLS = ("easy", "normal", "hard", "unseen", "resting")


@pytest.fixture(scope="module")
def settings(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Dynamic sampling over two sources; the length of a word says whether it is solved."""
    file = tmp_path_factory.mktemp("reward") / "by_length.py"
    file.write_text(REWARD)
    changed = ("reward", "recipe", "data.size", "data.eval_size")
    kept = [setting for setting in tiny_run if not setting.startswith(changed)]
    return [*kept, *SETTINGS, f"reward.function={file}:score"]


def prompts(run: Any) -> dict[int, list[str]]:
    """The prompts of each step, once a sample."""
    by_step: dict[int, list[str]] = defaultdict(list)
    for sample in read_lines(run.dir / "samples.jsonl"):
        if sample["phase"] == "rl":
            by_step[sample["step"]].append(sample["prompt"])
    return by_step


@pytest.mark.wide
@pytest.mark.layouts
def test_pools_become_what_the_reward_makes_of_them(
    train_here: Callable[..., Any], settings: list[str], tmp_path: Path
) -> None:
    """Under `serial` and `fused` alike; a resumed run goes on with them."""
    serial = train_here(tmp_path / "serial", *settings)
    fused = train_here(tmp_path / "fused", *settings, "schedule=fused", "telemetry.samples=all")
    by_step = prompts(serial)
    assert by_step == prompts(fused)
    # The files have the prompts that the stream then forgets.
    files = [file for of_step in files_by_step(fused.dir).values() for file in of_step]
    assert set(read(files, ["source"])["source"].to_pylist()) == {"spell", "letters"}
    # Pools, each once all prompts have been drawn.
    words = {prompt for drawn in by_step.values() for prompt in drawn}
    last = read_lines(serial.dir / "metrics.jsonl")[-2]
    assert last["pool/unseen"] == 0 < last["pool/resting"]
    for pool, rest in (("easy", 0), ("hard", 1)):
        of_pool = sum(len(word) % 3 == rest for word in words)
        assert last[f"pool/{pool}"] >= of_pool / len(words) > 0
    for name in ("source/spell", "source/letters"):
        assert sum(last[f"{name}/pool/{pool}"] for pool in POOLS[:4]) == pytest.approx(1)
    # Those of the middle are drawn more often.
    counts = defaultdict(list)
    for word in words:
        drawn = sum(step.count(word) for step in by_step.values())
        counts[len(word) % 3].append(drawn)
    means = {kind: sum(drawn) / len(drawn) for kind, drawn in counts.items()}
    assert means[2] > means[1] > means[0]
    # Resumed.
    copy = shutil.copytree(serial.dir, tmp_path / "copy")
    shutil.rmtree(copy / "final")
    resumed = train_here(copy, *settings, "trainer.resume=auto")
    assert len(resumed.steps) == 4
    assert prompts(resumed) == by_step
    keys = ("loss", "reward_mean", "samples/prompts", *(f"pool/{pool}" for pool in POOLS))
    for one, other in zip(serial.metrics, resumed.metrics, strict=True):
        assert [one[key] for key in keys] == [other[key] for key in keys]


def test_a_recipe_without_a_reward(make_config: Callable[..., Any], tmp_path: Path) -> None:
    config = make_config("recipe=sft", "data.curriculum.hard_rest=2", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"^data\.curriculum\.hard_rest=2: wanted 0 for a recipe"):
        prepare(config)


@pytest.mark.layouts
def test_a_followed_run_chooses_the_same_prompts(
    train_here: Callable[..., Any], settings: list[str], tmp_path: Path
) -> None:
    """Prompts are chosen steps before their rewards come, and time decides nothing of it."""
    flying = [setting for setting in settings if not setting.startswith("recipe")]
    flying += [
        "recipe=grpo", "recipe.group_size=2", "schedule=async", "schedule.max_staleness=2",
        "schedule.new_weights=in_flight", "telemetry.samples=all", "trainer.prompts_per_step=6",
    ]  # fmt: skip
    apart = [*flying, "cluster.ranks=2", "cluster.pools.rollout=1", f"run.dir={tmp_path / 'first'}"]
    register()
    composed_run(["cluster=processes", *apart])  # which writes them, as the command line does
    first = train_here(tmp_path / "first", *apart)
    follow = [f"schedule.follow={first.dir}", "cluster.ranks=1"]
    again = train_here(tmp_path / "again", *flying, *follow)
    assert max(line["pool/resting"] for line in first.metrics) > 0
    assert prompts(first) == prompts(again)
    one, other = (load_file(run.dir / "final" / "model.safetensors") for run in (first, again))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
