"""Measurements of one step of a schedule, from the schedule's own spans and those of the ranks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.flow.sample import SampleId
from hybridrl.schedule.base import Schedule
from hybridrl.telemetry.trace import TimeSpan, TraceFile, TraceSpan, is_rank

_FACTS = ("migrated", "migration_threshold", "parked", "resumed", "off_policy_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A step. `sizes` are the prompt and response tokens of the samples that were trained on.

    The front is generation and inference: from the weights' arrival to the way to the update.
    `busy_s` is the time that the ranks were at work in it, all together.
    """

    seconds: float
    front_s: float
    busy_s: float
    bubble_share: float
    trained: int
    sizes: dict[SampleId, tuple[int, int]]
    metrics: dict[str, float]

    @property
    def lengths(self) -> dict[SampleId, int]:
        """Response tokens of the samples that were trained on."""
        return {id: response for id, (_, response) in self.sizes.items()}


class Recorder:
    """Keeps the ranks' spans of a step, and writes all of them to the file `path`, if any."""

    def __init__(self, path: Path | None) -> None:
        self.spans: list[tuple[str, TimeSpan]] = []
        self.file = TraceFile(path) if path else None

    def on_span(self, lane: str, span: TimeSpan, step: int) -> None:
        """A rank has done something."""
        self.spans.append((lane, span))

    def write(self, name: str, step: int, start: float, stop: float) -> None:
        """Add a step to the file and forget its spans."""
        if self.file is not None:
            whole = TimeSpan(name, start, stop)
            for lane, span in (("driver", whole), *self.spans):
                self.file.span(TraceSpan(span.name, span.start, span.end, lane=lane, step=step))
        self.spans.clear()


def record_step(name: str, step: int, schedule: Schedule, recorder: Recorder) -> Measured:
    """Run a step of `schedule`."""
    recorder.spans.clear()
    start = time.time()
    result = schedule.run_step(step)
    stop = time.time()
    begun = next(span.stop for span in result.spans if span.name == "to_generate")
    ended = next(span.start for span in result.spans if span.name == "to_train")
    spans = [(lane, span) for lane, span in recorder.spans if is_rank(lane)]
    busy = sum(max(0.0, min(span.end, ended) - max(span.start, begun)) for _, span in spans)
    ranks = len({lane for lane, _ in spans})
    recorder.write(name, step, start, stop)
    facts = {key: result.metrics.get(f"samples/{key}") for key in _FACTS}
    return Measured(
        seconds=stop - start,
        front_s=ended - begun,
        busy_s=busy,
        bubble_share=1 - busy / (ranks * (ended - begun)),
        trained=len(result.samples),
        sizes={s.id: (s.prompt_tokens, s.response_tokens) for s in result.samples},
        metrics={key: value for key, value in facts.items() if value is not None},
    )


def of_block(steps: Sequence[Measured], name: str) -> float:
    """The sum of a field over the steps of a block."""
    return sum(getattr(step, name) for step in steps)
