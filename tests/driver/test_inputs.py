"""What a run depends on: files are found without running their code."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_layers import ALLOWED

from hybridrl.driver.inputs import basis_of, changed_inputs, inputs_of

NO_DATA: Any = SimpleNamespace(weights={}, train=[])


def judges(config: Any) -> list[str]:
    names = inputs_of(config, NO_DATA)["code"]
    return [name for name in names if not name.startswith(("hybridrl/", "recipe "))]


OF_A_RUN = {
    "__init__", "cli", "compat", "conf", "costs", "doctor", "environments", "jobs", "notebook",
    "pipelines", "plan", "recipes", "replay", "runtime", "sandbox", "serving", "telemetry",
}  # fmt: skip
"""Rooms whose code decides where and when a run does something, or is counted by its own name."""


def test_every_room_counts_or_is_known_not_to(make_config: Callable[..., Any]) -> None:
    names = inputs_of(make_config(), NO_DATA)["code"]
    rooms = {name.removeprefix("hybridrl/") for name in names if name.startswith("hybridrl/")}
    assert rooms | OF_A_RUN == ALLOWED.keys()
    assert not rooms & OF_A_RUN


@pytest.mark.long
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


def test_the_modules_that_a_function_imports_count(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    """Modules below its file's folder count, also those that these import; no others do."""
    folder = tmp_path / "mine"
    (folder / "parts").mkdir(parents=True)
    (folder / "judge.py").write_text("import json\nimport outside\nfrom parts import words")
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "words.py").write_text("from .letters import LETTERS")
    for file in (folder / "parts" / "letters.py", folder / "other.py", tmp_path / "outside.py"):
        file.write_text("LETTERS = 'ab'")
    function = f"reward.function={folder}/judge.py:score"
    config = make_config("reward=function", function, f"run.dir={tmp_path}")

    def digest() -> str:
        return inputs_of(config, NO_DATA)["code"][f"reward {folder}/judge.py:score's modules"]

    before = digest()
    for file in (tmp_path / "outside.py", folder / "other.py"):
        file.write_text("LETTERS = 'c'")
        assert digest() == before
    (folder / "parts" / "letters.py").write_text("LETTERS = 'c'")
    assert digest() != before


def test_a_file_of_an_environments_calls_counts(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "schema.json"
    settings = (
        "environment=tools",
        "environment.path=a:T",
        f"environment.tool_calls={file}",
        f"run.dir={tmp_path}",
    )
    digests = set()
    for text in ("{}", '{"type": "object"}'):
        file.write_text(text)
        digests.add(basis_of(make_config(*settings))["code"][f"environment.tool_calls {file}"])
    assert len(digests) == 2


def test_all_files_of_a_recipes_folder_count(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    config = make_config(f"run.dir={tmp_path}")
    config.recipe["target"] = f"{tmp_path}/mine/__init__.py:mine"
    digests = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "mine" / "loss.py").write_text(text)
        digests |= {x for name, x in basis_of(config)["code"].items() if name.startswith("recipe ")}
    assert len(digests) == 2


def test_the_template_of_a_reward_model_counts(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    """It reads text, in its own template."""
    config = make_config("reward=model", f"reward.model={tmp_path}", f"run.dir={tmp_path}")
    digests = set()
    for text in ("{{ messages }}", "other"):
        (tmp_path / "chat_template.jinja").write_text(text)
        digests.add(basis_of(config)["models"]["reward.model's tokenizer or chat template"])
    assert len(digests) == 2


def test_a_judge_of_an_evaluation_set_may_come_and_go() -> None:
    before = {"code": {"reward a.py:f": "1", "eval.sets.main.reward b.py:f": "2"}}
    now = {"code": {"reward a.py:f": "1", "eval.sets.hard.reward c.py:f": "3"}}
    assert changed_inputs({"inputs": before}, now, ()) == []
    now["code"]["reward a.py:f"] = "4"
    assert changed_inputs({"inputs": before}, now, ()) == ["reward a.py:f"]
