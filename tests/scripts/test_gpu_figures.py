"""Estimates beside measured figures, the reports that are kept, and their tables in docs/gpu.md."""

import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_modules import load_script

from hybridrl.config import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    return load_script("gpu_figures.py")


def figure(name: str, value: Any, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "about": {}, "device": "cuda"}


def step(*figures: dict[str, Any], **others: Any) -> dict[str, Any]:
    own = {"status": "done", "reason": "", "seconds": 1.0, "host": "a", "device": "cuda"}
    return own | {"figures": [*figures], "details": {}} | others


def report(card: str = "NVIDIA H100 80GB HBM3", **steps: Any) -> dict[str, Any]:
    """A report of a GPU."""
    machine = {
        "gpus": [{"name": card, "memory": 80 * 2**30, "capability": "9.0"}], "problem": "",
        "cuda": "13.0", "versions": {"torch": "2.11.0", "transformers": "5.17.0"}, "compiler": "",
        "python": "3.12.3", "cpus": 16, "cpu": "a CPU",
    }  # fmt: skip
    head = {"source": "a", "commit": "abc1234", "device": "cuda", "model": "1.5b"}
    head |= {"measured": "2026-11-28T13:50:39Z"}
    return head | {"machine": machine, "steps": steps}


DECODED = step(
    figure("eager_decode_1", 60.0, "tokens/s"), figure("eager_decode_64", 11_500.0, "tokens/s")
)
MOVED = step(figure("offload_s", 0.2, "s"), figure("onload_s", 30.0, "s"))
REPORT = report(
    decode_without_graphs=DECODED, offload=MOVED, flops=step(status="failed", reason="no memory")
)


def test_estimates_stand_beside_what_was_measured(script: ModuleType) -> None:
    rows = {row["figure"]: row for row in script.compared(REPORT)}
    assert len(rows) == 18
    slow = rows["eager_decode_1"]
    assert (slow["estimate"], slow["measured"], slow["off_by"]) == ([215, 215], 60.0, 0.279)
    assert slow["follows"].startswith("decoding is bound by kernel launches")
    assert (rows["eager_decode_64"]["follows"], rows["eager_decode_64"]["off_by"]) == ("", 0.92)
    # seconds are better below
    assert rows["offload_s"]["follows"].startswith("better than estimated")
    assert rows["onload_s"]["follows"].startswith("copies are pageable")
    assert rows["matmul_bfloat16"]["measured"] is rows["matmul_bfloat16"]["follows"] is None


@pytest.mark.parametrize("low", [1.0, 50.0])
def test_within_a_range_nothing_follows(low: float, script: ModuleType) -> None:
    from gpu_steps.estimates import Estimate

    estimate = Estimate(low, 2 * low, "GB/s", "worse")
    assert [estimate.off_by(x * low) for x in (0.5, 1, 1.5, 2, 3)] == [0.5, 1, 1, 1, 1.5]
    follows = [estimate.follows(x * low) for x in (0.79, 0.81, 2.4, 2.6)]
    assert [text.partition(":")[0] for text in follows] == [
        "worse", "", "", "better than estimated",
    ]  # fmt: skip


def test_the_table_calls_them_estimates(script: ModuleType) -> None:
    from gpu_steps.table import table

    text = table(REPORT)
    note, _, rest = text.partition("before any was measured.\n\n")
    assert "Estimates are arithmetic for one H100" in note
    head, *rows = [re.split(" {2,}", line) for line in rest.strip().splitlines()]
    assert head == ["step", "figure", "estimated", "measured", "unit", "what follows"]
    assert [
        "decode_without_graphs",
        "eager_decode_64",
        "1.1e+04",
        "1.15e+04",
        "tokens/s",
    ] not in rows
    assert ["decode_without_graphs", "eager_decode_64", "12,500", "11,500", "tokens/s"] in rows
    assert ["flops", "matmul_bfloat16", "700-800", "not measured", "TFLOP/s"] in rows


@pytest.mark.parametrize("changes", [
    {"model": "tiny"}, {"device": "cpu"}, {"card": "NVIDIA A100-SXM4-80GB"},
])  # fmt: skip
def test_another_card_or_model_is_not_held_against_them(
    changes: dict[str, str], script: ModuleType
) -> None:
    from gpu_steps.table import table

    other = report(changes.get("card", "NVIDIA H100"), decode_without_graphs=DECODED) | changes
    assert script.compared(other) == []
    assert "stimate" not in table(other)


def test_the_table_names_a_missing_compiler_and_untried_versions(script: ModuleType) -> None:
    from gpu_steps.table import table

    other = report(decode_without_graphs=DECODED)
    other["machine"] |= {"compiler": "no gcc", "versions": {"torch": "2.10.0"}}
    lines = table(other).splitlines()
    assert "No C compiler, which Triton's kernels need: no gcc" in lines
    assert "torch 2.10.0 is older than what was tried: 2.11.0 to 2.14.1" in lines


