"""One step of a run again: `hybridrl replay`. Where it begins, what it runs, whether it is equal.

A replay is a run in a separate directory. It resumes from the nearest checkpoint before the step
and stops after it. Then its records and the run's are compared.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from hybridrl.checkpoint import folder
from hybridrl.checkpoint.folder import Point
from hybridrl.config import AsyncScheduleConfig, Config, ConfigError, DType, compose
from hybridrl.config.stored_run import composed_run, overrides_of
from hybridrl.data.known_rows import read_rows
from hybridrl.driver import followed_run
from hybridrl.driver.inputs import changed_inputs, inputs_of
from hybridrl.driver.origin import Origin, changed_settings, run_status, settings_of
from hybridrl.driver.recorded_samples import (
    RecordedSamples,
    newest_batch,
    recorded_batch,
    recorded_scores,
)
from hybridrl.driver.run import Run
from hybridrl.driver.step_digests import write_batch
from hybridrl.driver.train import running
from hybridrl.preflight.prepare import PreparedRun, prepare
from hybridrl.schedule import StepResult
from hybridrl.telemetry.digests import (
    Comparison,
    StepRecord,
    coarse_steps,
    compare_steps,
    read_steps,
    step_lines,
)
from hybridrl.telemetry.rundata import environment_at

TOLERANCE, ROUNDED_TOLERANCE = 1e-3, 5e-2
"""How far numbers of two orders of float operations may be apart: in float32, in 16 bits.

Measured in float32: 1.9e-4, of weights after four steps of AdamW at a learning rate of 1e-2.
"""

_SAME_BITS = (
    "run.", "telemetry.", "log.", "eval.", "cluster.kind", "cluster.address", "cluster.requeue",
    "cluster.restarts", "trainer.save_every", "trainer.keep_last", "trainer.resume", "schedule.",
    "rollout.max_running", "rollout.decode_steps",
)  # fmt: skip
"""Settings under which a strict step has the same bits: where it runs, when, and its records."""


class ReplayStage(Enum):
    """The half of a step that is replayed."""

    generate = "generate"  # up to the batch that is trained
    train = "train"  # on the batch of an earlier replay, `ReplayRequest.batch`


class Promise(Enum):
    """What a replay is expected to be, compared with the run."""

    bits = "bit for bit"
    rounding = "up to the order of float operations"
    other = "other settings, so it may differ"


class BatchComplete(Exception):
    """The batch of the last step is there, and nothing has been trained on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """What is to be replayed, and how.

    `directory` None is a new one in the run's. `batch` is the replay whose batch is trained, None
    the newest with the run's settings. `overrides` are settings that differ. The checkpoint is one
    before the step `earliest`, this one by default. With `from_start` a run without one begins
    anew. With `force` changed data, code and packages pass. With `recorded_rewards` judges are not
    asked again. With `saves` the weights after the step are written.
    """

    run_dir: Path
    step: int
    directory: Path | None = None
    stage: ReplayStage | None = None
    batch: Path | None = None
    overrides: tuple[str, ...] = ()
    tolerance: float | None = None
    earliest: int | None = None
    from_start: bool = False
    force: bool = False
    recorded_rewards: bool = False
    saves: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """A replay that has ended: its directory, from where it began, and how it compares.

    `comparisons` are those of step `compared`: the first that differs, or the last.
    """

    directory: Path
    step: int
    begun_after: int
    promise: Promise
    tolerance: float
    compared: int
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]

    @property
    def first(self) -> Comparison | None:
        """The first value that differs by more than is promised."""
        over = (c for c in self.comparisons if not c.within(self.tolerance))
        return next(over, None)

    @property
    def as_promised(self) -> bool:
        """Whether it is equal; with other settings nothing is promised."""
        return self.promise is Promise.other or (bool(self.comparisons) and self.first is None)

    def record(self) -> dict[str, Any]:
        """All of it, in plain JSON types."""
        first = self.first
        return {
            "replay": str(self.directory),
            "step": self.step,
            "begun_after": self.begun_after,
            "promise": self.promise.value,
            "equal": bool(self.comparisons) and not any(c.differing for c in self.comparisons),
            "as_promised": self.as_promised,
            "first": None if first is None else {
                "step": self.compared, "stage": first.stage, "name": first.name,
                "of": first.first, "difference": first.most,
            },
        }  # fmt: skip


