"""The steps of the GPU report run on a fake GPU, so that a real one finds no slip of theirs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu_dry, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NEEDS_MORE = {"switch_between_ranks": "there is one GPU"}
"""Figures that one GPU lacks."""


def test_every_step_takes_its_figures_on_a_gpu(tmp_path: Path) -> None:
    folders = (ROOT / "tests", ROOT / "scripts")
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "gpu_dry.report_steps", str(file)],
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    switches = [(x["ranks"], x["gen_tp"], x["received"]) for x in results.pop("between ranks")]
    assert [switch[:2] for switch in switches] == [(8, 1), (8, 2)]
    assert all(received > 0 for *_, received in switches)
    figures = [figure for step in results.values() for figure in step]
    skipped = {f["name"]: f["skipped"] for f in figures if "skipped" in f}
    assert skipped == NEEDS_MORE
    assert {figure["device"] for figure in figures} == {"cuda"}
    names = {figure["name"] for figure in figures}
    assert names >= {
        "copy_h2d_pinned", "copy_d2h_fresh", "matmul_tf32", "packed_varlen_mixed",
        "packed_flash_mixed", "sdpa_cudnn_alike", "new_length_cudnn", "decode_256",
        "eager_decode_1",
        "switch_1_to_1x1_rate", "mfu_of_datasheet", "offload_rate", "onload_rate",
        "peak_forward_backward", "activations_offload",
    }  # fmt: skip
    planned = {f["name"]: f["about"].get("planned_by_measured") for f in results["memory"]}
    for name in ("peak_build", "peak_switch", "peak_decode", "peak_update"):
        assert abs(planned[name] - 1) < 0.05, planned
    (choice,) = (f for f in figures if f["name"] == "attention_choice_bfloat16")
    assert (choice["value"], choice["about"]["reason"]) == ("flash", "flash-attn can run")
