"""The steps of vLLM's engine, of which the next may compute while one is read.

vLLM calls it asynchronous scheduling: meanwhile the device does not wait for the scheduler, the
preparation of inputs and the handling of outputs. The tokens of the step before are placeholders on
the host then; on the device they are known.

vLLM's own loop (`EngineCore.step_with_batch_queue`) returns nothing while its queue fills, and
begins a step that its caller may never read. Here a call returns a token of each running request,
as without a queue, and says whether it begins another step.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hybridrl.engines.rollout.interface import SamplingParams


@dataclass(frozen=True, slots=True)
class BatchDraws:
    """The draws of a batch: each request's row in it, and `log_probs` [rows].

    `kept` [rows, num_kept] are the ids of `sample`, None where no row keeps them. Both are in host
    memory once the batch is read.
    """

    numbers: Mapping[object, int]
    log_probs: torch.Tensor
    kept: torch.Tensor | None = None


class Sampler(Protocol):
    """What draws the tokens of a batch."""

    def take(self) -> BatchDraws:
        """The draws of the last batch."""
        ...


@dataclass(frozen=True, slots=True)
class _Batch:
    scheduled: Any  # vLLM's SchedulerOutput
    result: "Future[Any]"  # of vLLM's ModelRunnerOutput
    drawn: BatchDraws


class StepQueue:
    """The batches that were begun and are not read yet: at most one between calls.

    Where scheduling is asynchronous, a step begins another before it reads one, but for:

    - the last step of a call that counts tokens, so that calls begin and end as without a queue;
    - while some of the requests draw by the tokens before (`num_reading`, see `reads_tokens`).

    `drawn` are the draws of the batch that was read last. Requests that are aborted lose the token
    of a batch that is not read: it is drawn again, by the same uniform.

    *Example.* The first step begins batches 1 and 2 and reads 1; the second begins 3 and reads 2.
    The last of a call reads 3, and nothing computes then. A request that is added before the second
    step is in batch 3.
    """

    def __init__(self, core: Any, sampler: Sampler, *, is_asynchronous: bool) -> None:
        self._core, self._sampler, self._is_asynchronous = core, sampler, is_asynchronous
        self._batches: deque[_Batch] = deque()
        self._steps_left: int | None = None
        self.num_reading = 0
        self.drawn = BatchDraws({}, torch.empty(0))

    @property
    def is_ahead(self) -> bool:
        """Whether a batch has begun that is not read."""
        return bool(self._batches)

    def begin_call(self, num_steps: int | None) -> None:
        """A call of so many steps begins, which counts tokens; None: it does not."""
        self._steps_left = num_steps

    def step(self) -> tuple[dict[int, Any], bool]:
        """In place of vLLM's `EngineCore.step`: outputs by client, and whether a batch was read."""
        num_begun = 1 + self._goes_ahead()
        while len(self._batches) < num_begun and self._begin():
            pass
        if not self._batches:
            return {}, False
        return self._read(), True

    def _goes_ahead(self) -> bool:
        """Whether a step begins another before it reads its own."""
        left = self._steps_left
        if left is not None:
            self._steps_left = max(0, left - 1)
        is_last = left is not None and left <= 1
        return self._is_asynchronous and not self.num_reading and not is_last

    def drain(self) -> None:
        """Read what was begun, where all of its requests have left."""
        while self._batches:
            read = self._read()
            assert not any(of_client.outputs for of_client in read.values()), "tokens are lost"

    def _begin(self) -> bool:
        """Begin a batch; False if no request can have one."""
        scheduler, executor = self._core.scheduler, self._core.model_executor
        if not scheduler.has_requests():
            return False
        scheduled = scheduler.schedule()
        result = executor.execute_model(scheduled, non_block=True)
        if not scheduled.total_num_scheduled_tokens:  # but requests that have left the batch
            scheduler.update_from_output(scheduled, result.result())
            return False
        assert result.result() is None, "vLLM has sampled already"
        result = executor.sample_tokens(None, non_block=True)
        self._batches.append(_Batch(scheduled, result, self._sampler.take()))
        return True

    def _read(self) -> dict[int, Any]:
        batch = self._batches.popleft()
        output = batch.result.result()  # which waits for the device
        self.drawn = batch.drawn
        read: dict[int, Any] = self._core.scheduler.update_from_output(batch.scheduled, output)
        return read


def reads_tokens(sampling: SamplingParams) -> bool:
    """Whether draws depend on the tokens before, which the host must have read then."""
    return sampling.has_penalty or any(len(word) > 1 for word in sampling.bad_words)