def replay(request: ReplayRequest) -> ReplayReport:
    """Replay a step and compare it with the run's records.

    Raises ConfigError, before a process starts, where it cannot. Then the run has not made the step
    or has no checkpoint before it, or data, code or packages have changed.
    """
    run_dir, step = request.run_dir, request.step
    own = request.directory or new_directory(run_dir, step)
    compose.register()
    _check_stage(request)
    if run_status(run_dir).get("emulated"):
        allowed = "a run of ranks with a model: there is nothing to make again on emulated ones"
        raise ConfigError("run", run_dir, allowed)
    stored = compose_replay(request, own, (), writes=False)
    _check_step(request, stored)
    point = starting_point(request, compose_replay(request, own, request.overrides, writes=False))
    if own.exists() and any(own.iterdir()):
        raise ConfigError("--dir", own, "a directory that is not there yet, or is empty")
    begun_after = point.state["step"] if point else 0
    parts = list[_Prepared]()
    with _removed_if_refused(own):
        config = compose_replay(request, own, request.overrides)
        before, now = settings_of(stored), settings_of(config)
        others = changed_settings(before, now)
        if others and begun_after < step - 1 - (0 if point else stored.warm_start_steps):
            # The steps before are those of the run; the last one alone has other settings.
            earlier = _replay_before(request, own / "before", others)
            of_run = compose_replay(earlier, own / "before", earlier.overrides)
            parts.append(_prepare(earlier, of_run, begun_after))
        parts.append(_prepare(request, config, step - 1 if parts else begun_after))
    for prepared in parts:
        _run(prepared, point)
        if prepared is not parts[-1]:
            point = folder.read(own / "before" / "final")
    directories = [Path(prepared.config.run.dir) for prepared in parts]
    promise = promised(before, now, others, stored.strict)
    tolerance = request.tolerance
    if tolerance is None:
        rounded = config.model.compute_dtype is not DType.float32
        tolerance = 0.0 if promise is Promise.bits else ROUNDED_TOLERANCE if rounded else TOLERANCE
    compared, comparisons = compare_replay(request, begun_after, directories, tolerance)
    return ReplayReport(
        directory=own,
        step=step,
        begun_after=begun_after,
        promise=promise,
        tolerance=tolerance,
        compared=compared,
        comparisons=tuple(comparisons),
        notes=tuple(parts[-1].notes),
    )


# -- before a process starts ---------------------------------------------------------------------


def new_directory(run_dir: Path, step: int) -> Path:
    """A directory for the replay of a step, which is not there yet."""
    first = run_dir / "replays" / f"step_{step:06d}"
    number, directory = 1, first
    while directory.exists():
        number += 1
        directory = first.with_name(f"{first.name}-{number}")
    return directory


def compose_replay(
    request: ReplayRequest, own: Path, overrides: Sequence[str], writes: bool = True
) -> Config:
    """The run's settings with `overrides`, as a run in the directory `own`."""
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]
    if "run.dir" in keys:
        raise ConfigError("run.dir", "", "--dir=DIR, the replay's own directory")
    choices = _recorded_choices(request.run_dir, overrides)
    stored = overrides_of(request.run_dir, overrides)  # last: it leaves out groups of `overrides`
    config = composed_run(
        [
            *stored,
            f"run.dir='{own}'",
            "trainer.resume=never",
            "trainer.save_samples=false",
            "telemetry.loggers=[]",
            "telemetry.report=false",
            "telemetry.digests=true",
            f"trainer.save_every={10**9 if request.saves else 0}",
            *choices,
            *overrides,
        ],
        writes,
    )
    for settings in config.eval.sets.values():
        settings.every = None
    return config


