"""A run's checkpoints: which one to resume, the settings that may differ, when one is written."""

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridrl.checkpoint import folder
from hybridrl.checkpoint.folder import Point, to_keep
from hybridrl.config import VALUE_MODELS, Config, ConfigError, OptimName, ScheduleKind
from hybridrl.config.environment import COUNTED
from hybridrl.config.renamed_keys import REMOVED_KEYS, with_new_names
from hybridrl.config.schedule import entry_of
from hybridrl.driver.inputs import basis_of
from hybridrl.driver.rank_failures import InstanceEnded
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.sample import SampleId
from hybridrl.schedule.base import PendingSample, Schedule
from hybridrl.schedule.groups import begun_anew
from hybridrl.telemetry.records import parse, plain
from hybridrl.telemetry.run import Telemetry
from hybridrl.workers.pending_samples import PendingRecord

MAY_CHANGE = (
    "cluster", "eval", "telemetry", "log", "run.dir",
    "trainer.steps", "trainer.save_every", "trainer.keep_last", "trainer.resume",
    "trainer.save_in_background",
    "trainer.resume_changed",
    "trainer.max_bad_steps", "trainer.max_tokens_per_micro_batch", "trainer.chunk_tokens",
    "trainer.activations", "trainer.attention_cost", "trainer.compile",
    "trainer.fuse_layers", "trainer.fuse_updates", "trainer.share_prompts", "trainer.layout",
    *(f"{key}.layout" for key in VALUE_MODELS.values()), "model.attention",
    "rollout.layout", "rollout.max_running", "rollout.block_size", "rollout.kv_cache_tokens",
    "rollout.decode_steps", "rollout.speculate", "rollout.tail_tp", "rollout.push",
    "schedule.migration_threshold", "schedule.migration", "schedule.early_backward",
    "environment.num_processes", "environment.memory_mb", "environment.port",
    "environment.turn_timeout_s", "environment.episode_timeout_s", "environment.max_failed_share",
)  # fmt: skip
"""Settings that a resumed run may change: how long, where and how fast, not what it learns from.

`trainer.attention_cost` is a key of earlier versions, whose checkpoints may have any value."""

MAY_CHANGE_OF_JUDGES = (
    ".max_failed_share", ".max_in_flight", ".endpoint.url", ".endpoint.key_env",
    ".endpoint.timeout_s", ".endpoint.retries", ".endpoint.backoff_s", ".endpoint.budget",
    ".endpoint.cache",
)  # fmt: skip
"""Ends of the keys of judges' settings that a resumed run may change."""

OF_PUSHES = (
    "cluster.ranks", "cluster.pools.", "cluster.placement", "cluster.pool_of.", "trainer.layout.",
    "rollout.layout.",
)  # fmt: skip
"""Settings that stay while a checkpoint has pushed weights, which are in a layout."""

FORMER_ONLY_CHOICE = {
    f"{role}.optim.name": OptimName.adamw.value
    for role in ("trainer", "warm_start", *VALUE_MODELS.values())
}
"""Settings of checkpoints that are older than the choice."""

logger = logging.getLogger(__name__)

FINAL = "final"
"""The folder of the trained model in a run's directory."""


