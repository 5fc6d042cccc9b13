"""`hybridrl.train` from Python, and the example notebook, cell by cell."""

import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import hybridrl
from hybridrl.telemetry.records import read_lines

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "examples" / "notebook.ipynb"
SHORT = [
    "warm_start.steps=2", "trainer.steps=2", "trainer.prompts_per_step=4", "data.eval_size=4",
    "data.size=50", "telemetry.loggers=[]",
]  # fmt: skip


def test_settings_that_cannot_work_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hybridrl.ConfigError, match=r"^recipe=grop: wanted one of"):
        hybridrl.train(["recipe=grop"])
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(hybridrl.ConfigError, match=r"^run.dir=.*: wanted a directory without"):
        hybridrl.train(["run.dir=before"])
    assert list(tmp_path.iterdir()) == [tmp_path / "before"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hybridrl.nothing


def test_metrics_are_a_table_and_are_drawn(tmp_path: Path) -> None:
    rows = [{"step": s, "time": s, "phase": "rl", "reward_mean": s / 4} for s in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = hybridrl.Result(tmp_path, {})
    assert list(result.metrics["reward_mean"]) == [0.25, 0.5, 0.75, 1.0]
    assert list(result.metrics.index) == [1, 2, 3, 4]
    with pytest.raises(hybridrl.ConfigError, match=r"^plot=kl: wanted one of .*reward_mean"):
        result.plot("kl")
    (axes,) = result.plot().axes
    assert list(axes.lines[0].get_ydata()) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.layouts
def test_the_example_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_here: Callable[..., Any]
) -> None:
    """As Jupyter runs it, but with a shorter run; `train_here` has the ranks' processes ready."""
    monkeypatch.chdir(tmp_path)
    names = run_cells(cell for cell in code_cells() if "import tinker" not in cell)
    assert names["result"].run_dir == tmp_path / "runs" / "notebook"
    lines = read_lines(tmp_path / "runs" / "notebook" / "metrics.jsonl")
    assert len(names["result"].metrics) == len({line["step"] for line in lines}) == 4
    assert (tmp_path / "runs" / "notebook" / ".hydra" / "config.yaml").is_file()
    assert 0 <= names["sampled"].summary["eval/main/pass@4"] <= 1


@pytest.mark.tinker
def test_the_example_notebook_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_here: Callable[..., Any]
) -> None:
    """The cell with Tinker's SDK, on the model of the run."""
    pytest.importorskip("tinker")
    if version("tinker").startswith("0.25."):
        pytest.skip("the methods of SDK 0.25 give clients, those of the newest futures of them")
    monkeypatch.chdir(tmp_path)
    first, *_, serves = code_cells()
    assert "import tinker" in serves
    names = run_cells([first, serves])
    assert names["losses"][-1] < names["losses"][0] / 2
    assert 1 <= len(names["drawn"].sequences[0].tokens) <= 3
    assert (tmp_path / "runs" / "served" / "api_key").is_file()


def code_cells() -> list[str]:
    """The notebook's cells of code."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cells(cells: Iterable[str]) -> dict[str, Any]:
    """Run cells with a short training; the names that they leave."""
    names: dict[str, Any] = {}
    for cell in cells:
        source = cell.replace('"trainer.steps=40"', ", ".join(map(repr, SHORT)))
        exec(source.replace("num_samples=4", 'num_samples=4", "data.eval_size=4'), names)
    return names
