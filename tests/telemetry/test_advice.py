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


@pytest.mark.parametrize(
    ("ranks", "generate", "trains", "generates", "better"),
    [
        (4, 2, 0.6, 0.1, 3),
        (4, 2, 0.1, 0.6, 1),
        (32, 16, 0.6, 0.0, 24),  # 16 ranks' work and 6.4 ranks' work, in instances of 4
        (32, 16, 0.0, 0.6, 8),
        (4, 3, 0.6, 0.1, None),  # the one that trains is the only one
        (4, 1, 0.1, 0.6, None),
        (4, 2, 0.3, 0.4, None),
    ],
)
def test_another_split_of_ranks_where_there_is_one(
    ranks: int, generate: int, trains: float, generates: float, better: int | None, tmp_path: Path
) -> None:
    """By hand: the ranks that would be busy, of each kind, share all ranks."""
    waits = {"bubble_share__actor": trains, "bubble_share__rollout": generates}
    run = run_with(tmp_path, step_s=5.0, **waits)
    cluster = {"ranks": ranks, "pools": {"rollout": generate}}
    layout = {"layout": {"pp": 1, "tp": 4 if ranks == 32 else 1}}
    run.config = yaml.safe_dump(SETTINGS | {"cluster": cluster, "rollout": layout})
    if better is None:
        assert advise(run) == []
        return
    (advice,) = advise(run)
    wait = f"ranks that train wait for {trains:.0%} of a step ({5 * trains:.3g} s), "
    assert advice.text.startswith(wait)
    assert advice.text.endswith(f"({5 * generates:.3g} s): {better} of {ranks} should generate")
    assert advice.key == "cluster.pools.rollout"


@pytest.mark.parametrize(
    ("most", "trains", "generates", "better"),
    [(0, 0.5, 0.5, 1), (1, 0.5, 0.6, 3), (2, 0.4, 0.4, 4), (1, 0.2, 0.4, None)],
)
def test_more_staleness_where_both_kinds_of_ranks_wait(
    most: int, trains: float, generates: float, better: int | None, tmp_path: Path
) -> None:
    """A step of A / (S + 1), of which the busier ranks work a half, takes the half of it then."""
    waits = {"bubble_share__actor": trains, "bubble_share__rollout": generates}
    run = run_with(tmp_path, step_s=5.0, **waits)
    cluster = {"ranks": 4, "pools": {"rollout": 2}}
    schedule = {"kind": "asynchronous", "max_staleness": most}
    run.config = yaml.safe_dump(SETTINGS | {"cluster": cluster, "schedule": schedule})
    if better is None:
        assert advise(run) == []
        return
    (advice,) = advise(run)
    assert f"at their limit: up to {better} steps of staleness, not {most}," in advice.text
    assert advice.key == "schedule.max_staleness"
    run.config = yaml.safe_dump(SETTINGS | {"cluster": cluster, "schedule": {"kind": "serial"}})
    assert advise(run) == []
