"""docs/rlhf.md does what it says: its commands run in an empty directory; takes many minutes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.telemetry.records import read_lines

PAGE = Path(__file__).parents[1] / "docs" / "rlhf.md"
QUIET = ["telemetry.loggers=[]", "telemetry.report=false", "telemetry.progress=false"]


def commands() -> list[list[str]]:
    """The page's `hybridrl` commands in order, a continued line as one."""
    text = PAGE.read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^    hybridrl (.*)$", text, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rlhf_from_the_start_to_the_end(tmp_path: Path) -> None:
    """Each stage takes what the one before it left; accuracy is that of the task's verifier."""
    records = []
    for command in commands():
        done = subprocess.run(
            [sys.executable, "-m", "hybridrl.cli", *command, *QUIET],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        records.append(json.loads(done.stdout.splitlines()[-1]))
    sft, rm, ppo, evaluated = records
    assert 0.35 < sft["accuracy_after"] < 0.55
    assert rm["accuracy_before"] == 0.5
    assert rm["accuracy_after"] > 0.7
    # PPO's own figures are the reward model's; the last command asks the verifier.
    rewards = [line["eval/main/reward"] for line in read_lines(tmp_path / "runs/ppo/metrics.jsonl")
               if "eval/main/reward" in line]  # fmt: skip
    assert rewards[-1] > rewards[0]
    assert ppo["run"].endswith("runs/ppo")
    assert evaluated["eval_accuracy"] > sft["accuracy_after"] + 0.03
