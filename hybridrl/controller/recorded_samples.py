"""Samples of an earlier run or replay, whose fields a step takes instead of computing them.

Tokens follow from identities, so a replay makes them again. What comes from outside does not: a
judge behind an endpoint, a function that reads the clock. Its scores are in `digests.jsonl`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.controller.step_digests import SAMPLES
from hybridrl.flow.executor import Finished
from hybridrl.flow.graph import Stage, StageMethod
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.telemetry.digests import read_steps
from hybridrl.telemetry.records import parse
from hybridrl.workers.store import ROUTED_EXPERTS


@dataclass(frozen=True, slots=True)
class RecordedSamples:
    """Recorded fields of samples by the text of their ids.

    With a `folder`, that of a batch with all tensors, `samples` has the metadata and no stage of
    scope below a barrier runs again. Without, only what judges say is taken.
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
        recorded = self.samples
        return all(
            sample.id in recorded and all(recorded[sample.id].has(x) for x in stage.outputs)
            for sample in samples
        )

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
        more = (ROUTED_EXPERTS,) if ROUTED_EXPERTS in sample.tensors else ()
        finish = str(sample.scalars["finish"])
        return Finished(
            id, rank, sample.prompt_tokens, sample.response_tokens, finish, sample.spans, more
        )


def recorded_batch(run_dir: Path, step: int) -> RecordedSamples:
    """The batch of a step, from the newest replay of it; raises ConfigError where there is none."""
    folders = [x.parent for x in run_dir.glob(f"replays/step_{step:06d}*/batch/{SAMPLES}")]
    if not folders:
        allowed = f"a step with a batch: first hybridrl replay {run_dir} --step {step}"
        raise ConfigError("--stage", "train", f"{allowed} --stage generate")
    folder = max(folders, key=lambda x: (x / SAMPLES).stat().st_mtime)
    lines = parse((folder / SAMPLES).read_text())["samples"]
    samples = {sample.id: sample for sample in map(Sample.from_json, lines)}
    return RecordedSamples({str(x): s.scalars for x, s in samples.items()}, folder, samples)


def recorded_scores(run_dir: Path) -> RecordedSamples:
    """What judges said in a run; raises ConfigError where it has not recorded it."""
    steps = read_steps(run_dir)
    if not steps:
        allowed = f"a run with telemetry.digests=true, which {run_dir} is not"
        raise ConfigError("--recorded-rewards", "", allowed)
    return RecordedSamples({id: x for record in steps.values() for id, x in record.samples.items()})
