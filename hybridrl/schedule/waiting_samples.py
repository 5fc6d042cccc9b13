"""Samples that wait for a forward pass on an instance, by who may take them."""

import heapq
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from hybridrl.flow.sample import Sample, SampleId

_Entry = tuple[int, SampleId, Sample]
"""Minus its tokens come first, so that lists of entries have the longest first."""


class WaitingSamples:
    """Samples that wait for one stage. Each is free for every instance, or kept for one alone.

    On hundreds of GPUs as many instances look for work at each event. So none looks at samples that
    are kept elsewhere, or at more than it takes.

    `instance_of` gives the instance on which a sample is. A sample does not leave it while it waits
    but for the one that keeps it.
    """

    def __init__(self, instance_of: Callable[[Sample], int]) -> None:
        self.instance_of = instance_of
        self._waiting: dict[SampleId, tuple[Sample, bool, int]] = {}  # is it free, and where
        self._free: dict[int, list[_Entry]] = defaultdict(list)  # by instance, the longest first
        self._kept: dict[int, list[_Entry]] = defaultdict(list)
        self._free_tokens = 0
        self._kept_tokens = Counter[int]()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, sample: Sample, instance: int | None) -> None:
        """It waits from now on, for `instance` alone; None: for any. It may wait already."""
        self.remove(sample.id)
        free = instance is None
        place = self.instance_of(sample) if instance is None else instance
        self._waiting[sample.id] = sample, free, place
        insort((self._free if free else self._kept)[place], _entry(sample))
        self._count(sample.tokens, free, place)

    def remove(self, id: SampleId) -> Sample | None:
        """Take a sample out, since it no longer waits; returns None if it did not wait."""
        if id not in self._waiting:
            return None
        sample, free, place = self._waiting.pop(id)
        entries = (self._free if free else self._kept)[place]
        del entries[bisect_left(entries, _entry(sample))]
        self._count(-sample.tokens, free, place)
        return sample

    def keep(self, id: SampleId, instance: int | None) -> None:
        """From now on `instance` alone may take a sample, if it waits; None: any."""
        sample = self.remove(id)
        if sample is not None:
            self.add(sample, instance)

    def able(self, instance: int) -> Iterator[Sample]:
        """Yield the samples that an instance may take, its own before those of others.

        Within each of the two the longest comes first.
        """
        own = self._free.get(instance, ()), self._kept.get(instance, ())
        others = (entries for place, entries in self._free.items() if place != instance)
        for entries in (own, others):
            for _, _, sample in heapq.merge(*entries):
                yield sample

    def able_tokens(self, instance: int) -> int:
        """Tokens of those that an instance may take; 0 where there are none."""
        return self._free_tokens + self._kept_tokens[instance]

    def least_tokens(self, instance: int) -> int:
        """Tokens of the shortest sample that an instance may take, of which there is one."""
        able = [*self._free.values(), self._kept.get(instance, [])]
        return min(-entries[-1][0] for entries in able if entries)

    def tokens(self) -> int:
        """Tokens of all that wait."""
        return self._free_tokens + self._kept_tokens.total()

    def _count(self, tokens: int, free: bool, place: int) -> None:
        if free:
            self._free_tokens += tokens
        else:
            self._kept_tokens[place] += tokens


def _entry(sample: Sample) -> _Entry:
    return -sample.tokens, sample.id, sample