@dataclass(frozen=True)
class Origin:
    """The origin of a run: its settings as they were given, and the point that it resumes from.

    Without a point it starts anew. `damaged` has the errors of newer checkpoints. One that
    `goes_back` begins anew from an earlier point of the same run: everything after it is deleted.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    point: Point | None = None
    damaged: tuple[str, ...] = ()
    goes_back: bool = False

    def continues(self, run_dir: Path) -> bool:
        """Whether the point is of the run in this directory."""
        return self.point is not None and self.point.run_dir.resolve() == run_dir.resolve()

    def records(self, config: Config) -> dict[str, int] | None:
        """The records in the run directory that stand, in bytes by file; None for all."""
        if self.point is not None and self.continues(Path(config.run.dir)):
            records: dict[str, int] = self.point.state["records"]
            return records
        return {} if config.trainer.resumes else None


def find_origin(config: Config, reads: bool = False) -> Origin:
    """The origin that `trainer.resume` asks for; before anything else has touched `config`.

    With `reads` the bytes of the checkpoint are compared with their checksums, which takes as long
    as it takes to read them. Raises ConfigError where it names nothing to resume from, or another
    run than the one in the directory. Also where all checkpoints are damaged, where a setting
    differs that must not, and where the directory has a finished run and no checkpoint.
    """
    settings = settings_of(config)
    wanted, own = config.trainer.resume, Path(config.run.dir)
    if not config.trainer.resumes:
        return Origin(settings)
    if run_status(own).get("emulated"):
        allowed = f"another run.dir: {own} has a run of emulated ranks, which leaves no checkpoint"
        raise ConfigError("trainer.resume", wanted, allowed)
    started_again = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    points, damaged = _written_since(wanted, own, started_again)
    goes_back = wanted != "auto" and not points
    if goes_back:
        points, damaged = _named(wanted)
    if reads:
        points, damaged = _unchanged(points, damaged)
    if points:
        _check_same(points[0], settings)
        _check_warm_start(points[0], config, reads)
        origin = Origin(settings, points[0], tuple(damaged))
        return replace(origin, goes_back=goes_back and origin.continues(own))
    if damaged:
        raise _none_is_whole(config, damaged)
    _check_unfinished(own, wanted)
    return Origin(settings)


def origin_again(config: Config, origin: Origin) -> Origin:
    """The origin of a run, begun from `origin`, that begins again in the same process.

    It is the newest checkpoint that the run has written, and whose bytes are those that were
    written; without one `origin`. Raises ConfigError where all are damaged, or what `origin` is.
    """
    written = _written_since(config.trainer.resume, Path(config.run.dir), begun=True)
    points, damaged = _unchanged(*written)
    if points:
        origin = replace(origin, point=points[0], damaged=tuple(damaged), goes_back=False)
    elif damaged:
        raise _none_is_whole(config, damaged)
    elif origin.point is not None and (wrong := _fault_of(origin.point)):
        raise _none_is_whole(config, [wrong])
    if origin.point is not None:
        _check_warm_start(origin.point, config, reads=True)
    return origin


def _fault_of(point: Point) -> str:
    """What has become wrong with the files of `point`, or ""; reads all of them."""
    try:
        return folder.changed(folder.read(point.folder))
    except ValueError as error:
        return str(error)


def _none_is_whole(config: Config, damaged: Sequence[str]) -> ConfigError:
    allowed = f"a checkpoint that is whole; damaged: {'; '.join(damaged)}"
    return ConfigError("trainer.resume", config.trainer.resume, allowed)


def _unchanged(points: list[Point], damaged: Sequence[str]) -> tuple[list[Point], list[str]]:
    """Checkpoints, the newest first, without newer ones whose bytes have changed; all errors."""
    while points and (wrong := folder.changed(points[0])):
        points, damaged = points[1:], [*damaged, wrong]
    return points, [*damaged]


def _written_since(wanted: str, own: Path, begun: bool) -> tuple[list[Point], list[str]]:
    """The checkpoints in `own`, the run's directory, of the run that began from `wanted`.

    None where it begins with this command: in a directory without any, or by going back in its own
    directory. If it has `begun` already, since Slurm has started its job again, say, it goes on.
    """
    points, damaged = folder.search(own)
    if wanted == "auto":
        return points, damaged
    since = [p for p in points if p.state["settings"].get("trainer.resume") == wanted]
    if own.resolve() in Path(wanted).resolve().parents:
        return (since, damaged) if since and begun else ([], [])
    if points and not since and own.resolve() != Path(wanted).resolve():
        _named(wanted)
        allowed = f"auto, or another run.dir: {own} has checkpoints of a run that began elsewhere"
        raise ConfigError("trainer.resume", wanted, allowed)
    return points, damaged


def _named(path: str) -> tuple[list[Point], list[str]]:
    """The checkpoint, or the newest of the run, at `path`."""
    if (Path(path) / folder.RESUME).is_dir():
        try:
            return [folder.read(Path(path).resolve())], []
        except ValueError as error:
            return [], [str(error)]
    points, damaged = folder.search(Path(path))
    if not points and not damaged:
        allowed = "never, auto, a checkpoint with resume/ in it, or the directory of a run with one"
        if run_status(Path(path)).get("emulated"):
            allowed += " (this is of emulated ranks, which leave none)"
        raise ConfigError("trainer.resume", path, allowed)
    return points, damaged


def _check_unfinished(run_dir: Path, wanted: str) -> None:
    """A run that was cut short before its first checkpoint may start anew; a whole one stays."""
    if run_status(run_dir).get("state") == "finished":
        allowed = f"another run.dir: {run_dir} has a finished run without a checkpoint to continue"
        raise ConfigError("trainer.resume", wanted, allowed)


def run_status(run_dir: Path) -> dict[str, Any]:
    """What `run.json` says of the run in a directory; empty without one."""
    file = run_dir / "run.json"
    status = parse(file.read_text()) if file.is_file() else None
    return status if isinstance(status, dict) else {}


def settings_of(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key, in plain JSON types."""
    return dict(_flat(plain(asdict(config)), ""))


