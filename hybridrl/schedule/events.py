"""Events of an executor: who goes on with them, and what is learned from them."""

from collections.abc import Sequence
from typing import Protocol

from hybridrl.costs.meter import CostMeter
from hybridrl.flow.executor import Advanced, Computed, Event, Executor
from hybridrl.flow.sample import Sample


class Guest(Protocol):
    """Work that has the instances for a while, by weights of one version."""

    version: int

    @property
    def is_over(self) -> bool:
        """Whether it has given the instances back."""
        ...

    def take(self, events: Sequence[Event]) -> list[Event]:
        """Go on with its own among these events; gives those that concern the loop."""
        ...


def learn(
    meter: CostMeter,
    event: Advanced | Computed,
    samples: Sequence[Sample] = (),
    width: int = 1,
) -> None:
    """Let the meter learn from a call; `samples` are those of a `Computed`.

    `width` is that of a wide instance.
    """
    if isinstance(event, Computed):
        if event.seconds is not None:
            tokens = sum([sample.tokens for sample in samples])
            meter.saw_compute(event.stage, event.seconds, tokens)
        return
    work = event.work
    meter.num_preempted += work.preempted
    meter.num_drafted += work.drafted
    meter.num_accepted += work.accepted
    if work.drafted:
        meter.saw_drafts(work.accepted, work.refused)
    meter.saw_advance(
        max(0.0, work.seconds - work.kv_seconds),
        work.decode_steps,
        work.rows,
        work.prefill_tokens,
        work.cached,
        work.admitted,
        width,
    )
    if work.kv_tokens:  # one end of two
        meter.saw_kv(2 * work.kv_seconds, work.kv_tokens)


def next_events(executor: Executor) -> list[Event]:
    """Wait for events, without the empty answers of ranks that had no sample. May give none."""
    events = executor.wait()
    return [e for e in events if not isinstance(e, Computed) or e.ids or e.instance is not None]
