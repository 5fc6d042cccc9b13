"""What a run goes on from, and what is refused; nothing is started."""

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from safetensors import SafetensorError

from hybridrl.checkpoint import folder
from hybridrl.config import Config, ConfigError
from hybridrl.config.renamed_keys import RENAMED_KEYS
from hybridrl.driver import train
from hybridrl.driver.checkpoints import Checkpoints, DriverState
from hybridrl.driver.origin import Origin, find_origin, origin_again, settings_of
from hybridrl.driver.rank_failures import WorkerError
from hybridrl.models import tiny
from hybridrl.preflight.prepare import prepare


@pytest.fixture
def config(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A run in `tmp_path / "run"` that may go on."""
    run = ["warm_start.steps=0", f"run.dir={tmp_path / 'run'}", "trainer.resume=auto"]
    return lambda *overrides: make_config(*run, *overrides)


@pytest.fixture
def publish(config: Callable[..., Config]) -> Callable[..., Path]:
    """`publish(path, step, *overrides)` leaves a checkpoint of a run with `overrides`."""

    def write(path: Path, step: int, *overrides: str, pushed: Sequence[int] = ()) -> Path:
        resume = folder.hidden(path) / "resume"
        resume.mkdir(parents=True)
        (resume / "__0_0.distcp").write_bytes(b"tensors")
        folder.note_sum(resume / "__0_0.distcp")
        settings = json.loads(json.dumps(settings_of(config(*overrides))))
        state = {
            "settings": settings,
            "step": step,
            "time": step,
            "phase": "rl",
            "records": {"a.jsonl": step},
            "pushed": pushed,
            **{key: {} for key in ("scores", "roles", "before", "recipe", "schedule")},
            **{"prompts": 0, "bad_steps": 0, "evaluated": [-1, {}]},
        }
        folder.seal(path, state)
        folder.replace(folder.hidden(path), path)
        return path

    return write


def test_a_run_goes_on_from_its_newest_whole_checkpoint(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    assert find_origin(config()).point is None
    for step in (3, 6, 9):
        publish(tmp_path / "run" / "checkpoints" / f"step_{step:06d}", step)
    assert find_origin(config("trainer.resume=never")).point is None
    origin = find_origin(config())
    assert origin.point is not None
    assert (origin.point.state["step"], origin.damaged) == (9, ())
    assert origin.records(config()) == {"a.jsonl": 9}
    damaged = tmp_path / "run" / "checkpoints" / "step_000009" / "resume" / "state.json"
    damaged.write_text("{")
    origin = find_origin(config())
    assert origin.point is not None
    assert origin.point.state["step"] == 6
    assert [line.startswith(f"{damaged}: ") for line in origin.damaged] == [True]
    before = tmp_path / "run" / "checkpoints" / "step_000003"
    origin = find_origin(config(f"trainer.resume={before}"))  # back to an earlier one
    assert origin.point is not None
    assert origin.point.folder == before


def test_another_run_goes_on_from_it_once(
    config: Callable[..., Config],
    publish: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a directory of its own; when Slurm starts that job again, from what it has by then."""
    publish(tmp_path / "run" / "final", 6)
    other = [f"run.dir={tmp_path / 'other'}", f"trainer.resume={tmp_path / 'run'}"]
    origin = find_origin(config(*other))
    assert origin.point is not None
    assert origin.point.folder == tmp_path / "run" / "final"
    assert not origin.continues(tmp_path / "other")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert find_origin(config(*other)).point == origin.point
    publish(tmp_path / "other" / "checkpoints" / "step_000008", 8, *other)
    origin = find_origin(config(*other))
    assert origin.point is not None
    assert (origin.point.state["step"], origin.goes_back) == (8, False)
    (tmp_path / "run").rename(tmp_path / "gone")  # it is needed no more
    assert find_origin(config(*other)).point == origin.point


def test_a_run_goes_back_once(
    config: Callable[..., Config],
    publish: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every command; when Slurm starts the job again, it has been there already."""
    for step in (4, 8):
        point = publish(tmp_path / "run" / "checkpoints" / f"step_{step:06d}", step)
    last = publish(tmp_path / "run" / "final", 10)
    before = tmp_path / "run" / "checkpoints" / "step_000004"
    back = f"trainer.resume={before}"
    assert not find_origin(config(f"trainer.resume={tmp_path / 'run'}")).goes_back

    def origin_is(point: Path, goes_back: bool) -> None:
        origin = find_origin(config(back))
        assert origin.point is not None
        assert (origin.point.folder, origin.goes_back) == (point, goes_back)

    origin_is(before, True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    origin_is(before, True)  # the first time it did not come so far
    shutil.rmtree(point)
    shutil.rmtree(last)
    point = publish(tmp_path / "run" / "checkpoints" / "step_000006", 6, back)
    origin_is(point, False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    origin_is(before, True)


def test_a_run_that_begins_again_goes_on_from_what_it_has_written(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    """In the same process; before its first checkpoint it is back where it began."""
    assert origin_again(config(), Origin()) == Origin()
    path = publish(tmp_path / "run" / "checkpoints" / "step_000003", 3)
    begun = Origin({"a": 1}, folder.read(path), goes_back=True)
    back = config(f"trainer.resume={path}")
    assert origin_again(back, begun) is begun
    settings = f"trainer.resume={path}"
    for step in (5, 7):
        path = publish(tmp_path / "run" / "checkpoints" / f"step_{step:06d}", step, settings)
    damaged = path / "resume" / "__0_0.distcp"
    damaged.write_bytes(bytes(damaged.stat().st_size))
    origin = origin_again(back, begun)
    assert origin.point is not None
    assert (origin.settings, origin.point.state["step"], origin.goes_back) == ({"a": 1}, 5, False)
    assert [line.startswith(f"{damaged}: ") for line in origin.damaged] == [True]


def test_a_run_does_not_begin_again_from_what_is_damaged(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    """Neither from where it began, where that is damaged, nor in the place of all it has written.

    The line is what another process would end with.
    """
    elsewhere = publish(tmp_path / "other" / "checkpoints" / "step_000004", 4)
    begun = Origin({}, folder.read(elsewhere))
    forked = config(f"trainer.resume={elsewhere}")
    assert origin_again(forked, begun) is begun
    tensors = elsewhere / "resume" / "__0_0.distcp"
    tensors.write_bytes(bytes(tensors.stat().st_size))
    with pytest.raises(ConfigError, match=f"damaged: {tensors}: not the bytes that were written"):
        origin_again(forked, begun)
    tensors.unlink()
    with pytest.raises(ConfigError, match=f"damaged: {tensors}: is not there"):
        origin_again(forked, begun)
    own = publish(tmp_path / "run" / "checkpoints" / "step_000003", 3)
    (own / "resume" / "__0_0.distcp").write_bytes(b"snesors")
    with pytest.raises(ConfigError) as raised:
        origin_again(config(), Origin())
    assert str(raised.value) == refused(config())


def test_a_run_begins_again_only_with_its_warm_start(
    make_config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    publish(tmp_path / "run" / "checkpoints" / "step_000005", 5)
    warm = make_config("warm_start.steps=2", f"run.dir={tmp_path / 'run'}", "trainer.resume=auto")
    with pytest.raises(ConfigError, match="a run with the checkpoint of its warm start"):
        origin_again(warm, Origin())
    publish(tmp_path / "run" / "warm_start", 2)
    again = origin_again(warm, Origin())
    assert again.point is not None
    assert again.point.state["step"] == 5


def test_a_path_that_is_not_where_the_run_began_is_refused(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    """Though there is something to go on from."""
    publish(tmp_path / "run" / "checkpoints" / "step_000004", 4)
    for path in (tmp_path / "nowhere", tmp_path / "run" / "checkpoints" / "step_000005"):
        line = refused(config(f"trainer.resume={path}"))
        assert line.startswith(f"trainer.resume={path}: wanted never, auto, a checkpoint")
    other = publish(tmp_path / "other" / "final", 6)
    assert refused(config(f"trainer.resume={other}")) == (
        f"trainer.resume={other}: wanted auto, or another run.dir: {tmp_path / 'run'} has"
        " checkpoints of a run that began elsewhere"
    )


@pytest.mark.parametrize("file", ["__0_0.distcp", "state.json"])
def test_one_with_other_bytes_is_passed_over(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path, file: str
) -> None:
    for step in (3, 6):
        path = publish(tmp_path / "run" / "checkpoints" / f"step_{step:06d}", step)
    damaged = path / "resume" / file
    damaged.write_bytes(bytes(damaged.stat().st_size))  # as long, and nothing but zeros
    origin = find_origin(config(), reads=True)
    assert origin.point is not None
    assert origin.point.state["step"] == 3
    assert [line.startswith(f"{damaged}: ") for line in origin.damaged] == [True]
    back = refused(config(f"trainer.resume={path}"))
    assert back.startswith(
        f"trainer.resume={path}: wanted a checkpoint that is whole; damaged: {damaged}"
    )


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as raised:
        find_origin(config, reads=True)
    return str(raised.value)


@pytest.mark.long
def test_what_is_learned_from_must_not_change(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    path = publish(tmp_path / "run" / "final", 6, "schedule=serial")
    free = ["trainer.steps=7", "cluster.ranks=4", "trainer.layout.tp=2", "telemetry.report=false"]
    free += ["trainer.activations=offload"]
    free += [
        "schedule=fused",
        "eval.sets.main.every=1",
        "trainer.layout.fsdp=2",
        "trainer.save_every=5",
    ]
    assert find_origin(config(*free)).point is not None
    reason = f", with which {path} was made"
    assert refused(config("trainer.optim.lr=0.5")) == f"trainer.optim.lr=0.5: wanted 1e-05{reason}"
    muon = refused(config("trainer.optim.name=muon"))
    assert muon == f"trainer.optim.name=muon: wanted adamw{reason}"
    assert refused(config("run.seed=3")) == f"run.seed=3: wanted 0{reason}"
    assert refused(config("recipe=ppo")).startswith("recipe.")
    assert refused(config("schedule=partial")) == f"schedule=partial: wanted serial{reason}"


def test_a_checkpoint_from_before_there_was_a_choice_of_optimizers_is_adamws(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    path = publish(tmp_path / "run" / "final", 6)
    file = path / "resume" / "state.json"
    state = json.loads(file.read_text())
    del state["sum"]  # as written before there was one
    for key in [key for key in state["settings"] if key.endswith(".optim.name")]:
        del state["settings"][key]
    file.write_text(json.dumps(state))
    assert find_origin(config()).point is not None
    line = refused(config("trainer.optim.name=muon"))
    assert line == f"trainer.optim.name=muon: wanted adamw, with which {path} was made"


@pytest.mark.long
def test_a_checkpoint_with_keys_of_old_is_compared_by_their_new_names(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    path = publish(tmp_path / "run" / "final", 6, "schedule=partial", "recipe=grpo")
    file = path / "resume" / "state.json"
    state = json.loads(file.read_text())
    del state["sum"]  # as written before there was one
    old = {new: key for key, new in RENAMED_KEYS.items()}
    state["settings"] = {old.get(key, key): value for key, value in state["settings"].items()}
    assert {"schedule", "rollout.max_staleness", "recipe.normalise"} <= state["settings"].keys()
    file.write_text(json.dumps(state))
    point = find_origin(config("schedule=partial", "recipe=grpo")).point
    assert point is not None
    assert point.folder == path
    state["settings"]["telemetry.tensorboard"] = False  # it had another type
    file.write_text(json.dumps(state))
    assert find_origin(config("schedule=partial", "recipe=grpo")).point is not None
    reason = f", with which {path} was made"
    for setting, before in (
        ("schedule=fused", "partial"),
        ("schedule.max_staleness=2", "1"),
        ("recipe.normalize=sequence", "token"),
    ):
        line = refused(config("schedule=partial", "recipe=grpo", setting))
        assert line == f"{setting}: wanted {before}{reason}"


def test_a_key_that_is_gone_must_have_had_what_every_run_has(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    """One of two keys that are gone says what a run trains on, the other how its work is split."""
    path = publish(tmp_path / "run" / "final", 6, "schedule=packed")
    file = path / "resume" / "state.json"
    state = json.loads(file.read_text())
    del state["sum"]  # as written before there was one
    gone = {"schedule.draw_anew": False, "trainer.attention_cost": 2.3}
    file.write_text(json.dumps(state | {"settings": state["settings"] | gone}))
    assert find_origin(config("schedule=packed")).point is not None
    gone["schedule.draw_anew"] = True
    file.write_text(json.dumps(state | {"settings": state["settings"] | gone}))
    line = refused(config("schedule=packed"))
    wanted = f"wanted False, as every run has it now: {path} was made with another"
    assert line == f"schedule.draw_anew=True: {wanted}"
    with pytest.raises(ConfigError, match=r"draw_anew=true: wanted no such key: it is gone"):
        config("schedule=packed", "schedule.draw_anew=true")


@pytest.mark.parametrize(
    ("key", "value", "now", "kinds"),
    [
        ("environment.partial", "timed", "counted", {"partial": False}),
        ("schedule.length_ranker", "learned", "running", {"packed": False, "fused": True}),
    ],
)
def test_what_is_gone_binds_a_run_whose_batches_follow_it(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path, key: str,
    value: str, now: str, kinds: dict[str, bool],
) -> None:  # fmt: skip
    for kind, resumes in kinds.items():
        path = publish(tmp_path / "run" / "final", 6, f"schedule={kind}")
        file = path / "resume" / "state.json"
        state = json.loads(file.read_text())
        del state["sum"]  # as written before there was one
        state["settings"][key] = value
        file.write_text(json.dumps(state))
        if resumes:
            for later in (kind, "serial"):
                assert find_origin(config(f"schedule={later}")).point is not None
        else:
            wanted = f"wanted {now}, as every run has it now: {path} was made with another"
            assert refused(config(f"schedule={kind}")) == f"{key}={value}: {wanted}"


@pytest.mark.parametrize("setting", [
    "schedule.early_backward=auto", "rollout.tail_tp=2", "rollout.speculate=auto",
    "schedule.migration_threshold=4", "schedule.migration=recompute",
])  # fmt: skip
def test_how_the_tail_is_decoded_and_trained_may_change(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path, setting: str
) -> None:
    """With `schedule=fused`, which trains on the same batch with and without."""
    fused = ["schedule=fused", "cluster.ranks=2"]
    for name, before, now in (("on", [], [setting]), ("off", [setting], [])):
        path = publish(tmp_path / name / "final", 6, *fused, *before)
        origin = find_origin(config(*fused, *now, f"trainer.resume={path}"))
        assert origin.point is not None
        assert origin.point.folder == path


ALONE = ["cluster.ranks=3", "cluster.pools.rollout=1"]


def test_layouts_stay_while_samples_go_on_with_pushed_weights(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    path = publish(tmp_path / "run" / "final", 6, "schedule=one_step", *ALONE, pushed=[5])
    assert find_origin(config("schedule=one_step", *ALONE)).point is not None
    reason = f": samples of {path} go on with older weights, which were pushed in this layout"
    for changed, named in (
        ("trainer.layout.tp=2", "trainer.layout.fsdp=1: wanted 2"),  # which these leave for fsdp
        ("cluster.ranks=4", "trainer.layout.fsdp=3: wanted 2"),
    ):
        assert refused(config("schedule=one_step", *ALONE, changed)) == named + reason
    publish(tmp_path / "run" / "checkpoints" / "step_000007", 7, "schedule=one_step", *ALONE)
    assert find_origin(config("schedule=one_step", *ALONE, "trainer.layout.tp=2")).point is not None


def test_a_former_setting_of_the_switch_does_not_bind_pushed_weights(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    """Earlier versions took it beside ranks that generate alone, where it had no effect."""
    path = publish(tmp_path / "run" / "final", 6, "schedule=one_step", *ALONE, pushed=[5])
    file = path / "resume" / "state.json"
    state = json.loads(file.read_text())
    state["settings"]["rollout.layout.bucket_mb"] = 64
    del state["sum"]
    file.write_text(json.dumps(state))
    assert find_origin(config("schedule=one_step", *ALONE)).point is not None


def test_periodic_and_serial_go_on_from_each_other(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    kinds = ("serial", "periodic", "one_step")
    for before, now in product(kinds, kinds):
        folder = tmp_path / f"{before}_{now}" / "final"
        path = publish(folder, 6, f"schedule={before}", *ALONE)
        resumed = config(f"schedule={now}", *ALONE, f"trainer.resume={path}")
        if "one_step" in (before, now) and before != now:
            assert refused(resumed).startswith(("schedule=", "schedule.max_staleness="))
        else:
            assert find_origin(resumed).point is not None


def test_where_there_is_nothing_to_go_on_from(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    wanted = "wanted never, auto, a checkpoint with resume/ in it, or the directory of a run"
    assert refused(config(f"trainer.resume={nowhere}")).startswith(
        f"trainer.resume={nowhere}: {wanted}"
    )
    path = publish(tmp_path / "run" / "final", 6)
    (path / "resume" / "state.json").write_text("")
    assert refused(config()).startswith(
        f"trainer.resume=auto: wanted a checkpoint that is whole; damaged: {path}/resume/state.json"
    )
    shutil.rmtree(path / "resume")
    status: dict[str, Any] = {"state": "finished"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(status))
    assert "has a finished run without a checkpoint" in refused(config())
    warm = "warm_start.steps=2"
    publish(tmp_path / "run" / "checkpoints" / "step_000004", 4, warm)
    start = "trainer.resume=auto: wanted a run with the checkpoint of its warm start"
    assert refused(config(warm)).startswith(start)
    publish(tmp_path / "run" / "warm_start", 2, warm)
    assert find_origin(config(warm)).point is not None


def test_a_run_of_emulated_ranks_is_no_origin(
    config: Callable[..., Config], publish: Callable[..., Path], tmp_path: Path
) -> None:
    """Neither its directory, however it ended, nor its path from elsewhere."""
    real = publish(tmp_path / "real" / "final", 3)
    for state in ("interrupted", "finished"):
        for run in ("run", "other"):
            (tmp_path / run).mkdir(exist_ok=True)
            status = json.dumps({"state": state, "emulated": True})
            (tmp_path / run / "run.json").write_text(status)
        for resume in ("auto", real):
            with pytest.raises(ConfigError, match=f"^trainer.resume={resume}: wanted another run."):
                find_origin(config(f"trainer.resume={resume}"))
        (tmp_path / "run" / "run.json").unlink()
        with pytest.raises(ConfigError, match=r"\(this is of emulated ranks, which leave none\)$"):
            find_origin(config(f"trainer.resume={tmp_path / 'other'}"))


def test_it_begins_anew_where_no_checkpoint_was_reached(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"state": "interrupted"}))
    assert find_origin(config()).records(config()) == {}  # it begins anew, and so do its records


class FullDisk:
    """Ranks on whose disk the weights have just found room."""

    def save_weights(self, path: str, background: bool) -> list[str]:
        Path(path).mkdir(parents=True)
        (Path(path) / "model.safetensors").write_text("trained")
        return ["tokenizer: ValueError: no"]

    def save_state(self, path: str, background: bool) -> dict[str, Any]:
        Path(path).mkdir()
        (Path(path) / "__0_0.distcp").write_bytes(b"half")
        raise OSError(28, "No space left on device", path)


@pytest.mark.parametrize(("name", "stays"), [("final", True), ("checkpoints/step_000002", False)])
def test_trained_weights_outlive_a_disk_that_has_no_room_for_more(
    config: Callable[..., Config], tmp_path: Path, name: str, stays: bool
) -> None:
    settings = config("trainer.save_every=2")
    group: Any = FullDisk()
    checkpoints = Checkpoints(settings, Origin(), group, MagicMock(), MagicMock())
    path = tmp_path / "run" / name
    with pytest.raises(OSError, match="No space left") as raised:
        checkpoints.write(path, 2, DriverState({}))
    assert ("the trained weights are there" in str(raised.value)) == stays
    assert not stays or raised.value.filename == str(path), "and this is where"
    assert (path / "model.safetensors").is_file() == stays
    assert not (path / "resume").exists(), "nothing resumes from a half"
    assert not folder.hidden(path).exists()
    assert folder.search(tmp_path / "run") == ([], [])
    if stays:  # a later end does not take the place of an earlier, whole one
        (path / "model.safetensors").write_text("earlier")
        with pytest.raises(OSError, match=r"device: '"):
            checkpoints.write(path, 2, DriverState({}))
        assert (path / "model.safetensors").read_text() == "earlier"


def test_a_file_beside_the_weights_that_is_missing_is_named(
    config: Callable[..., Config], tmp_path: Path
) -> None:
    group: Any = FullDisk()
    telemetry = MagicMock(**{"late_sizes.return_value": {}})
    checkpoints = Checkpoints(config(), Origin(), group, telemetry, MagicMock())
    group.save_state = lambda path, background: Path(path).mkdir() or {}
    checkpoints.write(tmp_path / "run" / "final", 2, DriverState({}))
    (call,) = telemetry.note.call_args_list
    assert call.args[0].endswith("not all of its files: tokenizer: ValueError: no")


def test_a_disk_without_room_for_the_first_model_is_named(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of safetensors has its own error for it."""

    def full(*arguments: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: full (os error 28)")

    monkeypatch.setattr(tiny, "make_tiny_model", full)
    with pytest.raises(
        ConfigError, match=r"^run\.dir=.*room for a model \(No space left on device"
    ):
        prepare(config(f"run.dir={tmp_path}"))


class Background:
    """Two ranks that write once they are told to, and fail with an `error` if they have one."""

    writers = (0, 1)

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.resume = Path()

    def save_weights(self, path: str, background: bool) -> list[str]:
        Path(path).mkdir(parents=True)
        (Path(path) / "model.safetensors").write_text("trained")
        return []

    def save_state(self, path: str, background: bool) -> dict[str, Any]:
        assert background == ("step_" in path)
        self.resume = Path(path)
        self.resume.mkdir()
        if not background:
            self.write(0)
        return {}

    def write(self, rank: int) -> None:
        """The file of a rank, and its mark."""
        file = self.resume / f"__{rank}_0.distcp"
        file.write_bytes(b"state")
        folder.note_sum(file)
        folder.mark_written(self.resume)

    def finish_save(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return []


@pytest.fixture
def saving(config: Callable[..., Config]) -> tuple[Checkpoints, Background]:
    """What saves in the background, and the ranks that write."""
    settings = config(
        "trainer.save_every=1", "trainer.save_in_background=true", "trainer.keep_last=1"
    )
    telemetry = MagicMock(**{"late_sizes.return_value": {}})
    group: Any = Background()
    return Checkpoints(settings, Origin(), group, telemetry, MagicMock()), group


STATE = {
    "phase": "rl", "prompts": 0, "bad_steps": 0, "evaluated": [], "records": {}, "before": {},
    "recipe": {}, "schedule": {},
}  # fmt: skip


def steps_of(run: Path) -> list[int]:
    points, wrong = folder.search(run)
    assert wrong == []
    return [point.state["step"] for point in points]


def test_a_checkpoint_is_there_once_all_ranks_have_written(
    saving: tuple[Checkpoints, Background], tmp_path: Path
) -> None:
    """The earlier one stays until then, whatever an evaluation says meanwhile."""
    checkpoints, group = saving
    run = tmp_path / "run"
    checkpoints.save(1, None, DriverState(STATE))
    assert steps_of(run) == []
    group.write(0)
    checkpoints.poll()
    assert steps_of(run) == []
    group.write(1)
    checkpoints.poll()
    assert steps_of(run) == [1]
    checkpoints.save(2, None, DriverState(STATE))
    checkpoints.score(2, 0.5)
    checkpoints.poll()
    assert steps_of(run) == [1]
    group.write(0)
    checkpoints.finish()
    assert steps_of(run) == [2]
    assert not [*run.glob("**/.*")], "neither marks nor hidden folders"
    (point,), _ = folder.search(run)
    assert folder.changed(point) == ""
    assert point.state["files"].keys() == {"__0_0.distcp"}


def test_a_later_checkpoint_waits_for_the_one_before(
    saving: tuple[Checkpoints, Background], tmp_path: Path
) -> None:
    checkpoints, _ = saving
    for step in (1, 2):
        checkpoints.save(step, None, DriverState(STATE))
    assert steps_of(tmp_path / "run") == [1]
    checkpoints.write(tmp_path / "run" / "final", 3, DriverState(STATE))
    assert sorted(steps_of(tmp_path / "run")) == [2, 3]


def test_a_background_that_fails_leaves_the_checkpoint_before(
    saving: tuple[Checkpoints, Background], tmp_path: Path
) -> None:
    """The run hears of it when it next looks, or waits, in one line that names the path."""
    checkpoints, group = saving
    run = tmp_path / "run"
    checkpoints.save(1, None, DriverState(STATE))
    checkpoints.finish()
    checkpoints.save(2, None, DriverState(STATE))
    group.write(0)
    group.write(1)
    group.error = OSError(28, "the checkpoint could not be written: No space left on device")
    with pytest.raises(OSError, match=r"No space left on device: '.*step_000002'"):
        checkpoints.poll()
    assert steps_of(run) == [1]
    assert not folder.hidden(run / "checkpoints" / "step_000002").exists()
    group.error = None
    checkpoints.finish()  # nothing is left of it
    assert steps_of(run) == [1]


@pytest.mark.parametrize("kept", ["final", "step_000003"])
def test_a_background_that_fails_keeps_no_later_checkpoint_from_its_disk(
    saving: tuple[Checkpoints, Background], tmp_path: Path, kept: str
) -> None:
    """The final model, and the checkpoint of a stop, are written before the error is raised."""
    checkpoints, group = saving
    run, step_2 = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000002"
    checkpoints.save(1, None, DriverState(STATE))
    checkpoints.save(2, None, DriverState(STATE))
    group.error = OSError(28, "No space left on device")
    calls, ended = [], group.finish_save

    def finish_save() -> list[str]:
        calls.append(group.error)
        try:
            return ended()
        finally:
            group.error = None  # the next one has room

    group.finish_save = finish_save  # type: ignore[method-assign]
    write = partial(checkpoints.save, 3, None)
    if kept == "final":
        write = partial(checkpoints.write, run / kept, 3)
    with pytest.raises(OSError, match=r"No space left on device: '.*step_000002'"):
        write(DriverState(STATE))
    checkpoints.finish()
    assert len(calls) == (1 if kept == "final" else 2)
    assert 3 in steps_of(run)
    assert not step_2.exists()
    assert 2 not in checkpoints.scores


class Ended(Exception):
    """The error that a run ends with."""


@pytest.mark.parametrize(
    ("error", "killed", "finishes"),
    [(Ended, False, 1), (Ended, True, 0), (KeyboardInterrupt, False, 0)],
)
def test_a_run_that_fails_ends_what_is_being_written(
    config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    killed: bool,
    finishes: int,
) -> None:
    """Where all ranks live; an error of that is not the run's, and a second signal waits not."""
    run, launcher = MagicMock(), MagicMock(note="")
    run.group.killed = killed
    run.checkpoints.finish.side_effect = OSError(28, "No space left on device")
    monkeypatch.setattr(train, "Run", lambda *arguments: run)
    monkeypatch.setattr(train, "launched", lambda *arguments: contextlib.nullcontext(launcher))
    with pytest.raises(error), train.running(config(), MagicMock(notes=()), Origin()):
        raise error
    assert run.checkpoints.finish.call_count == finishes
    run.group.kill.assert_called_once()


def test_a_mark_makes_no_folder_anew(tmp_path: Path) -> None:
    folder.mark_written(tmp_path / "gone" / folder.RESUME)
    assert [*tmp_path.iterdir()] == []


def test_background_needs_something_to_save(config: Callable[..., Config]) -> None:
    with pytest.raises(
        ConfigError, match=r"save_in_background=True: .*false without trainer\.save"
    ):
        config("trainer.save_in_background=true")


def test_samples_are_not_loaded_where_an_instance_has_ended_since(
    config: Callable[..., Config],
) -> None:
    group, schedule = MagicMock(), MagicMock()
    group.failures.of_run.return_value = death = WorkerError("rank 2 of 3 failed", died=True)
    schedule.needs_versions.return_value = ()
    checkpoints = Checkpoints(config(), Origin(), group, MagicMock(), MagicMock())
    with pytest.raises(WorkerError) as raised:
        checkpoints.load_samples(MagicMock(), schedule)
    assert raised.value is death
    group.load_pending.assert_not_called()
