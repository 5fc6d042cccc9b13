"""`make bench-moe` with a tiny model: every line of it, of the agreed shape."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "moe.py"


@pytest.mark.slow
def test_every_line() -> None:
    options = ["--shape", "tiny", "--rounds", "1", "--seeds", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    records = {record["name"]: record for record in map(json.loads, lines)}
    steps = [f"ep{ep}_vs_dense" for ep in (1, 2, 4)] + [f"ep{ep}_vs_ep1" for ep in (2, 4)]
    others = ("vs_without_replay", "vs_dense", "equal_weights_vs_dense")
    gaps = [f"{kind}_{other}" for kind in ("mean", "max") for other in others]
    wanted = [f"moe_gap_{gap}" for gap in gaps]
    assert list(records) == wanted + [f"moe_train_tokens_per_s_{step}" for step in sorted(steps)]
    for record in records.values():
        assert list(record)[:6] == ["name", "value", "unit", "baseline", "ratio", "better"]
        assert min(record["value"], record["baseline"]) > 0
    assert 0 < records[wanted[0]]["other_experts_share"] < 1
