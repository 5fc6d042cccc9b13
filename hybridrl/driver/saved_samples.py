"""Finished samples of the step in progress that outlive a crash of everything.

Ranks append each to a file of `RUN/saved_samples/step_N` as soon as it is finished. A run that
resumes before step N takes them in place of making them again.
"""

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.sample_records import RecordPlace, prompt_sum, scan
from hybridrl.config import Config
from hybridrl.driver.origin import Origin
from hybridrl.flow.executor import Command, Submit
from hybridrl.flow.sample import SampleId
from hybridrl.flow.saved_samples import SaveFinished, TakeSaved
from hybridrl.telemetry.run import Telemetry

logger = logging.getLogger(__name__)

FOLDER = "saved_samples"
"""The folder of a run's directory that has them, by step."""


class SavedSteps:
    """The saved samples of a run: which are taken, and which folders stay.

    Invariant: those in the folder of step N were made by the weights of the checkpoint after step
    N - 1 where there is one, and where the run goes on from it. So a run deletes all folders but
    that when it begins, and a step that may not take any begins with an empty one. There are at
    most two folders: of the step after the newest checkpoint, and of the step in progress.

    Example: checkpoints after steps 2 and 4, and the run is killed in step 6. The folders of steps
    5 and 6 are there. The run resumes from step 4: it deletes that of step 6, takes the samples of
    step 5, makes the others, and begins step 6 with none.
    """

    def __init__(self, config: Config, origin: Origin, telemetry: Telemetry) -> None:
        """Nothing is read or deleted before the first step of training."""
        run_dir = Path(config.run.dir)
        self._telemetry, self._folder = telemetry, run_dir / FOLDER
        self._is_on, self._changed = config.trainer.save_samples, config.trainer.resume_changed
        self._newest: int | None = None  # the step of the newest checkpoint
        if origin.point is not None and origin.continues(run_dir):
            self._newest = origin.point.state["step"]
        self._taking = None if self._newest is None else self._newest + 1
        self._has_begun = self._in_step = False
        self._step = self._attempt = 0
        self._records: dict[SampleId, tuple[RecordPlace, dict[str, Any]]] = {}
        self._num_taken = self._num_tokens = self._num_others = 0

    def _begin(self) -> None:
        """Delete what the run that begins cannot take, and read the rest."""
        self._has_begun = True
        takes = self._is_on and self._taking is not None
        if takes and self._changed and self._of(self._taking or 0).is_dir():
            self._telemetry.note("saved samples are not taken: trainer.resume_changed=true")
            takes = False
        self._keep({self._taking} if takes and self._taking is not None else set())
        if takes and self._taking is not None:
            self._read(self._of(self._taking))

    def _read(self, folder: Path) -> None:
        """Note the records of a step, and say which are damaged."""
        for file in sorted(folder.glob("*.records")):
            records, damaged = scan(file)
            for place, facts in records:
                self._records.setdefault(SampleId.read(facts["id"]), (place, facts))
            for wrong in damaged:
                self._telemetry.note(f"damaged, passed over: {wrong}")

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Within, samples that finish are those of `step`: they are saved, and may be taken."""
        if not self._has_begun:
            self._begin()
        if not self._is_on:
            yield
            return
        self._step, folder = step, self._of(step)
        assert step == self._taking or not self._records, "a run takes samples in its first step"
        self._keep({step} if self._newest is None else {step, self._newest + 1})
        self._attempt = 1 + max(self._attempts(folder), default=0)
        self._num_taken = self._num_tokens = self._num_others = 0
        self._in_step = True
        try:
            yield
            self._tell()
        finally:
            self._in_step = False
            self._records.clear()

    def commands(self, commands: Sequence[Command], version: int) -> Sequence[Command]:
        """These commands, with samples taken that weights of `version` have made, and the others
        saved as they finish; outside of steps, the commands as they are.
        """
        if not self._in_step:
            return commands
        new: list[Command] = []
        for command in commands:
            new += self._taken(command, version) if isinstance(command, Submit) else [command]
        return [*new, SaveFinished(str(self._folder_of_step()), self._attempt)]

    def _taken(self, submit: Submit, version: int) -> list[Command]:
        """A submission in two: what is saved, and what is to be made."""
        if not self._records:
            return [submit]
        wanted = {"version": version, "prompt": prompt_sum(submit.prompt.prompt_ids)}
        places = dict[SampleId, RecordPlace]()
        for id in submit.ids:
            if id not in self._records:
                continue
            place, facts = self._records[id]
            if any(facts[key] != value for key, value in wanted.items()):
                self._num_others += 1
                continue
            places[id] = place
            self._num_tokens += facts["response_tokens"]
        self._num_taken += len(places)
        if not places:
            return [submit]
        commands: list[Command] = [TakeSaved(places, submit.prompt)]
        left = [number for number, id in enumerate(submit.ids) if id not in places]
        if left:
            ids = tuple(submit.ids[number] for number in left)
            rests = tuple(submit.rests_at[number] for number in left if submit.rests_at)
            commands.append(replace(submit, ids=ids, rests_at=rests))
        return commands

    def _tell(self) -> None:
        """Say what the step has taken, and what it has not."""
        if self._num_taken:
            taken = {"samples": self._num_taken, "tokens": self._num_tokens}
            self._telemetry.event("saved_samples", step=self._step, **taken)
            line = f"{self._num_taken} saved samples are taken, with {self._num_tokens} tokens"
            self._telemetry.note(line, step=self._step)
        if self._num_others:
            line = f"{self._num_others} saved samples are of other weights or prompts: made again"
            self._telemetry.note(line, step=self._step)

    def checkpoint_is_there(self, step: int) -> None:
        """Delete what no run that resumes from the checkpoint of `step` can take."""
        self._newest = step
        if self._is_on:
            self._keep({step + 1, self._step} if self._step > step else {step + 1})

    def _keep(self, steps: set[int]) -> None:
        """Delete all folders but those of `steps`, and the outer one where none is left."""
        kept = {self._of(step).name for step in steps}
        for folder in self._folder.glob("step_*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is none, or one has something in it
            self._folder.rmdir()

    @staticmethod
    def _attempts(folder: Path) -> list[int]:
        """The attempts at a step that have left files, one or more each."""
        matches = (re.search(r"_(\d+)\.records$", file.name) for file in folder.glob("*.records"))
        return [int(match[1]) for match in matches if match]

    def _folder_of_step(self) -> Path:
        return self._of(self._step).absolute()

    def _of(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"
