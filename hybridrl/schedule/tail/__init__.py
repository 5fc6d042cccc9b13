"""What becomes of the last samples of a round, and of instances that have none left."""

from collections.abc import Collection, Iterable, Sequence

from hybridrl.flow.executor import EarlyTrained, Parked
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule import StageSpan
from hybridrl.schedule.instances import Instance


class NoTail:
    """The loop's questions about the tail, answered for one in which nothing happens.

    Samples stay where they decode, and instances without samples have passes to run alone.
    `MovingTail` answers otherwise; the loop knows no other difference.
    """

    width = 1
    """Instances that become one for the last samples."""
    num_migrated = num_widened = num_trained = 0
    """Samples that came to another instance, or a wide one, and those trained early."""
    train_seconds = 0.0
    """Seconds that instances have trained early."""
    spans: Sequence[StageSpan] = ()
    is_training = False
    """Whether the pool that trains computes a gradient."""

    def gather(self, is_queue_empty: bool) -> None:
        """Calls are about to begin: instances may be told to give their samples away."""

    def arrive(self, source: Instance, parked: Parked) -> Sequence[SampleId]:
        """Samples are parked to move on; gives those that the tail has no instance for."""
        raise AssertionError(f"instance {source.number} gives samples away, and none takes them")

    def use(self, instance: Instance, is_queue_empty: bool) -> bool:
        """Give an instance without samples or passes something to do; tells whether it has."""
        return False

    def use_pool(self) -> None:
        """Give ranks that do not generate something to do."""

    def awaits(self, instance: Instance) -> bool:
        """Tell whether the end of one of several samples of an instance lets something begin."""
        return False

    def touched(self, prompts: Iterable[int]) -> None:
        """Stages may have made samples of these prompts ready to be trained."""

    def trained(self, event: EarlyTrained) -> dict[int, None]:
        """An instance has computed gradients; gives the prompts of its samples."""
        raise AssertionError(event)

    def kept_prompts(self) -> Collection[int]:
        """Prompts whose samples ranks that train have, or are to say whether they have them."""
        return ()

    def take_refused(self) -> Collection[int]:
        """Prompts whose samples ranks that train were given, and do not have: once."""
        return ()

    def undone(self, prompt: int) -> None:
        """Samples that were ready to be trained are not, until `touched` finds them so."""

    def dies(self, instance: Instance) -> list[SampleId]:
        """An instance is dead; gives the samples that die with it elsewhere."""
        return []

    def lost(self, instance: Instance, samples: Sequence[Sample]) -> None:
        """These finished samples were on it, and begin anew."""
