"""What `trainer.activations=auto` is: by the memory plan on GPUs, kept elsewhere."""

import logging
from pathlib import Path
from unittest import mock

import pytest
from transformers import AutoConfig, PretrainedConfig

from hybridrl.config import ActivationMode, Config, ConfigError, MemoryCheck, compose
from hybridrl.flow import Graph
from hybridrl.preflight import activation_choice
from hybridrl.preflight.activation_choice import (
    CHOICES,
    KEY,
    choose_activations,
    decide_activations,
)
from hybridrl.preflight.memory_plan import Room, check_memory, gpu_room, plan_run
from hybridrl.preflight.prepare import build_recipe

GIB = 2**30


def run_of(*overrides: str, device: str = "cuda") -> tuple[Config, Graph, PretrainedConfig]:
    """Qwen3-8B on eight ranks, with 4,096 new tokens."""
    compose.register()
    args = ["model=qwen3_8b", "cluster.ranks=8", f"cluster.device={device}", *overrides]
    config = compose.check(["rollout.max_new_tokens=4096", *args])
    config.resolve_device(8 if device == "cuda" else 0, "the planned cluster")
    return config, build_recipe(config.recipe), AutoConfig.for_model(**config.model.shape)


def training_bytes(mode: ActivationMode, *overrides: str) -> int:
    """Return the bytes of the largest phase of training, in any pool."""
    config, graph, shape = run_of(*overrides, f"{KEY}={mode.value}")
    plans = plan_run(config, graph, shape, gpu_room(80 * GIB), staying=()).pools.values()
    phases = [phase for plan in plans for phase in plan.phases]
    return max(phase.total for phase in phases if phase.name.startswith("train "))


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides", [(), ("recipe=ppo",), ("recipe=ppo", "cluster.placement=split")], ids=str
)
def test_the_first_that_fits_to_the_byte(overrides: tuple[str, ...]) -> None:
    """The choice counts all roles that are trained, in every pool."""
    config, graph, shape = run_of(*overrides)
    needed = [training_bytes(mode, *overrides) for mode in CHOICES]
    assert needed == sorted(needed, reverse=True)
    for place, mode in enumerate(CHOICES):
        enough, less = (Room(needed[place] + 100 - short, 100) for short in (0, 1))
        assert choose_activations(config, graph, shape, enough)[0] is mode
        others = choose_activations(config, graph, shape, less)[0]
        assert others is CHOICES[min(place + 1, 2)]
    assert config.trainer.activations is ActivationMode.auto, "a choice changes nothing"


def test_a_line_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    config, graph, shape = run_of("model.attention=torch", "trainer.fuse_layers=never")
    with caplog.at_level(logging.INFO, activation_choice.__name__):
        decide_activations(config, graph, shape, 80 * GIB)
    assert config.trainer.activations is ActivationMode.selective
    line = f"{KEY}=auto: selective, since keep needs 85.1 of 76.8 GiB"
    assert [record.getMessage() for record in caplog.records] == [line]


def test_a_given_mode_stays(caplog: pytest.LogCaptureFixture) -> None:
    config, graph, shape = run_of(f"{KEY}=keep")
    with mock.patch.object(activation_choice, "plan_run", side_effect=AssertionError):
        decide_activations(config, graph, shape, 80 * GIB)
    assert config.trainer.activations is ActivationMode.keep
    assert not caplog.records


@pytest.mark.parametrize(
    ("overrides", "device", "mode", "reason"),
    [
        ((), "cpu", "keep", "as on all CPUs"),
        (
            ("trainer.layout.pp=2", "trainer.layout.schedule=zero_bubble"),
            "cuda",
            "keep",
            "since trainer.layout.schedule=zero_bubble recomputes none",
        ),
        # This machine has no GPU, and the cluster did not say how large its own are.
        ((), "cuda", "recompute", "since the driver's node has no GPU whose memory"),
    ],
    ids=str,
)
def test_without_a_plan(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    device: str,
    mode: str,
    reason: str,
) -> None:
    config, graph, shape = run_of(*overrides, device=device)
    monkeypatch.setattr("hybridrl.system.devices.local_gpus", lambda: 0)
    with caplog.at_level(logging.DEBUG, activation_choice.__name__):
        decide_activations(config, graph, shape)
    assert config.trainer.activations.value == mode
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{KEY}=auto: {mode}, {reason}")


def test_a_model_that_torch_cannot_count_is_recomputed() -> None:
    config, graph, shape = run_of()
    error = NotImplementedError("no kernel\nfor meta")
    with mock.patch.object(activation_choice, "plan_run", side_effect=error):
        decide_activations(config, graph, shape, 80 * GIB)
    assert config.trainer.activations is ActivationMode.recompute


def test_what_does_not_fit_recomputed_is_refused(tmp_path: Path) -> None:
    config, graph, shape = run_of("rollout.layout.tp=8")
    decide_activations(config, graph, shape, 23 * GIB)
    assert config.trainer.activations is ActivationMode.recompute
    shape.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the largest phase, train actor, needs") as error:
        check_memory(config, graph, str(tmp_path), 23 * GIB)
    assert "trainer.activations" not in str(error.value), "there is no smaller one"
    config.cluster.memory_check = MemoryCheck.warn
    check_memory(config, graph, str(tmp_path), 23 * GIB)
