"""Samples that wait for a forward pass on an instance, by who may take them."""

from collections import defaultdict

from hybridrl.flow.sample import Sample, SampleId


class WaitingSamples:
    """Those of one stage: free for every instance, or for one alone, on which they are kept.

    On hundreds of GPUs as many instances look for work at each event. So none looks at samples that
    are kept elsewhere.
    """

    def __init__(self) -> None:
        self._kept_on: dict[SampleId, int | None] = {}
        self._samples: dict[int | None, dict[SampleId, Sample]] = defaultdict(dict)

    def __bool__(self) -> bool:
        return bool(self._kept_on)

    def add(self, sample: Sample, instance: int | None) -> None:
        """It waits from now on, for `instance` alone; None: for any."""
        self._kept_on[sample.id] = instance
        self._samples[instance][sample.id] = sample

    def remove(self, id: SampleId) -> Sample | None:
        """It waits no more; None if it did not."""
        if id not in self._kept_on:
            return None
        return self._samples[self._kept_on.pop(id)].pop(id)

    def keep(self, id: SampleId, instance: int | None) -> None:
        """From now on `instance` alone may take a sample, if it waits; None: any."""
        sample = self.remove(id)
        if sample is not None:
            self.add(sample, instance)

    def able(self, instance: int) -> list[Sample]:
        """Those that an instance may take."""
        return [*self._samples[None].values(), *self._samples[instance].values()]

    def tokens(self) -> int:
        """Tokens of all that wait."""
        return sum(s.tokens for samples in self._samples.values() for s in samples.values())
