"""Groups that ranks which do not generate train as they come (Periodic Asynchrony, 2511.18871)."""

from collections.abc import Callable, Iterable, Sequence

from hybridrl.flow.executor import TRAINING_POOL, EarlyTrained
from hybridrl.schedule import StageSpan
from hybridrl.schedule.tail import NoTail
from hybridrl.schedule.tail.early import StreamedUpdate


class PoolUpdate(NoTail):
    """The part of a step's update that begins while others of its samples are still made.

    Whenever the pool is idle it takes all whole groups that wait, if they are a micro-batch a rank.
    What is left when the last sample is there is trained by the update itself.
    """

    def __init__(
        self, update: StreamedUpdate, least_tokens: float, of_step: Callable[[int], bool]
    ) -> None:
        """It trains prompts `of_step` alone, and `least_tokens` or more in a call."""
        self.update, self.least_tokens, self.of_step = update, least_tokens, of_step

    @property
    def num_trained(self) -> int:  # type: ignore[override]
        """Samples whose gradient is there."""
        return self.update.num_trained

    @property
    def train_seconds(self) -> float:  # type: ignore[override]
        """Seconds that the pool has trained early, as if all instances had shared them."""
        return self.update.seconds * len(self.update.stages.executor.instances)

    @property
    def spans(self) -> Sequence[StageSpan]:  # type: ignore[override]
        """From the first start to the last end."""
        return self.update.spans

    @property
    def is_training(self) -> bool:  # type: ignore[override]
        """Whether the pool computes a gradient."""
        return self.update.is_running

    def touched(self, prompts: Iterable[int]) -> None:
        """Stages may have made samples of these prompts ready to be trained."""
        self.update.add(filter(self.of_step, prompts))

    def use_pool(self) -> None:
        """Let the pool train what waits, if it is idle and that is enough."""
        pool_is_busy = self.is_training or self.update.stages.uses_pool(self.update.stage)
        if not pool_is_busy:
            self.update.start_in_pool(self.least_tokens)

    def kept_prompts(self) -> set[int]:
        """Groups whose gradient the pool has, or for which a call is in flight."""
        return self.update.begun_prompts

    def take_refused(self) -> set[int]:
        """Groups that could not be copied, since an instance with some of it had died."""
        return self.update.take_refused()

    def undone(self, prompt: int) -> None:
        """A group does not wait for the pool."""
        self.update.undone(prompt)

    def trained(self, event: EarlyTrained) -> dict[int, None]:
        """The pool has computed gradients; gives the prompts of its samples."""
        assert event.instance == TRAINING_POOL, event
        return self.update.trained(event)
