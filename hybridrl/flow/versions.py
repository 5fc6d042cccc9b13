"""Which weights have made each token of a run, for its record and for runs that follow it."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hybridrl.flow.sample import ENVIRONMENT_FAILURE, NO_VERSION, Sample, SampleId, TokenSpan


class Segment(NamedTuple):
    """Response tokens up to `stop` that the weights after so many `steps` have made.

    With those of a reply, in a conversation, that these weights have read. With `recomputed` they
    have first computed the keys and values of all tokens before, which a full cache had lost.
    """

    steps: int
    stop: int
    recomputed: bool = False


VersionRecord = Mapping[SampleId, tuple[Segment, ...]]
"""The segments of each sample, which has them in order, and together they are its response."""

FailureRecord = Mapping[SampleId, tuple[int, str]]
"""The turn, from 1, and the kind of failure of each sample whose episode has failed."""


class RunRecord(NamedTuple):
    """What has depended on time in a run: the weights of its tokens, and which episodes failed.

    `batches` has the prompts of each step from 0 on, whether they were trained or left out.
    """

    versions: VersionRecord
    failures: FailureRecord
    batches: Mapping[int, Sequence[int]] = MappingProxyType({})


def segments_of(spans: Sequence[TokenSpan], steps_of: Mapping[int, int]) -> tuple[Segment, ...]:
    """The segments of a response; `steps_of` gives the steps behind a version.

    Example, 4 updates a step: 3 tokens of version 4 and 5 of version 8 are ((1, 3), (2, 8)).
    """
    segments: list[Segment] = []
    for span in spans:
        # An environment's reply is read by the weights that make what comes next.
        if span.version == NO_VERSION or not span.trained:
            continue
        segment = Segment(steps_of[span.version], span.stop, span.recomputed)
        if segments and segments[-1].steps == segment.steps and not span.recomputed:
            segment = segment._replace(recomputed=segments.pop().recomputed)
        segments.append(segment)
    return tuple(segments)


def failures_of(samples: Iterable[Sample]) -> dict[SampleId, tuple[int, str]]:
    """The failures among the episodes of samples."""
    return {
        sample.id: (int(sample.number("num_turns")), str(sample.scalars[ENVIRONMENT_FAILURE]))
        for sample in samples
        if ENVIRONMENT_FAILURE in sample.scalars
    }


def record_to_json(record: RunRecord) -> dict[str, Any]:
    """In plain JSON types: `samples` are lists of [id, segments]; `failed` of [id, turn, kind].

    A segment is [steps, stop], or [steps, stop, 1] where keys and values were computed again.
    """
    versions, failures, _ = record
    samples = [
        [list(id), [[*x[:2], 1] if x.recomputed else [*x[:2]] for x in segments]]
        for id, segments in versions.items()
    ]
    failed = [[list(id), *failure] for id, failure in failures.items()]
    return {"samples": samples} | ({"failed": failed} if failed else {})


def record_from_json(lines: Iterable[Mapping[str, Any]], first_step: int) -> RunRecord:
    """What `record_to_json` has made of several steps; `first_step` counts as 0."""
    record = RunRecord(versions := {}, failures := {}, batches := {})
    for line in lines:
        prompts = {SampleId.read(id).prompt for id, _ in line["samples"]}
        batches[int(line["step"]) - first_step] = sorted(prompts)
        for id, segments in line["samples"]:
            versions[SampleId.read(id)] = tuple(
                Segment(int(steps), int(stop), bool(recomputed))
                for steps, stop, *recomputed in segments
            )
        for id, turn, kind in line.get("failed", ()):
            failures[SampleId.read(id)] = int(turn), str(kind)
    return record