def test_a_report_is_kept_under_its_card_and_date(script: ModuleType, tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    report_file.write_text(json.dumps(REPORT))
    os.utime(report_file, (0, 86_400 * 365))  # that of a copy: it does not count
    kept = script.keep(report_file, tmp_path / "figures")
    assert kept == tmp_path / "figures" / "nvidia-h100-80gb-hbm3-20261128.json"
    assert json.loads(kept.read_text()) == REPORT
    text = script.section(tmp_path / "figures")
    assert "1 x NVIDIA H100 80GB HBM3, CUDA 13.0, torch 2.11.0, transformers 5.17.0" in text
    assert "| `decode_without_graphs` | `eager_decode_64` | 11,500 tokens/s | 12,500 |  |" in text
    assert re.search(r"\| `offload` \| `onload_s` \| 30 s \| 0.33-0.4 \| copies are pageable", text)
    assert "| `flops` | | failed | | no memory |" in text
    page = script.written(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n", text)
    assert page == f"before\n{script.BEGIN}\n\n{text}\n\n{script.END}\nafter\n"


def test_two_reports_of_a_day_are_both_kept(script: ModuleType, tmp_path: Path) -> None:
    other = report(decode_without_graphs=step(figure("eager_decode_1", 70.0, "tokens/s")))
    kept = []
    for content in (REPORT, other, REPORT, other):
        file = tmp_path / "report.json"
        file.write_text(json.dumps(content))
        kept.append(script.keep(file, tmp_path / "figures"))
    stem = "nvidia-h100-80gb-hbm3-20261128"
    assert [path.name for path in kept] == [f"{stem}.json", f"{stem}-2.json"] * 2
    assert [json.loads(path.read_text()) for path in kept[:2]] == [REPORT, other]
    text = script.section(tmp_path / "figures")
    assert text.count("commit abc1234, measured 2026-11-28T13:50:39Z.") == 2
    assert "| `eager_decode_1` | 60 tokens/s |" in text
    assert "| `eager_decode_1` | 70 tokens/s |" in text


TRAINED = {"step": 1, "step_s": 2.5, "tokens_per_s": 12_000.0, "reward_mean": 0.4}
FIRST_RUN: dict[str, Any] = {
    "report": {"state": "done", "seconds": 300},
    "demo": {"state": "done", "seconds": 40, "steps": [TRAINED, TRAINED | {"step": 2}]},
    "large": {"state": "failed", "seconds": 9, "reason": "no memory", "steps": []},
}


def test_a_first_run_is_kept_with_its_trainings(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    first_run = tmp_path / "first_run.json"
    first_run.write_text(json.dumps(FIRST_RUN))
    kept = script.keep(first_run, tmp_path / "figures")
    trainings = {name: FIRST_RUN[name] for name in ("demo", "large")}
    assert json.loads(kept.read_text()) == REPORT | {"trainings": trainings}
    text = script.section(tmp_path / "figures")
    assert "| `demo` | 2 | 2.5 | 12,000 |  |  |  |  |  | 0.4 |  |" in text
    assert text.endswith("\n`large`: failed: no memory.")
    assert "| `decode_without_graphs` | `eager_decode_64` | 11,500 tokens/s | 12,500 |  |" in text
    (tmp_path / "report.json").unlink()
    with pytest.raises(ConfigError, match=r"first_run\.json beside its report"):
        script.keep(first_run, tmp_path / "figures")


ON_CPU = step(figure("eager_decode_1", 60.0, "tokens/s"), device="cpu")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (report(decode_without_graphs=DECODED) | {"device": "cpu"}, "figures of a GPU alone"),
        (report(decode_without_graphs=ON_CPU), "figures of a GPU alone"),
        (report(decode_without_graphs=DECODED, train=ON_CPU), "figures of a GPU alone"),
        (report(other=DECODED), "of this source tree"),
        ({"steps": {}}, "of this source tree"),
        (
            report(decode_without_graphs=DECODED) | {"measured": "today"},
            "whose `measured` has the form",
        ),
        ({"report": {}, "demo": {}, "large": {}}, "the first_run.json of gpu_first_run.sh"),
        ([], "of this source tree"),
        (None, "the JSON of gpu_report.py, or first_run.json beside"),
    ],
)
def test_figures_of_a_cpu_and_other_files_are_refused(
    content: Any, reason: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    report_file = tmp_path / "report.json"
    report_file.write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ConfigError):
        script.keep(report_file, tmp_path / "figures")
    monkeypatch.setattr(script, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(sys, "argv", ["gpu_figures.py", str(report_file)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"REPORT={report_file}: wanted ")
    assert reason in line
    assert not (tmp_path / "figures").exists()


def test_the_page_has_what_is_kept(script: ModuleType) -> None:
    """`python scripts/gpu_figures.py` writes it."""
    page = script.PAGE.read_text()
    assert page == script.written(page, script.section(script.FIGURES))
    for file in script.FIGURES.glob("*.json"):
        kept = json.loads(file.read_text())
        assert kept["device"] == "cuda"
        for name, taken in kept["steps"].items():
            for each in taken["figures"]:
                assert "value" not in each or f"| `{name}` | `{each['name']}` |" in page
