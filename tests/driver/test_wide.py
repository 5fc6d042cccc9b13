"""On real ranks and emulated ones the tail is decoded wide, and the steps are those of serial."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from hybridrl.config import ConfigError, RolloutConfig, RolloutLayoutConfig, compose
from hybridrl.driver import train as runs
from hybridrl.models.parallel import check_tail_tp, wide_widths
from hybridrl.schedule.tail.early import StreamedUpdate
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.rundata import load
from hybridrl.telemetry.tables import timelines

pytestmark = pytest.mark.long

WIDE = ["schedule=fused", "schedule.migration_threshold=6", "schedule.migration=kv"]
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def run_of(train: Train, train_here: Train, tmp_path_factory: Any) -> Callable[..., Any]:
    """A run with these settings, made once."""

    @functools.cache
    def run(*settings: str, on_ray: bool = False) -> Any:
        folder = tmp_path_factory.mktemp("run")
        return (train if on_ray else train_here)(folder, *settings)

    return run


def wide_calls(run: Any) -> list[Any]:
    return [s for s in run.spans if s.name == "wide decode" and s.lane.startswith("rank")]


@pytest.mark.parametrize(
    "on_ray", [False, pytest.param(True, marks=pytest.mark.ray)], ids=["here", "ray"]
)
def test_the_tail_is_decoded_wide(
    run_of: Callable[..., Any], long_tail: list[str], check_same: Callable[..., None], on_ray: bool
) -> None:
    """With a reference and a reward model, whose passes run before and after."""
    settings = [*long_tail, "cluster.ranks=2"]
    serial = run_of(*settings)
    wide = run_of(*settings, *WIDE, "rollout.tail_tp=2", on_ray=on_ray)
    check_same(serial, wide)
    for line in wide.metrics:
        assert 0 < line["samples/widened"] <= 6
        assert line["samples/moved_kv_bytes"] > 0
    assert {span.lane for span in wide_calls(wide)} == {"rank 0", "rank 1"}
    assert not wide_calls(serial)
    assert all("samples/widened" not in line for line in serial.metrics)


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize(
    "layout",
    [["rollout.layout.tp=2"], pytest.param(["rollout.layout.pp=2"], marks=pytest.mark.slow)],
    ids=str,
)
def test_instances_of_two_ranks(
    run_of: Callable[..., Any], long_tail: list[str], check_same: Callable[..., None],
    layout: list[str],
) -> None:  # fmt: skip
    settings = [*long_tail, "cluster.ranks=4", *layout]
    tail = "rollout.tail_tp=4" if "tp" in layout[0] else "rollout.tail_tp=2"
    heads = ["model.tiny.num_heads=4"] if "tp" in layout[0] else []
    settings += heads
    wide = run_of(*settings, *WIDE, tail)
    check_same(run_of(*settings), wide)
    assert sum(line["samples/widened"] for line in wide.metrics) > 0


@pytest.mark.slow
@pytest.mark.layouts
def test_adapters_and_guesses(
    run_of: Callable[..., Any], long_tail: list[str], check_same: Callable[..., None]
) -> None:
    settings = [*long_tail, "cluster.ranks=2", "actor.lora.rank=4"]
    wide = run_of(*settings, *WIDE, "rollout.tail_tp=2", "rollout.speculate=2")
    check_same(run_of(*settings), wide)
    assert sum(line["samples/widened"] for line in wide.metrics) > 0
    assert sum(line["samples/drafted_tokens"] for line in wide.metrics) > 0


@pytest.mark.wide
@pytest.mark.layouts
def test_a_run_that_resumes_in_between(run_of: Callable[..., Any], long_tail: list[str]) -> None:
    settings = [*long_tail, "cluster.ranks=2", *WIDE, "rollout.tail_tp=2"]
    whole = run_of(*settings, "trainer.save_every=1", "trainer.keep_last=9")
    (second,) = whole.dir.glob("checkpoints/step_*2")
    rest = run_of(*settings, f"trainer.resume={second}")
    assert len(rest.steps) == 1
    for run in (whole, rest):
        assert sum(line["samples/widened"] for line in run.metrics) > 0
    for name, weights in load_file(whole.dir / "final" / "model.safetensors").items():
        other = load_file(rest.dir / "final" / "model.safetensors")[name]
        torch.testing.assert_close(weights, other, atol=1e-5, rtol=0)


@pytest.mark.wide
@pytest.mark.layouts
def test_an_instance_that_parted_trains(
    run_of: Callable[..., Any], long_tail: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three instances decode the tail, and the third trains; then all may train."""
    monkeypatch.setattr(StreamedUpdate, "_affordable", lambda *_: None)
    dropped = ("recipe", "rollout.decode_steps", "trainer.prompts_per_step")
    kept = [setting for setting in long_tail if not setting.startswith(dropped)]
    settings = [*kept, "cluster.ranks=3", "trainer.layout.replicas=3", "recipe=grpo"]
    settings += ["recipe.group_size=2", "rollout.decode_steps=1", "trainer.prompts_per_step=9"]
    serial = run_of(*settings)
    early = ["schedule.early_backward=auto", "rollout.tail_tp=2"]
    early += ["schedule=fused", "schedule.migration_threshold=12"]  # while all still decode
    wide = run_of(*settings, *early)
    for one, other in zip(serial.steps, wide.steps, strict=True):
        assert [(s.id, s.tokens) for s in one.samples] == [(s.id, s.tokens) for s in other.samples]
    assert sum(line["samples/widened"] for line in wide.metrics) > 0
    assert sum(line["samples/trained_early"] for line in wide.metrics) > 0


