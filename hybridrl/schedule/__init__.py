"""Schedules: when and where each sample's next subtask runs, on a virtual clock as on ranks."""

from dataclasses import dataclass, field

from hybridrl.flow.ledger import Drop
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.versions import VersionRecord


@dataclass(frozen=True, slots=True)
class StageSpan:
    """When a stage ran, by the executor's clock (seconds)."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: the batch in training order, and everything else that was dispatched.

    `samples` were trained on (or collected), `dispatched` are all that were made, in order of
    dispatch. `dropped` maps those that were not used to the reason. `metrics` are the updates' own
    under `<role>/<name>`, counts under `samples/<name>`, and the recipe's numbers under
    `state/<name>`. `spans` are the stages as they ran. `versions` has the weights that made the
    tokens of what was dispatched, where these are not those of the step.
    """

    step: int
    samples: tuple[Sample, ...]
    dispatched: tuple[Sample, ...]
    dropped: dict[SampleId, Drop]
    metrics: dict[str, float]
    spans: tuple[StageSpan, ...]
    versions: VersionRecord = field(default_factory=dict)

    @property
    def seconds_by_stage(self) -> dict[str, float]:
        """Seconds of each stage, and of the changes of phase, by name."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            seconds[span.name] = seconds.get(span.name, 0.0) + span.stop - span.start
        return seconds
