"""`hybridrl train` and `hybridrl eval`: from a config to a run, its end and its result line."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.folder import forget_later
from hybridrl.config import Config, ConfigError
from hybridrl.driver.episodes import EnvironmentFailed
from hybridrl.driver.followed_run import check_followed, check_followed_inputs
from hybridrl.driver.origin import Origin, find_origin, settings_of
from hybridrl.driver.rank_failures import InstanceEnded, WorkerError
from hybridrl.driver.restarts import Restarts
from hybridrl.driver.resumed_inputs import check_inputs, known_rows
from hybridrl.driver.run import Run, TrainingDiverged
from hybridrl.flow.judgements import JudgeFailed
from hybridrl.flow.turns import RecordDiffers
from hybridrl.preflight.first_samples import write_first_samples
from hybridrl.preflight.prepare import PreparedRun, prepare
from hybridrl.preflight.settings import own_run_dir
from hybridrl.rewards.results import BudgetSpent
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.launcher import Launcher
from hybridrl.runtime.launchers import launched
from hybridrl.schedule.lost_samples import InstanceDied
from hybridrl.telemetry import sample_files
from hybridrl.telemetry.advice import advise
from hybridrl.telemetry.log import driver_log
from hybridrl.telemetry.loggers.run_loggers import forget_runs
from hybridrl.telemetry.report import render
from hybridrl.telemetry.run import Telemetry, append_metrics
from hybridrl.telemetry.rundata import load

__all__ = [
    "RUN_ERRORS",
    "BudgetSpent",
    "RayStartError",
    "TrainingDiverged",
    "WorkerError",
    "evaluate_checkpoints",
    "evaluate_only",
    "train",
]

logger = logging.getLogger(__name__)

RUN_ERRORS = (
    WorkerError, TrainingDiverged, EnvironmentFailed, JudgeFailed, RecordDiffers, BudgetSpent,
    RayStartError, OSError,
)  # fmt: skip
"""The errors that end a run after its start, each with one line for the user."""


def train(config: Config) -> dict[str, Any]:
    """Run warm start and recipe; returns the summary that the command line prints."""
    with own_run_dir(config):
        return _train(config)


def _train(config: Config) -> dict[str, Any]:
    origin = find_origin(config, reads=True)
    check_followed(config)
    known = known_rows(origin)
    prepared = prepare(config, known=known)
    check_inputs(config, origin, known, prepared)
    check_followed_inputs(config, prepared.data)
    write_first_samples(Path(config.run.dir), prepared.first_samples)
    with _reported(config), _started(config, prepared, origin) as (telemetry, launcher):
        restarts = Restarts(config, origin, telemetry)
        restarts.warn_unsaved()
        recipe, accuracies = prepared.graph.state_dict(), None
        while accuracies is None:
            try:
                accuracies = _run_phases(config, prepared, launcher, restarts)
            except WorkerError as error:
                restarts.begin(error)
                prepared.graph.load_state_dict(recipe)
    measured = {k: m["eval_accuracy"] for k, m in accuracies.items() if "eval_accuracy" in m}
    marks = {label: True for label in [config.cluster.label] if label}
    counts = {"restarts": len(restarts.events)} if restarts.events else {}
    return {**marks, **measured, **counts, "run": config.run.dir}


def _run_phases(
    config: Config, prepared: PreparedRun, launcher: Launcher, restarts: Restarts
) -> dict[str, dict[str, float]]:
    """Warm start and recipe on ranks that start for them; held-out metrics before and after."""
    with _with_ranks(config, prepared, restarts.telemetry, launcher, restarts.origin) as run:
        restarts.ranks_are_up()
        run.after_checkpoint = partial(restarts.bring_back, run)
        run.warn_off_policy()
        run.warn_unprofiled()
        sample_files.forget_after(run.run_dir, run.step)
        run.warm_start()
        run.begin_recipe()
        before = run.evaluate_before()
        return {"accuracy_before": before, "accuracy_after": run.run_recipe()}


def evaluate_only(config: Config) -> dict[str, Any]:
    """Evaluate the trained model on the held-out items; returns the metrics."""
    _check_has_model(config)
    prepared = prepare(config)
    with running(config, prepared, Origin()) as run:
        if "actor" not in prepared.graph.learned:
            run.begin_recipe()  # for the model that it trains
        metrics = run.evaluation.at(run.step)
    return {**metrics, "run": config.run.dir}


def evaluate_checkpoints(
    config: Config, run_dir: Path, checkpoints: Mapping[int, Path]
) -> dict[str, Any]:
    """Evaluate checkpoints of the run in `run_dir`, by step; they share the ranks of `config`.

    The metrics are added to that run's, and its report is rendered again. Returns those of the last
    checkpoint.
    """
    _check_has_model(config)
    prepared, metrics = prepare(config), dict[str, float]()
    if "actor" not in prepared.graph.learned:
        raise ConfigError("run", run_dir, "a run that trains the actor")
    with running(config, prepared, Origin()) as run:
        for number, (step, folder) in enumerate(checkpoints.items()):
            if number:  # the first are the weights that the ranks began with
                run.group.load_weights(str(folder))
            run.step = step
            metrics = run.evaluation.at(step)
            append_metrics(run_dir, step, metrics)
    if (run_dir / "report.html").is_file():
        render(run_dir)
    return {**metrics, "steps": list(checkpoints), "run": str(run_dir)}


def _check_has_model(config: Config) -> None:
    if not config.cluster.holds_models:
        allowed = "another cluster: its ranks hold no model to evaluate"
        raise ConfigError("cluster", config.cluster.kind.value, allowed)


@contextmanager
def _reported(config: Config) -> Iterator[None]:
    """On the way out advise and render the report, of an interrupted run too."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk is the error that is being raised
            _report(config)
        raise
    _report(config)


