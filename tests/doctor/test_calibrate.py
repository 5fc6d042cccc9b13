"""`hybridrl plan calibrate`: small models that tell costs apart, and a rank that measures them."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from hybridrl.config import ConfigError
from hybridrl.doctor import calibrate
from hybridrl.doctor.calibration_rank import models_of
from hybridrl.planner.mapping import GenLayout, PlannedRole, SampleLength, TrainLayout
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.model_shape import ModelShape

SMALL = [
    "cluster.device=cpu",
    "trainer.max_tokens_per_micro_batch=64",
    "rollout.max_running=2",
    "model.tiny.hidden_size=32",
    "model.tiny.intermediate_size=64",
    "model.tiny.num_heads=2",
    "model.tiny.max_positions=128",
]


def test_the_models_of_a_family() -> None:
    """Depths, and half of the width with heads as large as before."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    one, three, half = (ModelShape.of_config(c.to_dict()) for c in models_of(config))
    assert (one.layers, three.layers) == (1, 3)
    assert one.layer_parameters == three.layer_parameters == 218_103_808
    assert half == ModelShape(2, 2048, 7168, 16, 4, 128_256, head_size=128)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_calibration(ranks: int, tmp_path: Path) -> None:
    """All of it on a tiny model: a file that predicts, and what it says of the model."""
    out = tmp_path / "node.json"
    lines, costs = calibrate.run([*SMALL, f"cluster.ranks={ranks}", f"--out={out}"])
    assert lines[0].startswith(f"calibrated: the tiny model, {ranks} rank")
    read = MappingCosts.from_json(json.loads(out.read_text()))
    assert read.to_json() == costs.to_json()
    assert read.cluster.ranks == ranks
    assert (read.cluster.within.message_s > 0) is (ranks > 1)
    role = PlannedRole(name="actor", shape=ModelShape(4, 64, 128, 2, 2, 79), trained=True)
    few, many = (
        read.update_s(role, TrainLayout(), range(1), [SampleLength(16, 16)] * n) for n in (2, 64)
    )
    # Of so few tokens most seconds are those of a call, which may hide what tokens cost.
    assert 0 < few <= many
    instance = read.generation(role, GenLayout(), range(1))
    assert 0 < float(instance.pass_s(1, 16)) < 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--output=x"],
            "option=--output=x: wanted key=value, --out=FILE, or --run=RUN with --costs=FILE",
        ),
        (["--out=no/such/x"], "--out=no/such/x: wanted a file in a directory that is there"),
        (
            ["cluster.device=cpu", "model.tiny.num_experts=4"],
            "model=qwen3_moe: wanted a dense decoder: a mixture of experts",
        ),
    ],
)
def test_refusals(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        calibrate.run(args)
    assert message in str(raised.value)
