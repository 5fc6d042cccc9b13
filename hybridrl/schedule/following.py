"""A run that is made again from its record: which weights make the next tokens of a sample."""

from collections.abc import Sequence
from itertools import pairwise

from hybridrl.flow.sample import SampleId
from hybridrl.flow.turns import RecordDiffers
from hybridrl.flow.versions import FailureRecord, RunRecord, Segment, VersionRecord


class Followed:
    """The record of a run (`schedule.follow`). All errors are `RecordDiffers`.

    A sample is made segment by segment. Where one ends it rests, until an instance has the weights
    of the next. A sample's numbers follow from its identity, so its tokens are those of the record,
    on whichever instance, and whatever else that makes.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record

    def segment(self, id: SampleId, num_tokens: int) -> Segment:
        """The segment of a sample's next token, of which it has so many."""
        for segment in self._segments(id):
            if segment.stop > num_tokens:
                return segment
        raise RecordDiffers(f"sample {id} goes on after {num_tokens} tokens")

    def is_whole(self, id: SampleId, num_tokens: int) -> bool:
        """Whether so many are all tokens of a sample."""
        return num_tokens >= self._segments(id)[-1].stop

    def rests_at(self, id: SampleId, num_tokens: int) -> int:
        """The tokens with which the sample rests next; 0 where it does not."""
        if self.is_whole(id, num_tokens):
            return 0
        stop = self.segment(id, num_tokens).stop
        return 0 if stop == self._segments(id)[-1].stop else stop

    def recomputes(self, id: SampleId, num_tokens: int) -> bool:
        """Whether keys and values of a sample are computed again once it has so many tokens."""
        pairs = pairwise(self._segments(id))
        return any(before.stop == num_tokens and next.recomputed for before, next in pairs)

    def check(self, versions: VersionRecord, failures: FailureRecord) -> None:
        """Raise for the first of these samples that is not as in the record."""
        for id, segments in versions.items():
            if segments != self._segments(id):
                got, wanted = map(_told, (segments, self._segments(id)))
                raise RecordDiffers(f"sample {id} has tokens up to {got}, not {wanted}")
            if failures.get(id) != self.record.failures.get(id):
                got, wanted = (
                    "ends" if one is None else f"fails at turn {one[0]} ({one[1]})"
                    for one in (failures.get(id), self.record.failures.get(id))
                )
                raise RecordDiffers(f"the episode of sample {id} {got}; there it {wanted}")

    def _segments(self, id: SampleId) -> tuple[Segment, ...]:
        if id not in self.record.versions:
            raise RecordDiffers(f"it has no sample {id}")
        return self.record.versions[id]


def _told(segments: Sequence[Segment]) -> str:
    """Segments in words."""
    again = " on a cache that it has computed again"
    return ", ".join(f"{x.stop} by v_{x.steps}{again * x.recomputed}" for x in segments)


def no_longer_there(id: SampleId, segment: Segment) -> RecordDiffers:
    """The error of a sample whose next tokens are of weights that the run has no longer."""
    return RecordDiffers(f"sample {id} goes on by v_{segment.steps}, which is not there")
