"""A step of a run again, bit for bit or as near as float order allows; and what is refused."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from whole_runs import goes_on

from hybridrl.config import ConfigError
from hybridrl.replay.step import (
    Promise,
    ReplayReport,
    ReplayRequest,
    ReplayStage,
    replay,
)
from hybridrl.telemetry.digests import FILE, read_steps
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.layouts  # whole runs

TALKING = Path(__file__).parents[1] / "talking.py"
RLOO = ("recipe=rloo", "trainer.mini_batches=1")


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A strict run of five steps on one rank, with checkpoints after 2 and 4."""
    return make_run(tmp_path_factory.mktemp("run") / "run", "cluster.ranks=1")


@pytest.fixture(scope="module")
def run_of_two(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A strict run of five steps on two ranks."""
    return make_run(tmp_path_factory.mktemp("run") / "run", "cluster.ranks=2")


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("step", [5, pytest.param(4, marks=pytest.mark.slow)])
def test_two_ranks(run_of_two: Path, step: int) -> None:
    report = replay(ReplayRequest(run_dir=run_of_two, step=step))
    assert report.promise is Promise.bits
    assert differing(report) == []
    batch = ReplayRequest(run_dir=run_of_two, step=step, stage=ReplayStage.train)
    assert differing(replay(batch)) == []


def differing(report: ReplayReport) -> list[str]:
    return [f"{c.stage} {c.name}: {c.verdict}" for c in report.comparisons if c.differing]


def files(run: Path) -> dict[str, bytes]:
    """All that is in a run's directory but replays."""
    kept = (x for x in run.rglob("*") if x.is_file() and "replays" not in x.parts)
    return {str(x): x.read_bytes() for x in kept}


@pytest.mark.parametrize("step", [5, 4, 1])
def test_bit_for_bit(run: Path, step: int) -> None:
    """Right after a checkpoint, a step later, and from the start; the run's own files stay."""
    before = files(run)
    report = replay(ReplayRequest(run_dir=run, step=step))
    assert report.begun_after == {5: 4, 4: 2, 1: 0}[step]
    assert report.promise is Promise.bits
    assert report.as_promised
    assert differing(report) == []
    names = {comparison.name for comparison in report.comparisons}
    wanted = {"tokens", "log_probs", "reference_log_probs", "reward", "advantage", "loss"}
    assert names >= wanted | {"grad_norm", "weights", "samples"}
    assert all(comparison.compared for comparison in report.comparisons)
    assert read_steps(report.directory).keys() == set(range(report.begun_after + 1, step + 1))
    assert files(run) == before


@pytest.mark.layouts
def test_a_changed_record_is_named(run: Path, tmp_path: Path) -> None:
    """The comparison can fail: a bit of one weight, of one reward."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("replays"))
    lines = read_lines(copy / FILE)
    sample = next(iter(lines[4]["samples"]))
    lines[4]["samples"][sample]["reward"] += 0.25
    weight = next(iter(lines[4]["weights"]["actor"]))
    lines[4]["weights"]["actor"][weight][0] = "0" * 16
    (copy / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = replay(ReplayRequest(run_dir=copy, step=5))
    assert not report.as_promised
    assert [(c.name, c.first) for c in report.comparisons if c.differing] == [
        ("reward", f"sample {sample}"),
        ("weights", weight),
    ]
    assert report.first is not None
    assert report.first.most == 0.25


def test_generate_then_train(run: Path) -> None:
    batch = replay(ReplayRequest(run_dir=run, step=4, stage=ReplayStage.generate))
    assert batch.as_promised
    assert differing(batch) == []
    assert "advantage" in {c.name for c in batch.comparisons}
    assert not {"loss", "weights"} & {c.name for c in batch.comparisons}
    trained = replay(ReplayRequest(run_dir=run, step=4, stage=ReplayStage.train))
    assert differing(trained) == []
    assert "weights" in {c.name for c in trained.comparisons}
    lines = read_lines(trained.directory / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [3, 4]
    assert any(str(batch.directory / "batch") in note for note in trained.notes)


@pytest.fixture(scope="module")
def make_flying(make_run: Callable[..., Path]) -> Callable[..., Path]:
    """Makes a run with weights in flight: long responses, short calls, one rank of each kind."""

    def make(directory: Path, *overrides: str) -> Path:
        run = make_run(
            directory, "schedule=async", "schedule.max_staleness=2", "deterministic=strict",
            "schedule.new_weights=in_flight", "cluster.ranks=2", "cluster.pools.rollout=1",
            "rollout.max_new_tokens=48", "rollout.decode_steps=2", "rollout.ignore_eos=true",
            "trainer.steps=6", "trainer.save_every=2", *overrides,
            without=["rollout.max_new_tokens"],
        )  # fmt: skip
        if "schedule.new_weights=when_free" not in overrides:
            lines = read_lines(run / "versions.jsonl")
            assert any(len(segments) > 1 for line in lines for _, segments in line["samples"])
        return run

    return make


@pytest.mark.layouts
def test_a_run_with_weights_in_flight_follows_its_record(
    make_flying: Callable[..., Path], tmp_path: Path
) -> None:
    """From checkpoints whose samples go on, on ranks apart and on ranks that train too."""
    run = make_flying(tmp_path / "run")
    lines = read_lines(run / "versions.jsonl")
    assert goes_on(run / "checkpoints" / "step_000002"), "no sample goes on with its tokens"
    # The last step of a run that was ended, whose later batches had begun.
    (run / "versions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))
    shared = ("cluster.ranks=1", "cluster.pools.rollout=0")
    for step, begun_after, ranks in ((4, 2, ()), (3, 2, ()), (4, 2, shared)):
        report = replay(ReplayRequest(run_dir=run, step=step, overrides=ranks))
        assert report.begun_after == begun_after
        assert report.promise is (Promise.rounding if ranks else Promise.bits)
        assert differing(report) == []
        recorded = read_lines(report.directory / "versions.jsonl")
        assert recorded == lines[begun_after:step]


@pytest.mark.wide
@pytest.mark.layouts
def test_a_demo_with_tools_and_weights_in_flight_follows_its_record(
    make_flying: Callable[..., Path], tmp_path: Path
) -> None:
    """Its command line has a data source and evaluation sets beside those of the default."""
    run = make_flying(
        tmp_path / "run", "experiment=tools_tiny", "environment.max_turn_tokens=12",
        "trainer.steps=5",
    )  # fmt: skip
    lines = read_lines(run / "versions.jsonl")
    report = replay(ReplayRequest(run_dir=run, step=4))
    assert report.promise is Promise.bits
    assert differing(report) == []
    assert {c.name for c in report.comparisons if c.compared} >= {"tokens", "reward", "weights"}
    assert read_lines(report.directory / "versions.jsonl") == lines[2:4]


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("new_weights", ["when_free", "in_flight"])
def test_a_run_of_groups_as_they_complete_follows_its_record(
    make_flying: Callable[..., Path], tmp_path: Path, new_weights: str
) -> None:
    """Its steps have other groups than in order; checkpoints have some of later steps."""
    run = make_flying(
        tmp_path / "run", "schedule.batches=as_complete", f"schedule.new_weights={new_weights}",
        "rollout.stop=[a,e,i,o,u]", "rollout.ignore_eos=false",
    )  # fmt: skip
    lines = read_lines(run / "versions.jsonl")
    steps = [{id[0] // 4 for id, _ in line["samples"]} for line in lines]
    assert max(map(len, steps)) > 1, "groups have completed in order"
    shared = ("cluster.ranks=1", "cluster.pools.rollout=0")
    for ranks in ((), shared):
        request = ReplayRequest(run_dir=run, step=4, overrides=ranks)
        if ranks and new_weights == "when_free":
            with pytest.raises(ConfigError, match=r"rollout=0: .*after step 2 samples go on by v_"):
                replay(request)
            request = replace(request, from_start=True)
        report = replay(request)
        assert report.begun_after == (0 if request.from_start else 2)
        assert report.promise is (Promise.rounding if ranks else Promise.bits)
        assert differing(report) == []
        recorded = read_lines(report.directory / "versions.jsonl")
        assert recorded == lines[report.begun_after : 4]


@pytest.mark.wide
@pytest.mark.layouts
def test_kept_caches_are_in_no_checkpoint(make_flying: Callable[..., Path], tmp_path: Path) -> None:
    run = make_flying(tmp_path / "run", "schedule.parked_kv=keep")
    line = refused(run, step=4)
    assert "schedule.parked_kv=keep: wanted recompute: checkpoints have no keys and values" in line
    report = replay(ReplayRequest(run_dir=run, step=4, from_start=True))
    assert report.begun_after == 0
    assert differing(report) == []


@pytest.mark.wide
@pytest.mark.layouts
def test_the_recipes_formulas_run_again_on_a_batch(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """PPO's token rewards and advantages are maps: with other settings they are others."""
    run = make_run(tmp_path / "run", "cluster.ranks=1", "recipe=ppo", "trainer.steps=2",
                   "trainer.save_every=1", without=["recipe.group_size"])  # fmt: skip
    batch = replay(ReplayRequest(run_dir=run, step=2, stage=ReplayStage.generate))
    train = ReplayRequest(run_dir=run, step=2, stage=ReplayStage.train)
    assert differing(replay(train)) == []
    other = replay(replace(train, overrides=("recipe.lam=0.1", "recipe.kl_coef=0.5")))
    names = {c.name: c for c in other.comparisons}
    for same in ("tokens", "log_probs", "reward", "values"):
        assert not names[same].differing, same
    for changed in ("token_rewards", "advantages", "loss"):
        assert names[changed].differing, changed
    # Its batch, which is the newest, is not the run's.
    again = replay(train)
    assert differing(again) == []
    assert str(other.directory) not in "".join(again.notes)
    named = replay(replace(train, batch=other.directory))
    assert any(str(other.directory / "batch") in note for note in named.notes)
    assert batch.as_promised


@pytest.mark.wide
@pytest.mark.layouts
def test_another_layout_is_equal_up_to_the_order_of_floats(run: Path) -> None:
    """From the checkpoint of step 2, through two steps."""
    layout = ("cluster.ranks=2", "trainer.layout.tp=2", "rollout.layout.tp=2")
    report = replay(ReplayRequest(run_dir=run, step=4, overrides=layout))
    assert report.promise is Promise.rounding
    assert report.as_promised, differing(report)
    names = {c.name: c for c in report.comparisons}
    assert not names["tokens"].differing
    assert not names["reward"].differing
    assert names["weights"].differing  # they are computed in another order
    assert not report.record()["equal"]


def test_another_loss_has_the_same_batch(run: Path) -> None:
    """The step before, which is on the way, has the run's settings; the last one has others."""
    report = replay(ReplayRequest(run_dir=run, step=4, overrides=("recipe.kl_coef=0.5",)))
    assert report.promise is Promise.other
    assert report.as_promised
    assert report.compared == 4
    names = {c.name: c for c in report.comparisons}
    for same in ("samples", "tokens", "log_probs", "reference_log_probs", "reward", "advantage"):
        assert not names[same].differing, same
    assert names["loss"].differing
    assert names["weights"].differing
    before = report.directory / "before"
    assert read_steps(before).keys() == {3}
    assert read_steps(before)[3] == read_steps(run)[3]


@pytest.mark.layouts
def test_another_recipe(run: Path) -> None:
    report = replay(ReplayRequest(run_dir=run, step=5, overrides=RLOO))
    assert report.promise is Promise.other
    names = {c.name: c for c in report.comparisons}
    assert not names["reward"].differing
    assert names["advantage"].differing


def refused(run: Path, **options: Any) -> str:
    """The line of a refusal, which leaves nothing behind."""
    before = files(run), sorted(run.glob("replays/*"))
    with pytest.raises(ConfigError) as error:
        replay(ReplayRequest(run_dir=run, **options))
    assert (files(run), sorted(run.glob("replays/*"))) == before
    return str(error.value)


def test_refusals(run: Path, tmp_path: Path) -> None:
    assert "--step=6: wanted 1 to 5, the recipe's steps that" in refused(run, step=6)
    assert "--step=0: wanted 1 to 5" in refused(run, step=0)
    assert "--step=2: wanted 3 or later: the first checkpoint is of step 2; --from-start" in (
        refused(run, step=2)
    )
    assert f"run={tmp_path}: wanted a run directory" in refused(tmp_path, step=1)
    assert "--stage=train: wanted a step with a batch: first hybridrl replay" in (
        refused(run, step=3, stage=ReplayStage.train)
    )
    assert "recipe.kl_coeff=1: wanted a known key" in (
        refused(run, step=3, overrides=("recipe.kl_coeff=1",))
    )
    assert "--stage=train: wanted no stage, or generate: the batch of schedule=partial" in (
        refused(run, step=3, stage=ReplayStage.train, overrides=("schedule=partial",))
    )
    assert "run.dir=: wanted --dir=DIR" in refused(run, step=3, overrides=("run.dir=x",))
    # The step before, on the way, is not made either.
    assert "trainer.mini_batches=2: wanted 1" in (refused(run, step=4, overrides=("recipe=rloo",)))
    assert "--dir=" in refused(run, step=3, directory=run)
    # The user's own directory stays.
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(run, step=4, directory=empty, overrides=("recipe=rloo",))
    assert list(empty.iterdir()) == []


@pytest.mark.layouts
def test_from_the_start(run: Path) -> None:
    report = replay(ReplayRequest(run_dir=run, step=2, from_start=True))
    assert report.begun_after == 0
    assert differing(report) == []


def edit_environment(run: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    environment = json.loads((run / "environment.json").read_text())
    edit(environment)
    (run / "environment.json").write_text(json.dumps(environment))


def test_what_has_changed_since_is_named(run: Path, tmp_path: Path) -> None:
    """Data, recipe, reward and packages, each by its name; with `force` it replays and says so."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("replays"))

    def edit(environment: dict[str, Any]) -> None:
        environment["inputs"]["data"] = {"main": "0" * 16, "gone": "1" * 16}
        for name in environment["inputs"]["code"]:
            if name.startswith(("recipe ", "reward ", "hybridrl/engines")):
                environment["inputs"]["code"][name] = "0" * 16
        environment["packages"]["torch"] = "1.0"

    edit_environment(copy, edit)
    line = refused(copy, step=5)
    for name in (
        "the data of source gone",
        "hybridrl/engines",
        "recipe hybridrl.recipes.grpo:grpo",
        "rewards.py:score",
        "torch (1.0, now ",
        "(--force replays nonetheless)",
    ):
        assert name in line
    assert "hybridrl/models" not in line
    line = refused(copy, step=5, overrides=("recipe.kl_coef=0.1",))
    assert "recipe hybridrl" not in line
    report = replay(ReplayRequest(run_dir=copy, step=5, force=True))
    assert report.as_promised
    assert any("changed since the run: torch" in note for note in report.notes)


@pytest.mark.layouts
def test_recorded_rewards(run: Path, tmp_path: Path) -> None:
    """A reward function that gives other scores now is not asked where they are recorded."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def score(prompt, response, answer, item):\n    return len(response) / 9\n")
    override = (f"reward.function={rewards}:score",)
    asked = replay(ReplayRequest(run_dir=run, step=5, overrides=override))
    assert {c.name for c in asked.comparisons if c.differing} >= {"reward", "advantage", "weights"}
    taken = replay(ReplayRequest(run_dir=run, step=5, overrides=override, recorded_rewards=True))
    assert differing(taken) == []


@pytest.mark.slow
def test_the_command(run: Path) -> None:
    def command(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hybridrl.cli", "replay", str(run), *map(str, args)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = command("--step", 5)
    assert done.returncode == 0, done.stderr
    assert "after step 4: bit for bit" in done.stdout
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["equal"] is True
    assert record["first"] is None
    wrong = command("--step", 9)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("hybridrl: --step=9: wanted 1 to 5")
    assert len(wrong.stderr.splitlines()) == 1
    assert command("--step", 5, "--stage", "half").returncode == 2


PAGE = Path(__file__).parents[2] / "docs" / "replay.md"


@pytest.mark.slow
def test_the_commands_of_the_page(tiny_run: list[str], tmp_path: Path) -> None:
    """First the runs, then what the page does with them; the last one finds a difference."""
    of_page = re.findall(r"^hybridrl (?:replay|blame) .*$", PAGE.read_text(), re.MULTILINE)
    assert [line.split()[1] for line in of_page] == ["replay"] * 4 + ["blame"]
    run = "hybridrl train experiment=spell_tiny trainer.steps=6 trainer.save_every=2"
    other = "trainer.optim.lr=1e-4 run.dir=OTHER"
    lines = [f"{run} deterministic=strict {rest}" for rest in ("run.dir=RUN", other)] + of_page
    small = [*tiny_run, "cluster=processes", "cluster.ranks=1"]
    for line in lines:
        args = [
            re.sub(r"\b(RUN|OTHER)$", str(tmp_path / r"\1"), word)
            for word in shlex.split(line, comments=True)[1:]
        ]
        args += small if args[0] == "train" else []
        done = subprocess.run(
            [sys.executable, "-m", "hybridrl.cli", *args],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (args[0] == "blame"), (line, done.stderr)
    assert "first difference: step 1, stage update_actor, weights: " in done.stdout
