"""What a run depends on: files are found without running their code."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.driver.inputs import inputs_of

NO_DATA: Any = SimpleNamespace(weights={}, train=[])


def judges(config: Any) -> list[str]:
    names = inputs_of(config, NO_DATA)["code"]
    return [name for name in names if not name.startswith(("hybridrl/", "recipe "))]


def test_a_function_counts_where_it_judges(
    make_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function counts where its package raises, or does not exist: then it has no file."""
    package = tmp_path / "judges_of_mine" / "more"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "mine.py").write_text("def score(prompt, response, answer, item): return 1.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    run_dir = f"run.dir={tmp_path}"
    config = make_config(
        "reward=function", "reward.function=judges_of_mine.more.mine:score", run_dir
    )
    name = "reward judges_of_mine.more.mine:score"
    assert judges(config) == [name]
    before = inputs_of(config, NO_DATA)["code"][name]
    (package / "mine.py").write_text("def score(prompt, response, answer, item): return 0.0")
    assert inputs_of(config, NO_DATA)["code"][name] != before
    for gone in ("none.of.these:score", f"{tmp_path}/none.py:score"):
        assert judges(make_config("reward=function", f"reward.function={gone}", run_dir))
        assert judges(make_config("reward=exact", f"reward.function={gone}", run_dir)) == []
