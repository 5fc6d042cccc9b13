"""Ranks that start anew within a run, after one of them has died or is stuck."""

import logging
import time
from collections import Counter
from typing import Any

from hybridrl.config import Config, ConfigError
from hybridrl.driver.inputs import basis_of
from hybridrl.driver.origin import Origin, origin_again
from hybridrl.driver.rank_failures import WorkerError
from hybridrl.driver.resumed_inputs import check_basis
from hybridrl.driver.run import Run
from hybridrl.system import signals
from hybridrl.telemetry.run import Telemetry

logger = logging.getLogger(__name__)

SAME_PLACE = 3
"""Deaths of one rank in one call of a step after which a run ends, if no new step has ended."""


class Restarts:
    """The restarts of a run (`cluster.restarts`), each from a death until all ranks are up.

    `origin` is what the ranks that start next begin from: after a restart the newest checkpoint
    that is whole, or what the run began from. Records that came after it are cut off, among them
    events of earlier restarts from the same checkpoint, which are written again.
    """

    def __init__(self, config: Config, origin: Origin, telemetry: Telemetry) -> None:
        self.config, self.origin, self.telemetry = config, origin, telemetry
        self._basis = basis_of(config)
        self.events: list[dict[str, Any]] = []
        """What the event `restart` has of each."""
        self._places = Counter[tuple[int, str, int, int]]()  # rank, call, its step, newest step
        self._begun: float | None = None

    def warn_unsaved(self) -> None:
        """Say where there will be no checkpoint of a step to go back to."""
        most = self.config.cluster.restarts
        if most and not self.config.trainer.save_every:
            reason = "trainer.save_every=0 leaves no checkpoint to go back to"
            line = f"cluster.restarts={most}: {reason}, so a restart makes all steps again"
            logger.warning("%s", line)
            self.telemetry.note(line)

    def begin(self, error: WorkerError) -> None:
        """Go back to where the ranks can begin again after `error`, and say so in a line.

        Raises it, with the reason, where the run ends: nobody has died, all restarts are used up,
        the rank dies at the same place again and again, a signal has asked the run to stop, or no
        checkpoint is whole.
        """
        self._check(error)
        self._begun = time.perf_counter()
        try:
            self.origin = origin_again(self.config, self.origin)
            check_basis(self.config, self._basis)
        except ConfigError as unusable:  # nor can another process begin from there
            raise WorkerError(f"{error}; {unusable}") from error
        point = self.origin.point
        step = point.state["step"] if point is not None else 0
        self.telemetry.rewind(self.origin.records(self.config) or {})
        number, most = len(self.events) + 1, self.config.cluster.restarts
        where = f"step {step}" if point is not None else "the beginning"
        line = f"{error}; restart {number} of {most}, from {where}"
        logger.info("%s", line)
        self.telemetry.note(line, step=step)
        self.telemetry.stage(f"starting {self.config.cluster.ranks} ranks anew")
        event: dict[str, Any] = {"time": time.time(), "number": number, "step": step}
        event |= {"rank": error.rank, "call": error.call, "reason": str(error), "seconds": None}
        self.events.append(event)

    def ranks_are_up(self) -> None:
        """Record the restart that this ends, if one has begun, and those that it has cut off."""
        if self._begun is None:
            return
        newest = self.events[-1]
        newest["seconds"] = time.perf_counter() - self._begun
        self._begun = None
        for event in self.events:
            if event["step"] >= newest["step"]:
                self.telemetry.event("restart", **event)

    def bring_back(self, run: Run) -> None:
        """Raise the death of an instance without which `run` has gone on, if a restart is left.

        So it starts anew, with all other ranks. After a checkpoint that makes no step again.
        """
        lost, left = run.group.failures.lost, self.config.cluster.restarts - len(self.events)
        if lost is not None and left and not signals.stop_requested():
            run.checkpoints.finish()
            raise lost

    def _check(self, error: WorkerError) -> None:
        """Count a death; raises its error where the run ends."""
        most = self.config.cluster.restarts
        if not (error.died and most) or signals.stop_requested():
            raise error
        place = error.rank, error.call, error.step, self.telemetry.newest_step
        self._places[place] += 1
        reason = ""
        if self._places[place] == SAME_PLACE:
            of_call = f" in {error.call}" if error.call else ""
            reason = f"it has died {SAME_PLACE} times{of_call} without a new step between them"
        elif len(self.events) == most:
            reason = f"all {most} restarts of cluster.restarts are used up"
        if reason:
            raise WorkerError(f"{error}; {reason}", died=True) from error
