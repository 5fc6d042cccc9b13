"""On real ranks, the fused schedule trains on what the serial one does, though samples move."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import Config, ConfigError, DataConfig, RolloutConfig
from hybridrl.controller import job
from hybridrl.controller.schedules import samples_held
from hybridrl.telemetry.records import read_lines

# Plain descent, so that a gradient near zero stays small whatever its sign.
DESCENT = ["trainer.optim.lr=1000", "trainer.optim.eps=1000", "trainer.optim.clip_grad_norm=0"]
# Responses of any length, in calls of few steps: a tail of 12 of 16 samples is on both instances.
TAIL = ["rollout.decode_steps=2", "rollout.max_new_tokens=24", "rollout.stop=[a,e,i]"]
MODEL = ["model.tiny.num_heads=4", "model.tiny.num_kv_heads=2"]
FUSED = ["schedule=fused", "rollout.migration_threshold=12"]
LAYOUTS = {
    "two instances of a rank": ["cluster.ranks=2"],
    "two instances of two ranks": [
        "cluster.ranks=4", "trainer.layout.fsdp=4", "rollout.layout.tp=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_trains_on_what_serial_trains_on(
    tiny_run: list[str],
    cluster: str,
    user_code: Path,
    tmp_path: Path,
    make_config: Callable[..., Config],
    layout: str,
) -> None:
    """Two steps: the same tokens and rewards, losses within 1e-6; some samples change instance."""
    settings = [*MODEL, *TAIL, *DESCENT, *LAYOUTS[layout], "trainer.steps=2", "eval.num_prompts=2"]
    found: dict[str, tuple[Any, list[dict[str, Any]]]] = {}
    for name, schedule in {"serial": [], "fused": FUSED}.items():
        job.train(
            make_config(
                *tiny_run,
                *settings,
                *schedule,
                f"cluster.address={cluster}",
                f"run.dir={tmp_path / name}",
                f"recipe={{target: '{user_code}:probe'}}",
            )
        )
        samples = read_lines(tmp_path / name / "samples.jsonl")
        metrics = read_lines(tmp_path / name / "metrics.jsonl")
        found[name] = samples, [line for line in metrics if "loss" in line]
    (samples, serial), (others, fused) = found["serial"], found["fused"]
    assert len(samples) == 2 * 16 + 2 * 2
    assert [without_times(s) for s in samples] == [without_times(s) for s in others]
    assert len({sample["tokens"] for sample in samples}) > 5
    assert len(serial) == len(fused) == 2
    for one, other in zip(serial, fused, strict=True):
        assert one["migrated"] == 0 < other["migrated"]
        for key in ("loss", "grad_norm", "entropy", "reward_mean"):
            assert math.isclose(one[key], other[key], abs_tol=1e-6, rel_tol=1e-6), key


def without_times(sample: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sample.items() if key != "time"}


def test_an_instance_holds_what_its_cache_and_its_batch_allow() -> None:
    data = DataConfig(max_prompt_tokens=20)
    sizes = {"max_new_tokens": 13, "block_size": 16, "max_running": 7}
    assert samples_held(Config(data=data, rollout=RolloutConfig(**sizes))) == 7
    cached = RolloutConfig(**sizes, kv_cache_tokens=160)
    assert samples_held(Config(data=data, rollout=cached)) == 3  # 10 blocks; 33 tokens need three


def test_a_threshold_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"threshold=2: wanted null with schedule=serial"):
        Config(rollout=RolloutConfig(migration_threshold=2))
    with pytest.raises(ConfigError, match=r"migration_threshold=-1: wanted null \(the best\), 0"):
        RolloutConfig(migration_threshold=-1)