def _flat(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _check_same(point: Point, now: Mapping[str, Any]) -> None:
    before, now = stored_settings(point, now), REMOVED_KEYS | dict(now)
    if point.state.get("pushed"):
        for key in filter(before.__contains__, now):
            if key.startswith(OF_PUSHES) and now[key] != before[key]:
                allowed = f"{before[key]}: samples of {point.folder} go on with older weights"
                raise ConfigError(key, now[key], f"{allowed}, which were pushed in this layout")
    for key in changed_settings(before, now):
        allowed = f"{before[key]}, with which {point.folder} was made"
        named = "schedule" if key == "schedule.kind" else key  # as on the command line
        raise ConfigError(named, now[key], allowed)


def stored_settings(point: Point, now: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint was written with, under the names of those of `now`."""
    return FORMER_ONLY_CHOICE | with_new_names(point.state["settings"], now)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings that differ, of those that a resumed run must not change."""
    same_batches = _has_serial_batches(before) and _has_serial_batches(now)
    may_change = (*MAY_CHANGE, "schedule.kind") if same_batches else MAY_CHANGE
    key = "environment.partial"
    if COUNTED not in (before.get(key), now.get(key)):  # by the times of a run, or by its record
        may_change = (*may_change, key)
    return [
        key
        for key in now.keys() & before.keys()
        if now[key] != before[key]
        and not any(key == name or key.startswith(f"{name}.") for name in may_change)
        and not key.endswith(MAY_CHANGE_OF_JUDGES)
    ]


def _has_serial_batches(settings: Mapping[str, Any]) -> bool:
    """Whether each step trains on the batch that it has under `serial`."""
    kind = ScheduleKind(settings["schedule.kind"])
    if kind is ScheduleKind.asynchronous:
        return settings["schedule.max_staleness"] == 0
    return entry_of(kind).serial_batches


def _check_warm_start(point: Point, config: Config, reads: bool) -> None:
    """The weights that the recipe's roles began as must be there, once the recipe has begun."""
    if config.warm_start_steps and point.state["phase"] == "rl":
        try:
            ended = folder.read(point.run_dir / "warm_start")
            if wrong := folder.changed(ended) if reads else "":
                raise ValueError(wrong)
        except ValueError as error:
            allowed = f"a run with the checkpoint of its warm start ({error})"
            raise ConfigError("trainer.resume", config.trainer.resume, allowed) from None


@dataclass(frozen=True)
class DriverState:
    """The driver between two steps, in plain JSON types, and the samples of which ranks have more.

    It stays what it is when the next step has begun.
    """

    record: dict[str, Any]
    pending: tuple[PendingSample, ...] = ()
    versions: tuple[int, ...] = ()
    """Pushed weights that unfinished samples go on with."""
    group_fields: frozenset[str] = frozenset()
    """Fields of samples that follow from those of all of their prompt."""

    def without(self, lost: Collection[SampleId]) -> "DriverState":
        """The state in which these samples begin anew: their instance has died meanwhile."""
        if not lost:
            return self
        pending = tuple(sample for sample in self.pending if sample.id not in lost)
        record = dict(self.record)
        opened = begun_anew(record["schedule"]["open"], lost, self.group_fields)
        record["schedule"] = {**record["schedule"], "open": opened}
        if "episodes" in record:
            episodes = [one for one in record["episodes"] if SampleId.read(one["id"]) not in lost]
            record["episodes"] = episodes
        return replace(self, record=record, pending=pending)


@dataclass(frozen=True)
class _Save:
    """A checkpoint whose files are being written: what seals it, and its event."""

    path: Path
    step: int
    record: dict[str, Any] | None
    event: dict[str, Any]


@contextlib.contextmanager
def _clearing(path: Path) -> Iterator[None]:
    """Delete the incomplete checkpoint for `path` after an OSError, which names a path then."""
    try:
        yield
    except OSError as error:
        folder.clear(path)
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class Checkpoints:
    """Writes a run's checkpoints and deletes those that are not kept.

    `scores` has the held-out accuracy of each that is there, None where it was not measured.
    """

    def __init__(
        self,
        config: Config,
        origin: Origin,
        group: WorkerGroup,
        telemetry: Telemetry,
        executor: RayExecutor,
    ) -> None:
        """What `executor` has begun, and nobody waits for, ends before a checkpoint."""
        self.config, self.settings = config, origin.settings
        self.group, self.telemetry, self.executor = group, telemetry, executor
        self.run_dir = Path(config.run.dir)
        self.inputs = basis_of(config)
        self.scores: dict[int, float | None] = {}
        self._under_way: _Save | None = None
        if origin.point is not None and origin.continues(self.run_dir):
            scores = {int(step): score for step, score in origin.point.state["scores"].items()}
            self.scores = {x: score for x, score in scores.items() if self._of(x).is_dir()}

    def save(self, step: int, accuracy: float | None, state: DriverState) -> None:
        """Write the checkpoint of `step`, and let go of those that are no longer kept.

        In the background (`trainer.save_in_background`) this waits for copies of the weights alone;
        `poll` or `finish` end it. Raises OSError as `write` does.
        """
        with self._earlier_finished():
            self.scores[step] = accuracy
            background = self.config.trainer.save_in_background
            self._write(self._of(step), step, state, background, {"accuracy": accuracy})
            self._let_go()

    def _let_go(self) -> None:
        """Delete what is not kept; the newest may still become the best, unless it has a score.

        While the newest is being written it may come to nothing, so all others stay.
        """
        if self._under_way is not None:
            return
        kept = to_keep(self.scores, self.config.trainer.keep_last)
        newest = max(self.scores)
        if self.scores[newest] is None:
            kept |= {newest}
        for old in self.scores.keys() - kept:
            del self.scores[old]
            with contextlib.suppress(FileNotFoundError):  # someone else has let go of it
                shutil.rmtree(self._of(old))

    def score(self, step: int, accuracy: float) -> None:
        """Note the accuracy of a checkpoint, if it is there; an evaluation may end after it."""
        if step in self.scores:
            self.scores[step] = accuracy
            self._let_go()

    def write(self, path: Path, step: int, state: DriverState, **event: Any) -> None:
        """Write the weights to `path`, and the state that a run resumes from, if this one can.

        Raises OSError that names the path; an earlier checkpoint at `path` is then whole. Where
        `final/` has no earlier one, its weights stay: training has ended, and is not lost. The
        error of an earlier checkpoint's write in the background is raised after this one's.
        """
        with self._earlier_finished():
            self._write(path, step, state, False, event)

    def _write(
        self, path: Path, step: int, state: DriverState, background: bool, event: dict[str, Any]
    ) -> None:
        """Do what `write` does, while nothing is being written in the background."""
        self.telemetry.stage("saving")
        logger.debug("writing %s after step %d", path, step)
        begun = time.perf_counter()
        self.executor.drain()
        folder.clear(path)
        hidden = folder.hidden(path)
        with _clearing(path):
            missing = self.group.save_weights(str(hidden), background)
            record = None
            try:
                if self.config.trainer.saves:
                    record = self._write_state(path, step, state, background)
                    if not background:
                        folder.seal(path, record)
            except OSError as error:
                if path.name != FINAL or path.exists():
                    raise
                shutil.rmtree(hidden / folder.RESUME, ignore_errors=True)
                folder.replace(hidden, path)
                kept = f"{error.strerror}; the trained weights are there"
                raise OSError(error.errno, kept, str(path)) from error
            save = _Save(path, step, record, event | {"seconds": time.perf_counter() - begun})
            if background:
                self._under_way = save
            else:
                self._publish(save, missing)

    @contextlib.contextmanager
    def _earlier_finished(self) -> Iterator[None]:
        """Finish what is being written; raise its error once the body has written another one."""
        failed: OSError | None = None
        try:
            self.finish()
        except OSError as error:
            failed = error
        yield
        if failed is not None:
            raise failed

    def poll(self) -> None:
        """End the checkpoint that is being written in the background, if all of it is there."""
        if self._under_way is None:
            return
        if folder.num_written(self._under_way.path) >= len(self.group.writers):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written in the background, if there is one.

        Raises OSError as `write` does.
        """
        save, self._under_way = self._under_way, None
        if save is None:
            return
        accuracy = self.scores.pop(save.step)
        with _clearing(save.path):
            missing = self.group.finish_save()
            if save.record is not None:
                folder.seal(save.path, save.record)
            self._publish(save, missing)
        self.scores[save.step] = accuracy
        self._let_go()

    def _publish(self, save: "_Save", missing: Sequence[str]) -> None:
        """Give a checkpoint that is complete its name; `missing` files are told."""
        path = save.path
        folder.replace(folder.hidden(path), path)
        self.telemetry.event("checkpoint", step=save.step, path=str(path), **save.event)
        logger.info("wrote %s after step %d", path, save.step)
        for line in missing:
            self.telemetry.note(f"{path} has its weights, but not all of its files: {line}")

    def _write_state(
        self, path: Path, step: int, state: DriverState, background: bool
    ) -> dict[str, Any]:
        """Write all that a run resumes from beside the weights, into the hidden folder.

        Gives the driver's part, for `folder.seal`.
        """
        resume = str(folder.hidden(path) / folder.RESUME)
        progress = self.group.save_state(resume, background)
        state = self._save_pending(resume, state)
        if state.versions:
            self.executor.pushes.save(resume, state.versions)
        roles = {role: asdict(steps) for role, steps in progress.items()}
        # What was read unawaited has come since the state was taken, and no later step's.
        records = state.record.get("records", {}) | self.telemetry.late_sizes()
        record = {**state.record, "records": records, "step": step, "time": time.time()}
        record |= {
            "roles": roles,
            "settings": self.settings,
            "scores": self.scores,
            "inputs": self.inputs,
            "pushed": state.versions,
        }
        sealed: dict[str, Any] = plain(record)
        return sealed

    def _save_pending(self, resume: str, state: DriverState) -> DriverState:
        """Write the pending samples; gives the state without those that died with an instance."""
        while state.pending:
            living = {*self.group.living(self.group.home.ranks)}
            finished = [sample for sample in state.pending if sample.parked is None]
            state = state.without({x.id for x in finished if x.rank not in living})
            try:
                lost = self.group.save_pending(resume, self._shares(state.pending))
                return state.without(lost)
            except InstanceEnded:  # another one, meanwhile
                pass
        return state

    def load(self, point: Point) -> None:
        """Have the ranks load `point`; raises OSError for files that cannot be read."""
        from hybridrl.checkpoint.distributed import Progress

        roles = {role: Progress(**steps) for role, steps in point.state["roles"].items()}
        logger.info("loading %s", point.folder)
        if wrong := self.group.load(str(point.tensors), roles):
            raise OSError(0, "the checkpoint cannot be read", wrong)

    def load_samples(self, point: Point, schedule: Schedule) -> None:
        """Load the pending samples on the ranks; `schedule` gets references to the parked.

        Raises WorkerError where an instance has ended since the ranks started: it has a share.
        """
        if schedule.needs_versions():
            self.executor.pushes.load(str(point.tensors))
        pending = schedule.pending()
        if not pending:
            return
        if self.group.failures.dead:
            raise self.group.failures.of_run()
        references = self.group.load_pending(str(point.tensors), self._shares(pending))
        parked = [sample.id for sample in pending if sample.parked is not None]
        if parked:
            instance_ranks = range(len(self.group.instances[0]))
            by_sample = dict.fromkeys(parked, references[0])
            schedule.restore_parked(dict.fromkeys(instance_ranks, by_sample))

    def _shares(self, pending: Sequence[PendingSample]) -> dict[int, tuple[PendingRecord, ...]]:
        """Each rank's share of the samples to write or load; the first rank has all parked ones."""
        ranks = self.group.living(self.group.home.ranks)
        shares: dict[int, list[PendingRecord]] = {rank: [] for rank in ranks}
        for sample in pending:
            if sample.parked is None:
                shares[sample.rank].append(PendingRecord(sample.id, sample.prompt))
                continue
            state = sample.parked.state
            reference = state[0][sample.id] if state is not None else None
            record = PendingRecord(sample.id, sample.prompt, sample.sampling, reference)
            shares[ranks[0]].append(record)
        return {rank: tuple(share) for rank, share in shares.items()}

    def _of(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step_{step:06d}"
