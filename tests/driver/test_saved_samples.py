"""A run whose every process is killed amid a step: its finished samples are not made again.

Its ranks stop in a step once each has saved some samples; then the test kills all processes.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from resumed_runs import check_same
from whole_runs import REPLAYED, Command, FinishedRun

from hybridrl.checkpoint.folder import Point
from hybridrl.checkpoint.sample_records import decode, encode, scan
from hybridrl.config import Config
from hybridrl.data import Item
from hybridrl.driver import train as controller_train
from hybridrl.driver.origin import Origin
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.saved_samples import FOLDER
from hybridrl.driver.saved_samples import SavedSteps as DriverSide
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import Advanced, Event, Finished, Sampling, Submit
from hybridrl.flow.sample import SampleId
from hybridrl.flow.saved_samples import SaveFinished, TakeSaved
from hybridrl.system import signals
from hybridrl.telemetry.records import read_lines
from hybridrl.workers.saved_samples import SavedSamples
from hybridrl.workers.store import StoredSample

STOPPING = """
import os
import signal
import time
from pathlib import Path

from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe
from hybridrl.workers.saved_samples import SavedSamples
from hybridrl.workers.store import StoredSample


def armed():
    '''In every rank with samples: it stops when it has saved so many of a step.'''
    if os.environ.get("STOP_IN") and not hasattr(SavedSamples, "is_armed"):
        SavedSamples.is_armed, append, num = True, SavedSamples.append, []

        def appending(self, *args):
            append(self, *args)
            if self._into is not None and self._into.folder.endswith(os.environ["STOP_IN"]):
                num.append(args)
                if len(num) < int(os.environ["STOP_AFTER"]):
                    return
                if dies := os.environ.get("DIES"):
                    if self.rank == 1 and not Path(dies).exists():
                        Path(dies).touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    return
                while True:
                    time.sleep(60)

        SavedSamples.append = appending
    return ArmedLength()


class ArmedLength:
    __name__ = "length"

    def __call__(self, log_probs):
        return len(log_probs)

    def __reduce__(self):
        return armed, ()


