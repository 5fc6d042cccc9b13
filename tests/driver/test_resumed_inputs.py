"""A run that resumes finds what it depends on as it was, or says what has changed."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hybridrl.config import Config, ConfigError, TinyModelConfig
from hybridrl.driver.dry_run import check_runs
from hybridrl.models.tiny import make_tiny_model
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.long

REWARD = "def score(prompt, response, answer, item):\n    return sum(map(ord, response)) % 7 / 6\n"


def write_words(file: Path, numbers: range) -> None:
    rows = [{"prompt": f"say {n}: ", "answer": str(n)} for n in numbers]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def settings(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The settings of a run of one step, in a folder with all that the run depends on."""
    folder = tmp_path_factory.mktemp("resumed")
    make_tiny_model(folder / "model", TinyModelConfig(num_layers=1), seed=0)
    write_words(folder / "words.jsonl", range(40))
    (folder / "reward.py").write_text(REWARD)
    own = ("reward.function", "data.size")
    kept = [setting for setting in tiny_run if not setting.startswith(own)]
    return [
        *kept, "cluster.ranks=1", "data=jsonl", f"data.sources.main.name={folder}/words.jsonl",
        f"reward.function={folder}/reward.py:score", f"model.path={folder}/model",
        "trainer.save_every=1", "trainer.keep_last=9", "eval.sets.main.every=1",
        f"run.dir={folder}/run", "recipe.kl_coef=0.1",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(settings: list[str], train_here: Callable[..., Any]) -> Path:
    directory = next(x.partition("=")[2] for x in settings if x.startswith("run.dir="))
    train_here(Path(directory), *settings, "trainer.steps=1")
    return Path(directory).parent


@pytest.fixture
def resumed(
    settings: list[str], folder: Path, make_config: Callable[..., Config]
) -> Callable[..., Config]:
    """`resumed(*overrides)` is the config with which the run resumes, as a dry run checks it."""

    def check(*overrides: str) -> Config:
        config = make_config(
            *settings, "cluster=processes", "trainer.steps=2", "trainer.resume=auto", *overrides
        )
        return check_runs([config], [Path(config.run.dir)])[0]

    return check


def restored(file: Path, change: Callable[[Path], object]) -> Callable[[], None]:
    """Change a file; call the result to have it as it was."""
    before = file.read_bytes()
    change(file)
    return lambda: file.write_bytes(before) and None


def with_other_weights(file: Path) -> None:
    weights = load_file(file)
    first = next(iter(weights))
    save_file({**weights, first: weights[first] + 1}, file, metadata={"format": "pt"})


def with_template(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{{ messages }}"}))


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (
            "reward.py",
            lambda file: file.write_text(f"{REWARD}# edited"),
            "reward .*reward.py:score",
        ),
        ("model/model.safetensors", with_other_weights, r"model\.path"),
        ("model/tokenizer_config.json", with_template, "tokenizer or chat template"),
        ("words.jsonl", lambda file: write_words(file, range(1, 60)), "1 rows of main are gone"),
        ("words.jsonl", lambda file: write_words(file, range(50, 99)), "40 rows of main are gone"),
    ],
)
def test_what_has_changed_is_refused_unless_a_key_says_otherwise(
    resumed: Callable[..., Config], folder: Path, caplog: pytest.LogCaptureFixture,
    name: str, change: Callable[[Path], object], named: str,
) -> None:  # fmt: skip
    restore = restored(folder / name, change)
    try:
        with pytest.raises(
            ConfigError, match=rf"^trainer\.resume=auto: .*since: .*{named}"
        ) as raised:
            resumed()
        assert "trainer.resume_changed=true resumes nonetheless" in str(raised.value)
        assert "\n" not in str(raised.value)
        with caplog.at_level(logging.WARNING):
            resumed("trainer.resume_changed=true")
        assert "changed since" in caplog.text
    finally:
        restore()
    resumed()


@pytest.mark.parametrize("setting", ["data.seed=1", "run.seed=1", "data.eval_size=9"])
def test_seed_and_size_of_the_held_out_set_are_refused(
    resumed: Callable[..., Config], setting: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting.replace('.', '[.]')}: wanted "):
        resumed(setting)


def test_an_evaluation_of_other_prompts_is_said(
    resumed: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        resumed("eval.sets.main.num_prompts=3")
    assert "eval.sets.main has other prompts than before step 1" in caplog.text


def test_a_run_of_an_earlier_version_resumes_with_one_warning(
    resumed: Callable[..., Config], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def without_digests(file: Path) -> None:
        state = json.loads(file.read_text())
        del state["inputs"], state["rows"], state["sum"]
        file.write_text(json.dumps(state))

    (folder / "run" / "rows.json").rename(folder / "rows.json")
    files = folder.glob("run/**/state.json")
    restores = [restored(file, without_digests) for file in files]
    restores.append(restored(folder / "reward.py", lambda file: file.write_text(f"{REWARD}# new")))
    try:
        with caplog.at_level(logging.WARNING):
            resumed()
    finally:
        (folder / "rows.json").rename(folder / "run" / "rows.json")
        for restore in restores:
            restore()
    (line,) = [line for line in caplog.messages if "earlier version" in line]
    assert "whether they have changed since is not known" in line


def test_another_function_judges_from_where_the_run_goes_on(
    folder: Path, settings: list[str], train_here: Callable[..., Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    own = [setting for setting in settings if not setting.startswith("run.dir=")]
    again = [*own, "trainer.steps=2", "trainer.resume=auto", "eval.sets.main.every=null"]
    other = REWARD.replace("% 7 / 6", "% 5 / 9")
    restore = restored(folder / "reward.py", lambda file: file.write_text(other))
    try:
        with pytest.raises(ConfigError, match=r"^trainer\.resume=auto: .*reward .*reward.py:score"):
            train_here(run, *again)
        train_here(run, *again, "trainer.resume_changed=true")
    finally:
        restore()
    lines = [line for line in read_lines(run / "samples.jsonl") if line["phase"] == "rl"]
    assert {line["step"] for line in lines} == {1, 2}
    for line in lines:
        total = sum(map(ord, line["response"]))
        assert line["reward"] == pytest.approx(
            total % 7 / 6 if line["step"] == 1 else total % 5 / 9
        )


def test_appended_rows_are_trained_on_and_the_held_out_stay_so(
    folder: Path, settings: list[str], train_here: Callable[..., Any], tmp_path: Path
) -> None:
    def of(run: Path, phase: str) -> dict[int, set[str]]:
        prompts: dict[int, set[str]] = {}
        for line in read_lines(run / "samples.jsonl"):
            if line["phase"] == phase:
                prompts.setdefault(line["step"], set()).add(line["prompt"])
        return prompts

    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    own = [setting for setting in settings if not setting.startswith("run.dir=")]
    restore = restored(folder / "words.jsonl", lambda file: write_words(file, range(300)))
    try:
        train_here(run, *own, "trainer.steps=7", "trainer.resume=auto")
    finally:
        restore()
    evaluated = of(run, "evaluation")
    assert {*evaluated} >= {0, 1, 7}
    assert all(prompts == evaluated[0] for prompts in evaluated.values()), "one set throughout"
    assert len(evaluated[0]) == 8
    trained = set.union(*of(run, "rl").values())
    assert not trained & evaluated[0]
    assert trained & {f"say {n}: " for n in range(40, 300)}, "new rows are trained on"
