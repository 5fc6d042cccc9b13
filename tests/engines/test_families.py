"""The table of docs/models.md is what its command computes."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "model_families.py"
# One of each: norms over all heads, gate and up in one layer, scaled logits, experts, shared ones.
QUICK = ("olmo2", "glm4", "granite", "qwen3_moe", "ernie4_5_moe")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The command, as a module."""
    return load_script("model_families.py")


def rows() -> dict[str, tuple[str, ...]]:
    """The cells of every family in the docs."""
    text = (ROOT / "docs" / "models.md").read_text()
    table = text[text.index("<!-- begin") : text.index("<!-- end")].splitlines()
    cells = [tuple(line.strip("| ").split(" | ")) for line in table if line.startswith("| ")]
    return {row[0]: row for row in cells[1:]}


@pytest.mark.parametrize("family", QUICK)
def test_a_row(script: ModuleType, family: str) -> None:
    answers = script.one_process(script.config_of(family))
    cells = ["no" if answers[engine] else "yes" for engine in ("train", "native")]
    assert cells == list(rows()[family][1:3]), answers


def test_the_table_is_whole(script: ModuleType) -> None:
    """Every family of the command, at least 30 and 8 of them with experts, each once."""
    assert list(rows()) == list(script.FAMILIES)
    assert len(rows()) >= 30
    assert sum(row[-1] not in ("dense", "no") for row in rows().values()) >= 8


@pytest.mark.models
@pytest.mark.timeout(3600)
def test_the_whole_table() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