@recipe("stopping")
def dataflow(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = samples.map(ArmedLength(), ("log_probs",), scalars=("length",))
    samples = samples.by_group(advantages.group_relative)
    flow.actor.update(samples, loss=losses.ClippedLoss())
"""
RANKS, EACH = 2, 3
"""Ranks of the run that is killed, and samples that each of them saves before."""
STEP = 3
SERIAL, FUSED = "schedule=serial", "schedule=fused"


def fused(settings: list[str]) -> list[str]:
    return [FUSED if setting == SERIAL else setting for setting in settings]


@pytest.fixture(scope="module")
def settings(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a strict, serial run of four steps, with checkpoints after each second one."""
    file = tmp_path_factory.mktemp("recipe") / "stopping.py"
    file.write_text(STOPPING)
    changed = ("recipe", "trainer.steps=", "trainer.save_every=", "trainer.keep_last=")
    kept = [x for x in (*tiny_run, *REPLAYED) if not x.startswith(changed)]
    steps = ["trainer.steps=4", "trainer.save_every=2", "eval.sets.main.every=null"]
    saved = ["trainer.save_samples=true", "rollout.decode_steps=4"]
    saved += ["model.compute_dtype=float32", "rollout.dtype=float32"]
    return [
        *kept,
        f"recipe={{target: '{file}:dataflow'}}",
        *steps,
        *saved,
        "cluster.ranks=2",
        SERIAL,
    ]


def files_of(run_dir: Path, step: int) -> list[Path]:
    return sorted((run_dir / FOLDER / f"step_{step:06d}").glob("*"))


def saved_in(run_dir: Path, step: int) -> dict[SampleId, int]:
    """Response tokens of the whole records of a step, by sample."""
    records = [record for file in files_of(run_dir, step) for record in scan(file)[0]]
    return {SampleId.read(facts["id"]): facts["response_tokens"] for _, facts in records}


@pytest.fixture
def killed(
    command: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """`killed(*overrides)` is the directory of a run whose processes were all killed in a step."""

    def kill(*overrides: str, step: int = STEP, each: int = EACH) -> Path:
        monkeypatch.setenv("STOP_IN", f"step_{step:06d}")
        monkeypatch.setenv("STOP_AFTER", str(each))
        run_dir = tmp_path / "run"
        resumes = ["trainer.resume=auto", f"run.dir={run_dir}"]
        run = command("cluster=processes", *overrides, *resumes)
        monkeypatch.delenv("STOP_IN")
        run.wait_for(lambda: len(saved_in(run_dir, step)) >= each * RANKS)
        for process in run.alive():
            process.send_signal(signal.SIGKILL)
        run.popen.wait(60)
        return run_dir

    return kill


class Generated:
    """What a run asks of its engines and what they do, by step of the run."""

    def __init__(self) -> None:
        self.submitted: dict[int, list[SampleId]] = {}
        self.taken: dict[int, list[SampleId]] = {}
        self.rows: dict[int, int] = {}  # tokens that were decoded


@contextmanager
def counted() -> Iterator[Generated]:
    """Count in the driver, whose calls and events are those of all ranks."""
    seen = Generated()
    wait, call = RayExecutor.wait, WorkerGroup.call_advance

    def waiting(self: RayExecutor) -> list[Event]:
        events = wait(self)
        step = self.group.current_step()
        for event in events:
            if isinstance(event, Advanced):
                seen.rows[step] = seen.rows.get(step, 0) + event.work.rows
        return events

    def calling(self: WorkerGroup, instance: int, commands: Sequence[Any], *limits: int) -> Any:
        for command in commands:
            of = {Submit: seen.submitted, TakeSaved: seen.taken}.get(type(command))
            if of is not None:
                of.setdefault(self.current_step(), []).extend(command.ids)
        return call(self, instance, commands, *limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayExecutor, "wait", waiting)
        patch.setattr(WorkerGroup, "call_advance", calling)
        yield seen


@pytest.fixture(scope="module")
def undisturbed(
    train_here: Callable[..., FinishedRun], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[list[str]], tuple[FinishedRun, Generated]]:
    """`undisturbed(settings)` is a run of these without a fault, and what it has generated."""
    runs: dict[tuple[str, ...], tuple[FinishedRun, Generated]] = {}

    def run(settings: list[str]) -> tuple[FinishedRun, Generated]:
        if (key := tuple(settings)) not in runs:
            with counted() as seen:
                runs[key] = train_here(tmp_path_factory.mktemp("whole") / "run", *settings), seen
        return runs[key]

    return run


def taken_in(run_dir: Path) -> list[tuple[int, int, int]]:
    """Step, samples and tokens that the record of a run says to be taken."""
    events = read_lines(run_dir / "events.jsonl")
    return [(x["step"], x["samples"], x["tokens"]) for x in events if x["kind"] == "saved_samples"]


@pytest.mark.layouts
@pytest.mark.parametrize("is_fused", [False, True], ids=["serial", "fused"])
def test_a_killed_run_makes_no_finished_sample_again(
    is_fused: bool,
    killed: Callable[..., Path],
    settings: list[str],
    train_here: Callable[..., Any],
    undisturbed: Callable[..., tuple[FinishedRun, Generated]],
    tmp_path: Path,
) -> None:
    """It has the bits of one that was not killed, and decodes so many tokens less."""
    how = fused(settings) if is_fused else settings
    whole, of_whole = undisturbed(how)
    run_dir = killed(*how)
    saved = saved_in(run_dir, STEP)
    assert len(saved) == EACH * RANKS
    assert [file.name for file in files_of(run_dir, STEP)] == [
        "rank_0000_1.records", "rank_0001_1.records",
    ]  # fmt: skip
    with counted() as resumed:
        train_here(run_dir, *how, "trainer.resume=auto")
    (samples,) = (step.samples for step in whole.steps if step.step == STEP)
    tokens = {sample.id: sample.response_tokens for sample in samples}
    assert saved.items() <= tokens.items()
    assert sorted(resumed.taken[STEP]) == sorted(saved)
    assert sorted(resumed.submitted[STEP]) == sorted(tokens.keys() - saved.keys())
    assert resumed.taken.keys() == {STEP}
    assert of_whole.rows[STEP] == sum(tokens.values())
    assert of_whole.rows[STEP] - resumed.rows[STEP] == sum(saved.values()) > 0
    assert taken_in(run_dir) == [(STEP, len(saved), sum(saved.values()))]
    assert not (run_dir / FOLDER).exists()  # the run is over
    check_same(undisturbed(how)[0].dir, run_dir, tmp_path)


@pytest.mark.layouts
def test_damage_costs_its_record_alone_and_records_of_other_weights_are_not_taken(
    killed: Callable[..., Path],
    settings: list[str],
    train_here: Callable[..., Any],
    undisturbed: Callable[..., tuple[FinishedRun, Generated]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = killed(*settings)
    flipped, cut = files_of(run_dir, STEP)
    (_, (place, _), _), _ = scan(flipped)
    data = bytearray(flipped.read_bytes())
    data[place.start + place.size // 2] ^= 1
    flipped.write_bytes(data)
    # The first one is of other weights, the last one has lost its last byte.
    (place, _), *_ = scan(cut)[0]
    facts, arrays = decode(cut.read_bytes()[: place.size])
    other = encode({**facts, "version": facts["version"] + 1}, arrays)
    cut.write_bytes((other + cut.read_bytes()[place.size :])[:-1])
    saved = saved_in(run_dir, STEP)
    assert len(saved) == EACH * RANKS - 2
    capsys.readouterr()
    with counted() as resumed:
        train_here(run_dir, *settings, "trainer.resume=auto")
    err = capsys.readouterr().err
    assert sorted(resumed.taken[STEP]) == sorted(saved.keys() - {SampleId.read(facts["id"])})
    lines = [line for line in err.splitlines() if "saved samples" in line or "damaged" in line]
    assert lines[0].startswith("damaged, passed over: bytes ")
    assert lines[0].endswith(f" of {flipped}")
    assert lines[1].endswith(f" of {cut}")
    assert lines[2].startswith("3 saved samples are taken, with ")
    assert lines[3:] == ["1 saved samples are of other weights or prompts: made again"]
    check_same(undisturbed(settings)[0].dir, run_dir, tmp_path)


@pytest.mark.layouts
def test_a_step_that_was_whole_is_taken_whole_and_a_later_one_not_at_all(
    killed: Callable[..., Path],
    settings: list[str],
    train_here: Callable[..., Any],
    undisturbed: Callable[..., tuple[FinishedRun, Generated]],
    tmp_path: Path,
) -> None:
    """The weights of the later step are made again, and may be others without strict."""
    how = fused(settings)
    run_dir = killed(*how, step=STEP + 1)
    assert sorted(x.name for x in (run_dir / FOLDER).iterdir()) == ["step_000003", "step_000004"]
    saved = saved_in(run_dir, STEP)
    assert len(saved) == 16
    with counted() as resumed:
        train_here(run_dir, *how, "trainer.resume=auto")
    assert sorted(resumed.taken[STEP]) == sorted(saved)
    assert STEP not in resumed.submitted
    assert resumed.rows[STEP] == 0
    assert resumed.taken.keys() == {STEP}
    check_same(undisturbed(how)[0].dir, run_dir, tmp_path)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([], ["cluster.ranks=1"], id="one rank"),
        pytest.param(
            [],
            ["rollout.layout.tp=2"],
            id="an instance of two ranks",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            ["cluster.ranks=3", "cluster.pools.rollout=2"],
            ["cluster.ranks=2", "cluster.pools.rollout=1"],
            id="ranks that generate alone",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_other_ranks_take_them(
    before: list[str],
    after: list[str],
    killed: Callable[..., Path],
    settings: list[str],
    train_here: Callable[..., Any],
) -> None:
    run_dir = killed(*settings, *before, each=2)
    saved = saved_in(run_dir, STEP)
    with counted() as resumed:
        run = train_here(run_dir, *settings, *after, "trainer.resume=auto")
    assert len(saved) == len(resumed.taken[STEP]) == 4
    assert sorted(resumed.taken[STEP]) == sorted(saved)
    (samples,) = (step.samples for step in run.steps if step.step == STEP)
    assert len(samples) == 16
    tokens = {sample.id: sample.response_tokens for sample in samples}
    assert saved.items() <= tokens.items()


@pytest.mark.layouts
def test_a_restart_within_the_run_takes_those_of_all_ranks(
    settings: list[str],
    make_config: Callable[..., Config],
    undisturbed: Callable[..., tuple[FinishedRun, Generated]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STOP_IN", f"step_{STEP:06d}")
    monkeypatch.setenv("STOP_AFTER", str(EACH))
    monkeypatch.setenv("DIES", str(tmp_path / "has died"))
    run_dir = tmp_path / "run"
    how = [*settings, "cluster=processes", "cluster.restarts=1", f"run.dir={run_dir}"]
    with counted() as seen:
        assert controller_train.train(make_config(*how))["restarts"] == 1
    (num,) = {len(seen.taken[STEP])} & set(range(EACH, 16))
    ((step, samples, _),) = taken_in(run_dir)
    assert (step, samples) == (STEP, num)
    assert len(seen.submitted[STEP]) == 16 + 16 - num
    check_same(undisturbed(settings)[0].dir, run_dir, tmp_path)


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.usefixtures("command_line_signals")
def test_a_signal_amid_a_step_leaves_its_finished_samples_to_the_next_process(
    settings: list[str],
    train_here: Callable[..., Any],
    undisturbed: Callable[..., tuple[FinishedRun, Generated]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checkpoint that it leaves is of the step before, so the weights are those."""
    append, num = SavedSamples.append, []

    def stopping(self: SavedSamples, *args: Any) -> None:  # on rank 0, which is this process
        append(self, *args)
        if self._into is not None and self._into.folder.endswith("step_000004"):
            num.append(args)
            if len(num) == EACH:
                os.kill(os.getpid(), signal.SIGTERM)

    run_dir, resumes = tmp_path / "run", "trainer.resume=auto"
    with monkeypatch.context() as patch:
        patch.setattr(SavedSamples, "append", stopping)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 3"):
            train_here(run_dir, *settings, resumes)
    monkeypatch.setattr(signals, "_requested_at", None)
    saved = saved_in(run_dir, 4)
    assert EACH <= len(saved) <= 16
    with counted() as resumed:
        train_here(run_dir, *settings, resumes)
    assert sorted(resumed.taken[4]) == sorted(saved)
    check_same(undisturbed(settings)[0].dir, run_dir, tmp_path)


def submitted(position: int, ids: tuple[int, ...] = (1, 2, 3), k: int = 2) -> Submit:
    prompt = Item("p", ids, "", (), "source", {})
    rests = tuple(range(k))
    return Submit(tuple(SampleId(position, k=x) for x in range(k)), prompt, Sampling(8), rests)


def saver(run_dir: Path, *, at: int | None = None, **settings: bool) -> DriverSide:
    """The driver's side in a run that begins, or resumes from a checkpoint in its directory."""
    config = Config()
    config.run.dir, config.trainer.save_samples = str(run_dir), True
    for name, value in settings.items():
        setattr(config.trainer, name, value)
    folder = run_dir / "checkpoints" / f"step_{at or 0:06d}"
    point = None if at is None else Point(folder, {"step": at})
    return DriverSide(config, Origin(point=point), MagicMock())


def save_one(run_dir: Path, step: int, position: int, version: int = 7) -> Path:
    """A record of sample `position`.0, as a rank writes it."""
    folder = run_dir / FOLDER / f"step_{step:06d}"
    rank, item = SavedSamples(0), submitted(position).prompt
    rank.begin_call(SaveFinished(str(folder), 1))
    finished = Finished(SampleId(position), 0, 3, 1, "stop", ())
    stored = StoredSample(1, item, {"tokens": torch.tensor([1, 2, 3, 4])})
    rank.append(finished, version, stored)
    rank.close()
    return folder


def taken_by(side: DriverSide, step: int, submit: Submit, version: int = 7) -> list[SampleId]:
    """Samples that a step takes; the others are to be made, each with its own limit."""
    with side.step(step):
        *commands, saving = side.commands([submit], version)
    assert isinstance(saving, SaveFinished)
    assert saving.folder.endswith(f"step_{step:06d}")
    taken = [id for command in commands if isinstance(command, TakeSaved) for id in command.ids]
    submits = [x for x in commands if isinstance(x, Submit)]
    rest = dict(zip(submit.ids, submit.rests_at, strict=True))
    for id in taken:
        del rest[id]
    assert {i: r for x in submits for i, r in zip(x.ids, x.rests_at, strict=True)} == rest
    assert all(x.ids for x in submits)
    return taken


def test_a_step_takes_samples_of_its_prompts_and_of_the_checkpoints_weights_alone(
    tmp_path: Path,
) -> None:
    cases: list[tuple[Submit, int, bool]] = [
        (submitted(9), 7, True), (submitted(9, k=1), 7, True), (submitted(9), 8, False),
        (submitted(9, (1, 2, 4)), 7, False), (submitted(8), 7, False),
    ]  # fmt: skip
    for submit, version, is_taken in cases:
        save_one(tmp_path, 5, 9)
        side = saver(tmp_path, at=4)
        wanted = [SampleId(9)] if is_taken else []
        assert taken_by(side, 5, submit, version) == wanted
        assert taken_by(side, 6, submit, version) == []  # its weights are not the checkpoint's
        shutil.rmtree(tmp_path / FOLDER, ignore_errors=True)


def test_what_another_run_has_saved_is_deleted_and_not_taken(tmp_path: Path) -> None:
    """What this run had saved before it went on otherwise goes, too."""
    cases: list[tuple[int | None, int, dict[str, bool]]] = [
        (None, 1, {}),  # it begins anew
        (4, 6, {}),  # weights of step 5 are made again
        (4, 4, {}),
        (4, 5, {"resume_changed": True}),
        (4, 5, {"save_samples": False}),
    ]
    for at, step, settings in cases:
        folder, first = save_one(tmp_path, step, 9), (at or 0) + 1
        side = saver(tmp_path, at=at, **settings)
        assert folder.exists()  # an evaluation of the run deletes nothing
        if settings.get("save_samples", True):
            assert taken_by(side, first, submitted(9)) == []
        else:
            with side.step(first):
                assert side.commands([submit := submitted(9)], 7) == [submit]
        assert not folder.exists(), (at, step, settings)
    folder = save_one(tmp_path / "one", 5, 9)
    config = Config()
    config.run.dir, config.trainer.save_samples = str(tmp_path / "one"), True
    other = Point(tmp_path / "other" / "checkpoints" / "step_000004", {"step": 4})
    side = DriverSide(config, Origin(point=other), MagicMock())
    assert taken_by(side, 5, submitted(9)) == []
    assert not folder.exists()


def test_two_folders_at_most_are_there_and_none_once_the_run_is_over(tmp_path: Path) -> None:
    def there() -> list[int]:
        return sorted(int(x.name[-6:]) for x in (tmp_path / FOLDER).glob("*"))

    side = saver(tmp_path)
    for step in range(1, 4):
        with side.step(step):
            save_one(tmp_path, step, 9)
            assert there() == [step]  # no checkpoint: of no use unless a signal ends the run
    side.checkpoint_is_there(3)
    assert there() == []
    for step in (4, 5, 6):
        with side.step(step):
            save_one(tmp_path, step, 9)
            assert there() == sorted({4, step})
            if step == 6:  # written in the background
                side.checkpoint_is_there(4)
                assert there() == [6]
                side.checkpoint_is_there(5)
    assert there() == [6]
    side.checkpoint_is_there(6)
    assert not (tmp_path / FOLDER).exists()


def test_each_process_has_files_of_its_own_and_nothing_is_saved_between_steps(
    tmp_path: Path,
) -> None:
    for attempt in (1, 2, 3):
        side, submit = saver(tmp_path, at=4), submitted(9)
        assert side.commands([submit], 7) == [submit]  # an evaluation's
        with side.step(5):
            *_, saving = side.commands([submit], 7)
            assert saving == SaveFinished(str(tmp_path / FOLDER / "step_000005"), attempt)
            rank = SavedSamples(0)
            rank.begin_call(saving)
            finished = Finished(SampleId(9, k=attempt), 0, 3, 1, "stop", ())
            tensors = {"tokens": torch.tensor([1, 2, 3, 4])}
            rank.append(finished, 7, StoredSample(1, submit.prompt, tensors))
            rank.close()
        assert side.commands([submit], 7) == [submit]
    assert len(files_of(tmp_path, 5)) == 3


@pytest.mark.ray
def test_ranks_on_ray_save_and_take_them(
    killed: Callable[..., Path],
    settings: list[str],
    command: Callable[..., Command],
    undisturbed: Callable[..., tuple[FinishedRun, Generated]],
    tmp_path: Path,
) -> None:
    """A run of plain processes is killed and goes on under Ray, where it is killed again."""
    run_dir = killed(*settings)
    saved = saved_in(run_dir, STEP)
    killed(*settings, "cluster=local", each=2 * EACH)
    assert [file.name for file in files_of(run_dir, STEP)] == [
        f"rank_000{rank}_{attempt}.records" for rank in range(RANKS) for attempt in (1, 2)
    ]
    assert len(more := saved_in(run_dir, STEP)) >= 2 * EACH * RANKS
    assert saved.items() < more.items()
    resumes = ["cluster=local", "trainer.resume=auto", f"run.dir={run_dir}"]
    code, _, err = command(*settings, *resumes).end(timeout=300)
    assert code == 0, err
    assert taken_in(run_dir) == [(STEP, len(more), sum(more.values()))]
    check_same(undisturbed(settings)[0].dir, run_dir, tmp_path)
