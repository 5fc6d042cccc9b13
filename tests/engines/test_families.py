"""The table of docs/models.md is what its command computes."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from script_modules import load_script

from hybridrl.config import ConfigError
from hybridrl.engines.probe import check_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "model_families.py"
# One of each: norms over all heads, gate and up in one layer, scaled logits, experts, shared ones.
NEWER = ("bailing_hybrid", "falcon_h1", "kimi_linear", "olmo_hybrid")  # than the pinned one
QUICK = ("olmo2", "glm4", "granite", "qwen3_moe", "ernie4_5_moe")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The command, as a module."""
    return load_script("model_families.py")


def rows() -> list[tuple[str, ...]]:
    """The cells of every family in the docs, where families of equal answers share a line."""
    text = (ROOT / "docs" / "models.md").read_text()
    table = text[text.index("<!-- begin") : text.index("<!-- end")].splitlines()
    cells = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]
    return [
        (family, *answers) for families, *answers in cells[1:] for family in families.split(", ")
    ]


@pytest.mark.parametrize("family", [*QUICK, *NEWER])
def test_a_row(script: ModuleType, family: str) -> None:
    if not script.has_family(family):
        pytest.skip(f"transformers {transformers.__version__} does not compute {family}")
    answers = script.one_process(script.config_of(family))
    cells = ["no" if answers[engine] else "yes" for engine in ("train", "native")]
    (row,) = (row for row in rows() if row[0] == family)
    assert cells == [*row[1:3]], answers


def test_families_of_equal_answers_share_a_line(script: ModuleType) -> None:
    answers = ("yes", "yes", "no", "yes", "yes", "dense")
    table = script.render(
        [(("a", *answers), []), (("b", *answers[:5], "yes"), []), (("c", *answers), [])]
    )
    assert table.splitlines()[2:] == [
        "| a, c | yes | yes | no | yes | yes | dense |",
        "| b | yes | yes | no | yes | yes | yes |",
    ]


def test_the_documented_rows_are_those_of_the_page(script: ModuleType) -> None:
    """`--check` compares with them."""
    assert [script.documented()[row[0]] for row in rows()] == rows()


def test_the_table_is_whole(script: ModuleType) -> None:
    """Every family of the command, at least 30 and 8 of them with experts, each once."""
    assert sorted(row[0] for row in rows()) == sorted(script.FAMILIES)
    assert len(rows()) >= 30
    assert sum(row[-1] not in ("dense", "no") for row in rows()) >= 8


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon_h1", "its model does not hand keywords"),
        ("olmo_hybrid", "its mixers take OlmoHybridDynamicCache"),
    ],
)
def test_a_transformers_that_is_too_old_for_a_family(
    script: ModuleType, family: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what is wrong; a train engine, too, looks at the states of mixers."""
    if script.has_family(family):
        pytest.skip(f"transformers {transformers.__version__} computes {family}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for engine in ("training", "the native rollout engine"):
        line = rf"^model.path={family}: wanted a model that {engine} computes right .*{reason}"
        with pytest.raises(ConfigError, match=line):
            check_model(
                script.config_of(family),
                "model.path",
                train=engine == "training",
                native=engine != "training",
            )


@pytest.mark.models
@pytest.mark.timeout(3600)
def test_the_whole_table() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
