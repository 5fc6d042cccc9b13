"""Predictions by roofline: what operators are counted for, against arithmetic by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_dry.roofline import Operation, Shares, predict
from hybridrl.costs.devices import ACCELERATORS

TESTS = Path(__file__).parents[1]
GPU = ACCELERATORS["h100"]
SHAPE = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
LAYER = 1024 * (1024 + 2 * 256 + 1024 + 3 * 2816)
HEAD = 1024 * 32000
ROWS, CONTEXT, SAMPLES, TOKENS = 64, 1024, 4, 512
NOTE = f"""
from gpu_dry import fake_cuda
fake_cuda.load()
import json
from gpu_dry import fake_device
from gpu_dry.predicted import Roofline, Setting, grpo_step
from gpu_dry.roofline import RooflineDevice

def make(*lengths):
    device = RooflineDevice(*lengths)
    fake_cuda.install(lambda name: device.sync("wait"))
    fake_device.install(device)
    return device

setting = Setting(
    shape={SHAPE}, layers=(5, 6), rows={ROWS}, context={CONTEXT}, lengths=({TOKENS},) * {SAMPLES}
)
noted = Roofline(setting, grpo_step, make).noted
sums = {{
    phase: [
        [sum(getattr(x, kind) for x in of_depth.operations[phase]) for of_depth in noted]
        for kind in ("flops", "nbytes")
    ]
    for phase in noted[0].operations
}}
print(json.dumps(sums))
"""


def test_an_operator_takes_the_longer_of_its_times() -> None:
    products = [Operation("mm", flops=GPU.flops), Operation("mm", nbytes=GPU.memory_bytes_per_s)]
    moved = Operation("allreduce_", sent=GPU.node_bytes_per_s)
    whole = predict([*products, moved], 10, GPU, Shares())
    assert (whole.device_s, whole.sent_s, whole.seconds) == (2.0, 1.0, 3.0)
    slower = predict([*products, moved], 2 * 10**6, GPU, Shares(flops=0.5, memory=0.25))
    assert (slower.device_s, slower.seconds) == (6.0, 2 * 10**6 * GPU.launch_s), (
        "the host is slower"
    )
    between = predict([moved], 0, GPU, Shares(links=0.5), nodes=2)
    assert between.sent_s == pytest.approx(2 * 450e9 / (8 * 50e9)), "NVLink waits for the network"
    assert whole.at_depth(slower, 2.0).device_s == 2.0 + 2 * 4.0


@pytest.mark.gpu_dry
def test_operations_and_bytes_are_those_of_a_transformer() -> None:
    """A layer's follow from two depths, and what is left is no layer's."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NOTE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    sums = json.loads(done.stdout.splitlines()[-1])

    def layer_and_rest(phase: str, kind: int) -> tuple[float, float]:
        five, six = sums[phase][kind]
        return six - five, five - 5 * (six - five)

    # decode: every weight and cached token once
    layer, rest = layer_and_rest("decode", 0)
    assert layer == pytest.approx(2 * ROWS * LAYER + 4 * ROWS * CONTEXT * 1024)
    assert rest == pytest.approx(2 * ROWS * HEAD)
    layer, rest = layer_and_rest("decode", 1)
    keys = 2 * 2 * ROWS * CONTEXT * 256
    assert 1 < layer / (2 * LAYER + keys) < 1.2, "activations besides"
    assert 1 < rest / (2 * HEAD + 2 * 4 * ROWS * 32000) < 1.2
    # log-probabilities: half of the pairs of queries and keys
    tokens = SAMPLES * TOKENS
    pairs = tokens * TOKENS / 2
    for phase in ("old policy", "reference"):
        layer, rest = layer_and_rest(phase, 0)
        assert layer == pytest.approx(2 * tokens * LAYER + 4 * pairs * 1024)
        assert rest == pytest.approx(2 * tokens * 3 / 4 * HEAD, rel=0.01)
    # an update: products thrice, attention's five again; the head's logits are made twice
    layer, rest = layer_and_rest("update", 0)
    assert layer == pytest.approx(6 * tokens * LAYER + (4 + 10) * pairs * 1024)
    assert rest == pytest.approx(8 * tokens * 3 / 4 * HEAD, rel=0.01)
    # a switch casts float32 weights
    layer, _ = layer_and_rest("switch", 1)
    assert 1 <= layer / (6 * LAYER) < 1.6
