"""Samples of an earlier run or replay, whose fields a step takes instead of computing them.

Tokens follow from identities, so a replay makes them again. What comes from outside does not: a
judge behind an endpoint, a function that reads the clock. Its scores are in `digests.jsonl`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.driver.async_calls import EventCalls, answers_of
from hybridrl.driver.step_digests import SAMPLES
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import Advanced, Command, Finished, LoadWeights, Submit
from hybridrl.flow.graph import MapStage, Stage, StageMethod
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.telemetry.digests import read_steps
from hybridrl.telemetry.records import parse
from hybridrl.workers.store import KEPT_IDS, ROUTED_EXPERTS


@dataclass(frozen=True, slots=True)
class RecordedSamples:
    """Recorded fields of samples by the text of their ids.

    With a `folder`, that of a batch with all tensors, `samples` has the metadata. Then forward
    passes and judges do not run again; maps do, on the recorded fields, and so do barriers. Without
    one, only the judges' scores are taken.
    """

    scalars: Mapping[str, Mapping[str, Any]]
    folder: Path | None = None
    samples: Mapping[SampleId, Sample] | None = None

    def has(self, stage: Stage, samples: Iterable[Sample]) -> bool:
        """Whether every output of a stage on these samples is recorded."""
        if self.samples is None:
            judges = stage.method is StageMethod.SCORE
            return judges and all(
                set(stage.outputs) <= self.scalars.get(str(sample.id), {}).keys()
                for sample in samples
            )
        if isinstance(stage, MapStage):  # the recipe's own formula, which may be another one now
            return False
        recorded = self.samples
        return all(
            sample.id in recorded and all(recorded[sample.id].has(x) for x in stage.outputs)
            for sample in samples
        )

    def covers(self, stage: Stage) -> bool:
        """Whether every output of a judge's stage is recorded of all samples."""
        wanted = set(stage.outputs)
        return bool(self.scalars) and all(wanted <= x.keys() for x in self.scalars.values())

    def outputs(
        self, stage: Stage, samples: Sequence[Sample]
    ) -> tuple[dict[str, tuple[Any, ...]], tuple[str, ...]]:
        """The scalars of a stage by field, aligned with `samples`, and the names of its tensors."""
        names = [name for name in stage.outputs if name in self.scalars.get(str(samples[0].id), {})]
        scalars = {name: tuple(self.scalars[str(s.id)][name] for s in samples) for name in names}
        return scalars, tuple(name for name in stage.outputs if name not in scalars)

    def finished(self, id: SampleId, rank: int) -> Finished:
        """The end of a sample's generation, now on `rank`; raises ConfigError for another one."""
        assert self.samples is not None
        sample = self.samples.get(id)
        if sample is None:
            allowed = f"a batch with sample {id}, which {self.folder} has not"
            raise ConfigError("--stage", "train", allowed)
        more = tuple(name for name in (ROUTED_EXPERTS, KEPT_IDS) if name in sample.tensors)
        finish = str(sample.scalars["finish"])
        return Finished(
            id, rank, sample.prompt_tokens, sample.response_tokens, finish, sample.spans, more
        )


def newest_batch(run_dir: Path, step: int, is_runs_own: Callable[[Path], bool]) -> Path:
    """The folder of a step's batch, of its newest replay that `is_runs_own` holds of.

    Raises ConfigError where there is none.
    """
    files = run_dir.glob(f"replays/step_{step:06d}*/batch/{SAMPLES}")
    newest_first = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
    folder = next((f.parent for f in newest_first if is_runs_own(f.parents[1])), None)
    if folder is None:
        allowed = f"a step with a batch: first hybridrl replay {run_dir} --step {step}"
        allowed += " --stage generate"
        if newest_first:
            allowed += f"; --batch={newest_first[0].parents[1]} takes that of other settings"
        raise ConfigError("--stage", "train", allowed)
    return folder


def recorded_batch(directory: Path) -> RecordedSamples:
    """The batch that is in a directory, or in the replay there; raises ConfigError without one."""
    folder = next((x for x in (directory / "batch", directory) if (x / SAMPLES).is_file()), None)
    if folder is None:
        raise ConfigError(
            "--batch", directory, f"a replay's directory (with batch/{SAMPLES} in it)"
        )
    lines = parse((folder / SAMPLES).read_text())["samples"]
    samples = {sample.id: sample for sample in map(Sample.from_json, lines)}
    return RecordedSamples({str(x): s.scalars for x, s in samples.items()}, folder, samples)


def recorded_scores(run_dir: Path, steps: Collection[int]) -> RecordedSamples:
    """The judges' scores in these steps of a run; raises ConfigError where it records none."""
    records = read_steps(run_dir)
    if not records:
        allowed = f"a run with telemetry.digests=true, which {run_dir} is not"
        raise ConfigError("--recorded-rewards", "", allowed)
    of_steps = [record.samples for step, record in records.items() if step in steps]
    return RecordedSamples({id: scalars for samples in of_steps for id, scalars in samples.items()})


def load_recorded(
    recorded: RecordedSamples, group: WorkerGroup, instance: int, commands: Sequence[Command]
) -> EventCalls:
    """One event for an instance whose ranks load samples with all their tensors."""
    ranks, finished = group.instances[instance], []
    shares: dict[int, dict[SampleId, tuple[int, Any]]] = defaultdict(dict)
    for command in commands:
        if isinstance(command, LoadWeights):
            continue  # nothing is generated
        assert isinstance(command, Submit), "a recorded sample is whole"
        for id in command.ids:
            rank = ranks[(id.prompt + id.k) % len(ranks)]
            finished.append(recorded.finished(id, rank))
            shares[rank][id] = (finished[-1].response_tokens, command.prompt)
    folder = str(recorded.folder)
    calls = {group.call_load_tensors(r, folder, mine): r for r, mine in shares.items()}
    yield from answers_of(calls)
    return [Advanced(instance, 0, tuple(sorted(finished, key=lambda f: f.id)))]
