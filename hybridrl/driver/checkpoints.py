"""A run's checkpoints: how one is written, which are kept, and how one is loaded."""

import contextlib
import logging
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hybridrl.checkpoint import folder
from hybridrl.checkpoint.folder import Point, to_keep
from hybridrl.config import Config
from hybridrl.driver.inputs import basis_of
from hybridrl.driver.origin import Origin
from hybridrl.driver.rank_failures import InstanceEnded
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.sample import SampleId
from hybridrl.schedule.base import PendingSample, Schedule
from hybridrl.schedule.groups import begun_anew
from hybridrl.telemetry.records import plain
from hybridrl.telemetry.run import Telemetry
from hybridrl.workers.pending_samples import PendingRecord

logger = logging.getLogger(__name__)

FINAL = "final"
"""The folder of the trained model in a run's directory."""


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
        if self.executor.saved is not None and save.record is not None:
            self.executor.saved.checkpoint_is_there(save.step)
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
