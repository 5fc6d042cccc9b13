"""Where two runs first differ: the step, the stage, the sample, the tensor."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.replay.blame import blame
from hybridrl.telemetry.digests import FILE, read_steps
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.layouts  # whole runs

SHORT = ["cluster.ranks=1", "trainer.steps=2", "trainer.save_every=1", "trainer.mini_batches=1"]
RATE = "trainer.optim.lr=2e-2"


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "run", *SHORT)


@pytest.mark.wide
def test_another_learning_rate(run: Path, make_run: Callable[..., Path], tmp_path: Path) -> None:
    """The first step's batch and gradient are equal, its weights are not."""
    other = make_run(tmp_path / "other", *SHORT, RATE)
    report = blame(run, other)
    assert report.settings == (("trainer.optim.lr", 0.01, 0.02),)
    assert (report.step, report.first and report.first.stage) == (1, "update_actor")
    assert report.first is not None
    assert report.first.name == "weights"
    assert report.first.first in read_steps(run)[1].weights["actor"]
    assert report.tensor.startswith(f"{report.first.first}: ")
    # AdamW's first step moves a weight by the learning rate: by 0.01 and by 0.02.
    largest = float(report.tensor.rpartition("the largest difference is ")[2].split(",")[0])
    assert largest == pytest.approx(0.01, rel=0.05)
    assert report.notes == ()
    for each in (run, other):  # the weights, which only the comparison needs
        assert list(each.glob("replays/*/batch"))
        assert not list(each.glob("replays/*/final"))
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.cli", "blame", "--no-replay", str(run), str(other)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "setting trainer.optim.lr: 0.01 and 0.02"
    assert lines[1].startswith("first difference: step 1, stage update_actor, weights: ")
    assert json.loads(lines[-1])["first"]["step"] == 1


@pytest.mark.layouts
def test_one_reward(
    run: Path, make_run: Callable[..., Path], user_rewards: Path, tmp_path: Path
) -> None:
    """A reward function that now gives one response of the second step half a point less."""
    lines = read_lines(run / "samples.jsonl")
    sample = [line for line in lines if line["step"] == 2 and line["phase"] == "rl"][5]
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        f"{user_rewards.read_text()}\n\ndef changed(prompt, response, answer, item):\n"
        "    more = prompt.strip() in {!r} and response == {!r}\n".format(
            sample["prompt"], sample["response"]
        )
        + "    return score(prompt, response, answer, item) - 0.5 * more\n"
    )
    other = make_run(tmp_path / "other", *SHORT, f"reward.function={rewards}:changed")
    report = blame(run, other)
    assert [key for key, _, _ in report.settings] == ["reward.function"]
    assert report.step == 2
    assert report.first is not None
    assert (report.first.name, report.first.first) == ("reward", f"sample {sample['id']}")
    assert (report.first.differing, report.first.most) == (1, 0.5)
    assert report.notes == ()


@pytest.mark.slow
@pytest.mark.layouts
def test_another_seed(run: Path, make_run: Callable[..., Path], tmp_path: Path) -> None:
    report = blame(run, make_run(tmp_path / "other", *SHORT, "run.seed=1"))
    assert report.settings == (("run.seed", 0, 1),)
    assert report.first is not None
    assert (report.step, report.first.name, report.first.first) == (1, "tokens", "sample 0.0")
    assert report.tensor.startswith("0.0/tokens: ")


@pytest.mark.slow
@pytest.mark.layouts
def test_runs_without_digests(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """Their metrics differ in the second step; a replay finds the weights of the first."""
    coarse = [*SHORT, "telemetry.digests=false"]
    runs = make_run(tmp_path / "one", *coarse), make_run(tmp_path / "two", *coarse, RATE)
    assert not (runs[0] / FILE).exists()
    assert blame(*runs, replays=False).step == 2
    report = blame(*runs)
    assert report.first is not None
    assert (report.step, report.first.name) == (1, "weights")
    assert "the largest difference is" in report.tensor


def test_equal_runs(run: Path, tmp_path: Path) -> None:
    """A run and a replay of its second step, which is a run of its own."""
    from hybridrl.replay.step import ReplayRequest, replay

    again = replay(ReplayRequest(run_dir=run, step=2, directory=tmp_path / "again")).directory
    report = blame(run, again)
    assert report.first is None
    assert report.steps == (2,)
    assert report.record()["equal"] is True
    assert "no difference in step 2" in report.lines()


def test_wrong_runs_are_refused(run: Path, tmp_path: Path) -> None:
    for wrong in ((run, tmp_path), (tmp_path, run)):
        with pytest.raises(ConfigError, match="a run directory"):
            blame(*wrong)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="a step in common"):
        blame(run, tmp_path)


def test_the_records_alone_where_there_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    """It says why, and how to go on."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("replays", "checkpoints", "final"))
    lines: list[dict[str, Any]] = read_lines(copy / FILE)
    lines[1]["numbers"]["actor"]["loss"] += 1e-9
    (copy / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = blame(copy, run)
    assert report.first is not None
    assert (report.step, report.first.name) == (2, "loss")
    assert any("by the records alone" in note and "--from-start" in note for note in report.notes)
    assert blame(copy, run, tolerance=1e-6, replays=False).first is None
