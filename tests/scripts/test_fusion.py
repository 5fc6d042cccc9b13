"""`make bench-fusion`: its parts, and all of it with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from script_modules import SCRIPTS, load_script
from transformers import AutoModelForCausalLM

from hybridrl.config import TinyModelConfig
from hybridrl.costs.instance import Costs
from hybridrl.flow.sample import SampleId
from hybridrl.models.tiny import make_tiny_model

BENCH = SCRIPTS / "bench"


def load(name: str) -> ModuleType:
    return load_script(f"bench/{name}.py")


def test_a_wider_model_says_the_same(tmp_path: Path) -> None:
    shape = TinyModelConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    make_tiny_model(tmp_path / "small", shape, seed=0)
    load("widen").widen(tmp_path / "small", tmp_path / "wide", 3)
    small, wide = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float64)
        for name in ("small", "wide")
    )
    ids = torch.arange(3, 43).view(2, 20)
    # The norms of queries and keys have the same epsilon, for which it is a third of what it was.
    torch.testing.assert_close(wide(ids).logits, small(ids).logits, atol=1e-4, rtol=0)
    assert small(ids).logits.abs().max() > 0.1
    assert wide.config.hidden_size == 96
    assert wide.config.num_attention_heads == 12
    weights = wide.model.layers[1].mlp
    assert weights.gate_proj.weight.shape == (144, 96)
    assert weights.gate_proj.weight[48:].abs().min() > 0  # the new units do compute
    assert weights.down_proj.weight[:, 48:].abs().max() == 0  # and nothing hears of it


def test_the_bound_is_the_work_over_the_ranks_or_the_longest_sample() -> None:
    fusion = load("fusion")
    costs = Costs(
        step_s=0.01, row_s=0.002, cached_token_s=1e-4, call_s=0.1,
        token_s={"reward": 0.001, "reference": 0.003}, stage_call_s={"reward": 0.05},
    )  # fmt: skip

    def step(busy_s: float) -> object:
        return fusion.Measured(
            seconds=9.0, front_s=6.0, busy_s=busy_s, bubble_share=0.1, trained=2, metrics={},
            sizes={SampleId(0): (10, 100), SampleId(1): (50, 20)},
        )  # fmt: skip

    alone = 0.1 + 100 * (0.01 + 0.002 + 1e-4 * 60) + 0.05 + 0.004 * 110
    assert fusion.longest_alone(step(8.0), costs) == pytest.approx(alone)
    assert fusion.bound(step(8.0), costs, ranks=2) == pytest.approx(4.0)
    assert fusion.bound(step(1.0), costs, ranks=2) == pytest.approx(alone)


def test_other_responses_are_noticed() -> None:
    fusion = load("fusion")

    def steps(*lengths: int) -> list[list[object]]:
        sizes = {SampleId(i): (4, n) for i, n in enumerate(lengths)}
        common = {"seconds": 1.0, "front_s": 1.0, "busy_s": 1.0, "bubble_share": 0.0}
        return [[fusion.Measured(**common, trained=len(sizes), sizes=sizes, metrics={})]]

    fusion.check_same_work({"serial": steps(5, 6, 7), "fused": steps(5, 6, 8)})  # a near-tie
    with pytest.raises(RuntimeError, match="2 of 3 responses"):
        fusion.check_same_work({"serial": steps(5, 6, 7), "fused": steps(5, 7, 8)})


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    # Untrained weights under the name of the warm-started ones: the shape is what is tested.
    name = f"longtail-{load('tasks').TASKS['longtail'].warm_start_steps}"
    make_tiny_model(tmp_path / name, TinyModelConfig(hidden_size=32, num_layers=1), seed=0)
    trace = tmp_path / "trace.json"
    done = subprocess.run(
        [
            sys.executable, str(BENCH / "fusion.py"), "--cache", str(tmp_path), "--rounds", "2",
            "--steps", "1", "--prompts", "4", "--wider", "2", "--trace", str(trace),
        ],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    records = {record["name"]: record for record in lines}
    assert set(records) == {
        "response_tokens_p99_over_p50", "fused_step_vs_serial", "partial_step_vs_serial",
        "fused_recovered_share", "fused_step_over_bound", "simulated_over_measured_serial",
        "simulated_over_measured_fused", "simulated_over_measured_partial",
    }  # fmt: skip
    for record in lines:
        assert list(record)[:6] == ["name", "value", "unit", "baseline", "ratio", "better"]
    assert records["response_tokens_p99_over_p50"]["samples"] == 2 * 4 * 8
    for name in ("fused", "partial"):
        record = records[f"{name}_step_vs_serial"]
        assert record["value"] > 0
        assert 0 <= record["bubble_share"] < 1
        assert 0 < record["front_s"] < record["step_s"]
    events = json.loads(trace.read_text())
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] > 1]
    assert {"generate", "reward", "update"} <= set(names)