def _recorded_choices(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Settings with which a replay takes from the run's records what time has decided in it."""
    choices = []
    keeps_schedule = not any(override.startswith("schedule=") for override in overrides)
    if keeps_schedule and (run_dir / followed_run.FILE).is_file():
        schedule = composed_run(overrides_of(run_dir), writes=False).schedule
        if isinstance(schedule, AsyncScheduleConfig) and schedule.depends_on_time:
            choices.append(f"schedule.follow='{run_dir}'")
    return choices


def _check_stage(request: ReplayRequest) -> None:
    """Raise for options that exclude each other."""
    if request.saves and request.stage is ReplayStage.generate:
        allowed = "no stage, or train: with generate there is no update, whose weights to write"
        raise ConfigError("--save with --stage", "generate", allowed)
    if request.batch is not None and request.stage is not ReplayStage.train:
        raise ConfigError("--batch", request.batch, "an option of --stage train, which reads it")


def _check_step(request: ReplayRequest, stored: Config) -> None:
    """Raise where the run has not made the step."""
    steps = coarse_steps(request.run_dir)
    first, last = stored.warm_start_steps + 1, max(steps, default=0)
    if not first <= request.step <= last:
        allowed = f"{first} to {last}, the recipe's steps that {request.run_dir} has run"
        if last < first:
            allowed = f"a run that has made a step of its recipe, which {request.run_dir} has not"
        raise ConfigError("--step", request.step, allowed)


def starting_point(request: ReplayRequest, config: Config) -> Point | None:
    """The nearest whole checkpoint before the step; None for the run's start.

    `config` has the replay's settings.
    """
    points, damaged = folder.search(request.run_dir)
    earliest = request.earliest or request.step
    before = [point for point in points if point.state["step"] < earliest]
    before.sort(key=lambda point: int(point.state["step"]), reverse=True)
    for point in before:
        if wrong := folder.changed(point):
            damaged.append(wrong)
        elif (lack := _lack(config, point)) is None:
            return point
        elif not request.from_start:
            raise lack
    if earliest <= config.warm_start_steps + 1 or request.from_start:
        return None
    there = sorted(int(point.state["step"]) for point in points)
    allowed = f"a run with a checkpoint before it, which {request.run_dir} has not"
    if there:
        allowed = f"{there[0] + 1} or later: the first checkpoint is of step {there[0]}"
    damages = f"; damaged: {'; '.join(damaged)}" if damaged else ""
    allowed += f"; --from-start makes all {request.step} steps again{damages}"
    raise ConfigError("--step", request.step, allowed)


def _lack(config: Config, point: Point) -> ConfigError | None:
    """Why samples of a checkpoint cannot go on in the replay; None where they can."""
    if not config.schedule.follows:
        return None
    schedule = point.state["schedule"]
    jobs = [job for group in schedule.get("open", []) for job in group["jobs"]]
    if config.schedule.keeps_kv and any(job["parked"] is not None for job in jobs):
        allowed = "recompute: checkpoints have no keys and values (--from-start needs none)"
        return ConfigError("schedule.parked_kv", "keep", allowed)
    # Ranks that train, too, have the step's weights alone; in flight samples go on with these.
    begun_by = {tuple(id): int(steps) for id, steps in schedule.get("births", ())}
    unfinished = {tuple(job["sample"]["id"]) for job in jobs if not job["sample"]["tensors"]}
    older = {begun_by[id] for id in begun_by.keys() & unfinished} - {schedule["steps_done"]}
    if older and not schedule["in_flight"] and not config.cluster.pools.rollout:
        allowed = f"as in the run: after step {point.state['step']} samples go on by"
        allowed += f" v_{min(older)}, which ranks that train, too, have no longer"
        allowed += " (--from-start makes all steps again)"
        return ConfigError("cluster.pools.rollout", 0, allowed)
    return None


@contextmanager
def _removed_if_refused(own: Path) -> Iterator[None]:
    """Within, a replay is checked; where it is refused, nothing of it stays."""
    there = own.is_dir()
    try:
        yield
    except ConfigError:
        shutil.rmtree(own, ignore_errors=True)  # it holds the settings, perhaps a tiny model
        if there:
            own.mkdir()
        elif own.parent.name == "replays" and own.parent.is_dir() and not any(own.parent.iterdir()):
            own.parent.rmdir()
        raise


def _replay_before(request: ReplayRequest, directory: Path, others: Sequence[str]) -> ReplayRequest:
    """The replay of the steps before the last one, without the settings `others`."""
    kept = tuple(x for x in request.overrides if not _touches(x, others))
    return replace(
        request, step=request.step - 1, stage=None, batch=None, overrides=kept, saves=True,
        directory=directory,
    )  # fmt: skip


def _touches(override: str, keys: Sequence[str]) -> bool:
    """Whether an override is about one of these settings."""
    name = override.partition("=")[0].lstrip("+~")
    return any(key == name or key.startswith(f"{name}.") for key in keys)


def _check_inputs(request: ReplayRequest, config: Config, prepared: PreparedRun) -> list[str]:
    """What has changed since the run; raises for it without `force`."""
    times = [line["time"] for line in step_lines(request.run_dir) if line["step"] == request.step]
    environment = environment_at(request.run_dir, times[-1]) if times else {}
    if "inputs" not in environment:
        return [f"{request.run_dir} has no digests of its data and code: they are not checked"]
    now = inputs_of(config, prepared.data)
    keys = [override.partition("=")[0] for override in request.overrides]
    changed = changed_inputs(environment, now, keys)
    if changed and not request.force:
        allowed = (
            f"what the run had; changed since: {'; '.join(changed)} (--force replays nonetheless)"
        )
        raise ConfigError("run", request.run_dir, allowed)
    return [f"changed since the run: {line}" for line in changed]


def promised(
    before: Mapping[str, Any], now: Mapping[str, Any], others: Sequence[str], strict: bool
) -> Promise:
    """What a replay with settings `now` of a run with those `before` is expected to be."""
    if others:
        return Promise.other
    changed = [key for key in now if now[key] != before.get(key)]
    if strict and all(key.startswith(_SAME_BITS) for key in changed):
        return Promise.bits
    return Promise.rounding


# -- the replay ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A replay that has been checked: the run's inputs, recorded samples, notes for the reader."""

    request: ReplayRequest
    config: Config
    run: PreparedRun
    batch: RecordedSamples | None
    scores: RecordedSamples | None
    notes: list[str]


def _prepare(request: ReplayRequest, config: Config, begun_after: int) -> _Prepared:
    """Check a replay before its ranks start."""
    notes, batch, scores, covering = list[str](), None, None, list[RecordedSamples]()
    first = max(begun_after, config.warm_start_steps) + 1
    if request.stage is ReplayStage.train:
        if not config.schedule.serial_batches:
            kind = config.schedule.kind.value
            allowed = f"no stage, or generate: the batch of schedule={kind} follows from decoding"
            raise ConfigError("--stage", "train", allowed)
        batch = recorded_batch(request.batch or _batch_of_run(request))
        notes.append(f"the batch is that of {batch.folder}")
        covering += [batch] * (first == request.step)
    if request.recorded_rewards:
        scores = recorded_scores(request.run_dir, range(first, request.step + 1))
        covering.append(scores)
    prepared = prepare(
        config,
        lambda stage: any(samples.covers(stage) for samples in covering),
        read_rows(request.run_dir),
    )
    notes += _check_inputs(request, config, prepared)
    return _Prepared(request, config, prepared, batch, scores, notes)


def _batch_of_run(request: ReplayRequest) -> Path:
    """The newest batch of the step, of replays with the run's settings."""
    before = settings_of(compose_replay(request, request.run_dir, (), writes=False))

    def is_runs_own(directory: Path) -> bool:
        try:
            now = settings_of(composed_run(overrides_of(directory), writes=False))
        except ConfigError:  # of another version
            return False
        others = changed_settings(before, now)
        return promised(before, now, others, strict=True) is Promise.bits

    return newest_batch(request.run_dir, request.step, is_runs_own)


def _run(prepared: _Prepared, point: Point | None) -> None:
    """Make the steps from `point` to the last one."""
    request, config = prepared.request, prepared.config
    graph, batch = prepared.run.graph, prepared.batch
    if point is not None:
        numbers = point.state["recipe"]  # of another recipe only those that it shares
        states = {x: numbers.get(x, value) for x, value in graph.states.items()}
        point = replace(point, state={**point.state, "recipe": states})
    with running(config, prepared.run, Origin(settings_of(config), point)) as run:
        run.executor.recorded = prepared.scores
        run.failures.follow(request.run_dir)
        run.warm_start()
        run.begin_recipe()
        if batch is not None:
            run.run_recipe_to(request.step - 1)
            run.executor.recorded = batch
        if request.stage is ReplayStage.generate:
            run.executor.before_update = lambda: _stop_at(run, request.step)
        try:
            run.run_recipe_to(request.step)
        except BatchComplete:
            _record_batch(run, prepared.run)
        assert run.schedule is not None
        write_batch(Path(config.run.dir) / "batch", run.schedule.samples, run.group)
        if request.saves:
            run.write_final()


def _record_batch(run: Run, prepared: PreparedRun) -> None:
    """Record the digests of a step that has ended before its update."""
    assert run.schedule is not None
    samples = tuple(sample for sample in run.schedule.samples if sample.tensors)
    run.records.record_samples(samples, run.executor.read_texts)
    result = StepResult(run.step, (), samples, {}, {}, ())
    run.read_digests(prepared.graph, result)


def _stop_at(run: Run, step: int) -> None:
    if run.step == step:
        raise BatchComplete


# -- comparison ----------------------------------------------------------------------------------


def compare_replay(
    request: ReplayRequest, begun_after: int, directories: Sequence[Path], tolerance: float
) -> tuple[int, list[Comparison]]:
    """The first step of the replay that differs by more than `tolerance`, or the last one."""
    theirs = read_steps(request.run_dir)
    read = read_steps if request.step in theirs else coarse_steps
    theirs = read(request.run_dir)
    ours: dict[int, StepRecord] = {}
    for directory in directories:
        ours |= read(directory)
    comparisons: list[Comparison] = []
    for step in sorted(step for step in ours if begun_after < step <= request.step):
        batch_only = request.stage is ReplayStage.generate and step == request.step
        comparisons = compare_steps(theirs[step], ours[step], batch_only) if step in theirs else []
        if not all(comparison.within(tolerance) for comparison in comparisons):
            return step, comparisons
    return request.step, comparisons
