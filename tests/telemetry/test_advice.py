"""Advice on runs in which one thing is wrong, and none on a run that learns."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridrl.config import TelemetryConfig
from hybridrl.telemetry.advice import advise
from hybridrl.telemetry.run import Telemetry
from hybridrl.telemetry.rundata import RunData, load

STEPS = 80
SETTINGS = {
    "cluster": {"ranks": 2},
    "recipe": {"clip_high": 0.2, "kl_coef": 0.0},
    "rollout": {"max_new_tokens": 24, "max_running": 256, "kv_cache_tokens": 0},
    "schedule": {"kind": "serial"},
    "trainer": {"optim": {"clip_grad_norm": 1.0}},
}


def healthy(done: float) -> dict[str, float]:
    """The metrics of a step when the share `done` of the run is over, as the demo's are."""
    return {
        "loss": 0.01, "step_s": 0.4, "samples/used": 140.0, "samples/dropped": 116.0,
        "samples/filtered": 88.0 + 60 * done, "samples/preempted": 0.0,
        "entropy": 0.37 - 0.27 * done,
        "grad_norm": 0.9 + 0.5 * done, "reward_mean": 0.35 + 0.5 * done, "reward_timeout": 0.0,
        "reward_error": 0.0, "bubble_share": 0.15, "kl_mean": 0.1 + 0.3 * done,
        "source/a/reward_mean": 0.35 + 0.5 * done, "source/b/reward_mean": 0.3 + 0.4 * done,
    }  # fmt: skip


def run_with(folder: Path, lengths: list[int] | None = None, **changed: Any) -> RunData:
    """A run of `STEPS` steps, some of whose metrics are `changed`: numbers, or functions of done.

    In a name `__` stands for a slash.
    """
    config = TelemetryConfig(progress=False, loggers=[])
    with Telemetry(folder, config, STEPS) as telemetry:
        telemetry.phase("rl", STEPS)
        for step in range(1, STEPS + 1):
            done = step / STEPS
            metrics = healthy(done)
            for name, value in changed.items():
                metrics[name.replace("__", "/")] = value(done) if callable(value) else value
            telemetry.lengths(step, lengths or [7, 8, 9, 12])
            telemetry.samples(step, [{"reward": float(k % 2)} for k in range(4)])
            telemetry.log(step, metrics)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    return load(folder)


def test_a_run_that_learns_gets_none(tmp_path: Path) -> None:
    assert advise(run_with(tmp_path)) == []


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no spread": ({"samples/filtered": 230.0}, "90% of the samples were left out", "data.sources"),
    "ceiling": ({"reward_mean": 0.99}, "the mean reward is 0.99 of at most 1", "data.sources"),
    "cut off": ({"lengths": [24, 24, 9, 8]}, "50% of the responses", "rollout.max_new_tokens"),
    "entropy": (
        {"entropy": lambda done: 0.3 * 1e-3**done}, "the entropy fell from", "recipe.clip_high",
    ),
    "kl": ({"kl_mean": lambda done: 100 * done}, "the KL from the reference", "recipe.kl_coef"),
    "source": (
        {"source__b__reward_mean": 0.02}, "source b does not learn", "data.sources.b.weight",
    ),
    "bubble": ({"bubble_share": 0.55}, "ranks wait for 55% of a step", "schedule"),
    "preempted": ({"samples__preempted": 64.0}, "25% of the samples lost", "rollout.max_running"),
    "timeouts": ({"reward_timeout": 12.8}, "5.0% of the samples got no", "reward.timeout_s"),
    "errors": ({"reward_error": 12.8}, "5.0% of the samples raised", "reward"),
    "clipped": ({"grad_norm": 40.0}, "every gradient is clipped, to 1 from 40", "trainer.optim.lr"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_one_thing_that_is_wrong(name: str, tmp_path: Path) -> None:
    changed, text, key = WRONG[name]
    (advice,) = advise(run_with(tmp_path, **changed))
    assert advice.text.startswith(text)
    assert advice.key == key


@pytest.mark.parametrize(
    ("reward", "status", "key"),
    [
        ({"kind": "chat"}, "timeout: no reply within 60 s", "reward.endpoint.timeout_s"),
        (
            {"kind": "sum", "parts": {"polite": {"kind": "http"}, "exact": {"kind": "exact"}}},
            "timeout: polite: no reply within 60 s",
            "reward.parts.polite.endpoint.timeout_s",
        ),
        (
            {"kind": "sum", "parts": {"polite": {"kind": "http"}, "mine": {"kind": "function"}}},
            "timeout: mine: no reward within 5 s",
            "reward.parts.mine.timeout_s",
        ),
    ],
)
def test_the_time_limit_of_the_judge_that_was_late(
    reward: dict[str, Any], status: str, key: str, tmp_path: Path
) -> None:
    run = run_with(tmp_path, reward_timeout=12.8)
    run.config = yaml.safe_dump(SETTINGS | {"reward": reward})
    run.samples[-1]["status"] = status
    (advice,) = advise(run)
    assert advice.key == key


def test_a_short_run_and_one_without_settings_get_none(tmp_path: Path) -> None:
    run = run_with(tmp_path, grad_norm=40.0)
    run.config = ""
    assert advise(run) == []
    short = run_with(tmp_path / "short", filtered=250.0)
    short.metrics = dict(list(short.metrics.items())[:19])
    assert advise(short) == []
