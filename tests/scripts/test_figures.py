"""Figures of benches: what is kept, and that docs/benchmarks.md shows it."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import SCRIPTS, load_script

BENCH = """
import json, sys
print("so far so good")
print(json.dumps({"name": "a_vs_b", "value": 12345.6, "unit": "s", "ratio": 0.5, "emulated": True}))
print(json.dumps({"name": "c_vs_d", "value": 2, "unit": "s", "ratio": 0.25}))
bound = {"bound": 8000, "of_bound": 0.9}
print(json.dumps({"name": "e_vs_f", "value": 7200, "unit": "tokens/s", "ratio": 3, **bound}))
print(json.dumps({"name": "g_vs_h", "ratio": 0.5, "ratio_bound": 0.4}))
print(json.dumps({"name": "i", "value": 4, "unit": "ms", "bound_s": 0.003, "of_bound": 0.75}))
print(json.dumps({"name": "j", "value": 5, "unit": "s", "datasheet": 4.5, "emulated": False}))
print(json.dumps({"name": "async_k", "value": 6, "unit": "s"}))
print(json.dumps({"name": "took", "s": 3}))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a page and a folder of its own."""
    module = load_script("figures.py")
    (tmp_path / "page.md").write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
    (tmp_path / "bench.py").write_text(BENCH)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(module, "FIGURES", tmp_path / "figures")
    return module


def call(script: ModuleType, folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["figures.py", "mine", str(folder / "bench.py"), code])
    script.main()


def test_a_bench_is_kept_and_shown(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    call(script, tmp_path, "0", monkeypatch)
    assert capfd.readouterr().out.startswith("so far so good\n{")
    kept = json.loads((tmp_path / "figures/mine.json").read_text())
    assert kept["command"] == "make bench-mine ARGS=0"
    assert re.fullmatch(r"\d+ CPUs \(.*\), \d+ GB, .*, torch [\d.]+\S*", kept["machine"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["date"])
    names = ["a_vs_b", "c_vs_d", "e_vs_f", "g_vs_h", "i", "j", "async_k", "took"]
    assert [record["name"] for record in kept["figures"]] == names
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("before\n")
    assert f"\n- {kept['machine']}: `make bench-mine ARGS=0` ({kept['date']})\n" in page
    # Each kind has a table of its own, with the columns that it needs.
    assert (
        page.partition("| figure |")[2]
        == f"""\
 ours | over the baseline |
|---|---|---|
| `c_vs_d` | 2 s | 0.25 |
| `e_vs_f` | 7,200 tokens/s, 0.9 of the bound 8,000 tokens/s | 3 |
| `g_vs_h` | bound 0.4 of the baseline | 0.5 |
| `i` | 4 ms, 0.75 of the bound 0.003 s |  |

| emulated figure | ours | over the baseline |
|---|---|---|
| `a_vs_b` | 12,346 s (emulated) | 0.5 |

| predicted figure | ours |
|---|---|
| `j` | 5 s (predicted), bound 4.5 s |

{script.END}
after
"""
    )
    assert "took" not in page
    assert "async_k" not in page  # docs/async.md shows it
    assert "old" not in page


def test_a_bench_that_fails_is_not_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        call(script, tmp_path, "3", monkeypatch)
    assert ended.value.code == 3
    assert not (tmp_path / "figures").exists()


def test_the_page_shows_what_is_kept() -> None:
    """`python scripts/figures.py` writes it."""
    script = load_script("figures.py")
    assert script.tables(script.FIGURES) in script.PAGE.read_text()
    files = sorted(script.FIGURES.glob("*.json"))
    assert len(files) > 10
    for file in files:
        kept = json.loads(file.read_text())
        assert {"command", "machine", "commit", "date", "figures"} <= kept.keys()


def test_the_readme_quotes_a_kept_figure() -> None:
    (record,) = json.loads((SCRIPTS.parent / "docs/figures/smollm2.json").read_text())["figures"]
    quoted = f"from {record['baseline']} to {record['value']} in {record['seconds']} seconds"
    for page in ("README.md", "docs/start.md"):
        assert quoted in (SCRIPTS.parent / page).read_text()


def test_every_bench_is_kept_by_its_target() -> None:
    makefile = (SCRIPTS.parent / "Makefile").read_text()
    targets = re.findall(r"^bench(-[a-z-]+)?:.*\n\t@(.*)$", makefile, re.MULTILINE)
    assert len(targets) > 15
    for name, recipe in targets:
        assert recipe.startswith(f"$(KEEP) {name.removeprefix('-') or 'bench'} scripts/bench/")