def _report(config: Config) -> None:
    run_dir = Path(config.run.dir)
    run = load(run_dir)
    for advice in advise(run):
        print(f"advice: {advice.text} ({advice.key})", file=sys.stderr, flush=True)
    if config.telemetry.report:
        render(run_dir, run)


@contextmanager
def running(config: Config, prepared: PreparedRun, origin: Origin) -> Iterator[Run]:
    """A run with its ranks up; on the way out no process is left, whatever happened."""
    with (
        _started(config, prepared, origin) as (telemetry, launcher),
        _with_ranks(config, prepared, telemetry, launcher, origin) as run,
    ):
        yield run


@contextmanager
def _started(
    config: Config, prepared: PreparedRun, origin: Origin
) -> Iterator[tuple[Telemetry, Launcher]]:
    """The records of a run, and what starts its ranks; on the way out all processes have ended."""
    total = config.warm_start_steps + config.trainer.steps
    run_dir = Path(config.run.dir)
    if origin.goes_back and origin.point is not None:
        forget_later(origin.point)  # before the records, which list them, are cut
        forget_runs(run_dir)
    settings = origin.settings or settings_of(config)
    with (
        Telemetry(
            run_dir,
            config.telemetry,
            total,
            origin.records(config),
            settings=settings,
            label=config.cluster.label,
        ) as telemetry,
        driver_log(config.log.level, run_dir / "logs" / "driver.log"),
        _logged_end(),
        launched(config.cluster, run_dir / "logs") as launcher,
    ):
        ranks, engine = config.cluster.ranks, config.rollout.engine.value
        telemetry.stage(f"starting {ranks} ranks, rollout engine {engine}")
        logger.info("starting %d ranks, rollout engine %s", ranks, engine)
        for note in filter(None, (launcher.note, *prepared.notes)):
            telemetry.note(note)
            logger.info("%s", note)
        yield telemetry, launcher


@contextmanager
def _with_ranks(
    config: Config,
    prepared: PreparedRun,
    telemetry: Telemetry,
    launcher: Launcher,
    origin: Origin,
) -> Iterator[Run]:
    """A run whose ranks start, and have ended on the way out.

    Raises WorkerError, too, where the run cannot go on without a generation instance.
    """
    run = Run(config, prepared, telemetry, launcher, origin)
    try:
        yield run
        run.executor.drain()
        run.group.close()
    except BaseException as error:
        if isinstance(error, Exception) and not run.group.killed:  # no second signal, no death
            with contextlib.suppress(Exception):  # the run ends for another reason
                run.checkpoints.finish()
        with contextlib.suppress(OSError):  # a full disk may be the error that is being raised
            run.executor.salvage()
        if isinstance(error, InstanceDied | InstanceEnded):  # which nothing has gone on without
            raise run.group.failures.of_run() from error
        raise
    finally:
        try:
            run.end_processes()
        finally:
            run.group.kill()


@contextmanager
def _logged_end() -> Iterator[None]:
    """Log how the run ends."""
    try:
        yield
    except BaseException as error:
        logger.info("the run ends: %s: %s", type(error).__name__, error)
        raise
    logger.info("the run has finished")
