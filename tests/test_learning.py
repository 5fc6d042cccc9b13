"""A model learns as well under every schedule and engine; takes many minutes, several seeds."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.telemetry.records import read_lines

SEEDS = (0, 1, 2)
RL_STEPS = {"demo": 40, "longtail": 120}  # longtail learns more slowly
EARLY = ["schedule=fused", "schedule.early_backward=auto", "trainer.layout.replicas=2"]
WAYS = {
    "serial": [],
    "fused": ["schedule=fused"],
    "partial": ["schedule=partial"],
    "packed": ["schedule=packed"],
    "early": EARLY,
    "speculate": ["rollout.speculate=4"],
    "wide": ["schedule=fused", "rollout.tail_tp=2"],
    "tail": [*EARLY, "rollout.speculate=auto", "rollout.tail_tp=2"],
    "vllm": ["rollout=vllm"],
}
# The long-tailed task of the benches: letters to copy, and a number to count down from.
TASKS = {
    "demo": [],
    "longtail": [
        "data=reasoning_gym",
        "data.sources.main.kind=function",
        "data.sources.main.name=hybridrl.data.tasks:work",
        'data.prompt_template="{question}:"',
        'data.answer_template="#{answer}>{steps}"',
        "data.max_prompt_tokens=16",
        "data.eval_size=1024",
        'reward.extract="#([a-z]*)"',
        "rollout.max_new_tokens=320",
        "trainer.prompts_per_step=16",
    ],
}
GAIN = {"demo": 0.1, "longtail": 0.05}  # at least, in every run


def accuracy(run_dir: Path, task: str, way: str, seed: int) -> tuple[float, float]:
    """Held-out accuracy before the recipe's steps (after the warm start) and at the end."""
    overrides = [
        "experiment=spell_tiny", f"trainer.steps={RL_STEPS[task]}", "trainer.save_every=0",
        "eval.sets.main.every=null", "telemetry.loggers=[]", "telemetry.report=false",
        "telemetry.progress=false", f"run.seed={seed}", f"run.dir={run_dir}",
    ]  # fmt: skip
    settings = [*overrides, *TASKS[task], *WAYS[way]]
    command = [sys.executable, "-m", "hybridrl.cli", "train", *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]
    assert steps
    return result["accuracy_before"], result["accuracy_after"]


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    ("task", "ways"),
    [
        ("demo", ("fused", "partial", "packed", "early", "speculate", "wide", "tail")),
        ("longtail", ("packed", "tail")),
        pytest.param("demo", ("vllm",), marks=pytest.mark.vllm),
    ],
)
def test_all_learn_as_serial_and_native_do(
    tmp_path: Path, task: str, ways: tuple[str, ...]
) -> None:
    """The mean difference to serial, seed by seed, is within three of its standard errors.

    Seeds differ much more than ways do: a seed is its first weights and its prompts. The spread of
    the differences is pooled over the ways. Each accuracy is itself a share of 1024 held-out words,
    with a standard error of at most 0.016: no smaller spread is taken.
    """
    accuracies: dict[str, list[float]] = {}
    for way in ("serial", *ways):
        runs = [accuracy(tmp_path / f"{way}{seed}", task, way, seed) for seed in SEEDS]
        assert all(after > before + GAIN[task] for before, after in runs), (way, runs)
        accuracies[way] = [after for _, after in runs]
    differences = {
        way: [a - b for a, b in zip(accuracies[way], accuracies["serial"], strict=True)]
        for way in ways
    }
    variances = [statistics.variance(values) for values in differences.values()]
    spread = max(0.016 * 2**0.5, statistics.fmean(variances) ** 0.5)
    tolerance = 3 * spread / len(SEEDS) ** 0.5
    for way, values in differences.items():
        assert abs(statistics.fmean(values)) <= tolerance, (way, accuracies, tolerance)