# -- emulated ranks -------------------------------------------------------------------------------

EMULATED = (
    "cluster=emulated", "cluster.ranks=8", "trainer.steps=4",
    "trainer.prompts_per_step=8", "rollout.max_new_tokens=4000", "recipe.group_size=4",
    "telemetry.progress=false", "telemetry.loggers=[]", "telemetry.report=false",
)  # fmt: skip


def emulated(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    compose.register()
    config = compose.check([*EMULATED, *settings, f"run.dir={folder}"])
    runs.train(config)
    return list(read_lines(folder / "metrics.jsonl"))


def lengths(folder: Path) -> list[Any]:
    return [line["lengths"] for line in read_lines(folder / "lengths.jsonl")]


@pytest.mark.parametrize("tail_tp", ["4", "auto"])
def test_emulated_ranks(tmp_path: Path, tail_tp: str) -> None:
    """Instances of tp 2 on an 8B model's roofline; their costs say that a wide tail ends sooner."""
    settings = ["rollout.layout.tp=2", "cluster.time_scale=0.002"]
    emulated(tmp_path / "serial", *settings, "schedule=serial")
    lines = emulated(tmp_path / "wide", *settings, "schedule=fused", f"rollout.tail_tp={tail_tp}")
    assert lengths(tmp_path / "serial") == lengths(tmp_path / "wide")
    assert sum(line["samples/widened"] for line in lines) > 0
    if tail_tp == "4":  # the only choice, once there are costs to choose by
        assert lines[-1]["plan/widen_to_2_chosen"] == 1
        assert timelines(load(tmp_path / "wide"))[-1]["label"] == "last: step 4, widen to 2"
    costs = json.loads((tmp_path / "wide" / "costs.json").read_text())["costs"]
    assert "2" in costs["wide_step_s"]


# -- wrong input ----------------------------------------------------------------------------------


@pytest.mark.each
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["tail_tp=3"], "=3: wanted off, auto, or a multiple of rollout.layout.tp=2, 4 or more"),
        (["tail_tp=2"], "=2: wanted off, auto, or a multiple of rollout.layout.tp=2, 4 or more"),
        (["tail_tp=-4"], "=-4: wanted off, auto, or a multiple"),
        (["tail_tp=wide"], "=wide: wanted off, auto, or a multiple"),
        (["tail_tp=16"], "=16: wanted off, auto, or at most 8: cluster.ranks=8"),
        (
            ["tail_tp=8", "layout.pp=2"],
            "=8: wanted off, auto, or at most 4: cluster.ranks=8 over rollout.layout.pp=2",
        ),
        (["tail_tp=4", "deterministic=strict"], "=4: wanted off with deterministic=strict"),
        (["tail_tp=auto", "schedule=serial"], "=auto: wanted off with schedule=serial, or"),
        (["tail_tp=4", "schedule=partial"], "or schedule=fused"),
        (["tail_tp=4", "rollout=vllm"], "=4: wanted off with rollout.engine=vllm"),
    ],
)  # fmt: skip
def test_one_line_says_what_is_allowed(settings: list[str], wanted: str) -> None:
    compose.register()
    groups = ("schedule=", "rollout=", "deterministic=")
    named = [s if s.startswith(groups) else f"rollout.{s}" for s in settings]
    schedule = [] if any(s.startswith("schedule=") for s in named) else ["schedule=fused"]
    with pytest.raises(ConfigError) as error:
        compose.check(["cluster.ranks=8", "rollout.layout.tp=2", *schedule, *named])
    assert error.value.key == "rollout.tail_tp"
    assert wanted in str(error.value)
    assert "\n" not in str(error.value)


HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48, "head_dim": 4}


@pytest.mark.parametrize(
    ("model", "layout", "tail_tp", "wanted"),
    [
        (LlamaConfig(**HEADS), {"tp": 1}, 8, "it must divide the 12 attention heads"),
        (LlamaConfig(**HEADS), {"tp": 1}, 4, "it must divide the 6 key-value heads"),
        (LlamaConfig(**HEADS, intermediate_size=10), {"tp": 1}, 6, "intermediate_size=10"),
        (Qwen3MoeConfig(num_experts=8), {"tp": 2}, 4, "rollout.layout.ep=2: parts of an expert"),
        (Qwen3MoeConfig(num_experts=6), {"tp": 1}, 4, "divides the 6 experts"),
        (LlamaConfig(**HEADS, intermediate_size=12), {"tp": 1}, 6, None),
    ],
)
def test_the_model_bounds_it(
    model: PretrainedConfig, layout: dict[str, int], tail_tp: int, wanted: str | None
) -> None:
    """`auto` takes what is allowed."""
    axes, width = RolloutLayoutConfig(**layout), tail_tp // layout["tp"]
    rollout = RolloutConfig(layout=axes, tail_tp=str(tail_tp))
    assert wide_widths(model, rollout, 8) == (() if wanted else (width,))
    if wanted is None:
        check_tail_tp(model, rollout)
        return
    with pytest.raises(ConfigError, match=f"^rollout.tail_tp={tail_tp}: wanted ") as error:
        check_tail_tp(model, rollout)
    assert wanted in str(error.value)
