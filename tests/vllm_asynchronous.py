"""vLLM's asynchronous scheduling on a CPU, where its platform turns it off.

The scheduler, the runner and its bookkeeping are those of a GPU: tokens of the step before are
placeholders on the host. There is no second device, so streams and events do nothing. What a real
copy would bring late, `late_draws` brings late.
"""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridrl.engines.rollout.vllm.engine import VLLMEngine
from hybridrl.engines.rollout.vllm.steps import BatchDraws, StepQueue


class _Nothing:
    """A stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...


@contextmanager
def asynchronous() -> Iterator[None]:
    """While it lasts, engines schedule as on a GPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(_: Any, config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep))
        patch.setattr(torch.cuda, "Event", _Nothing)
        patch.setattr(torch.cuda, "Stream", _Nothing)
        patch.setattr(torch.cuda, "current_stream", _Nothing)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        yield


class _Late(Future[Any]):
    """A batch's result, with which its log-probabilities and kept ids come."""

    def __init__(
        self, result: "Future[Any]", copies: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        super().__init__()
        self._result, self._copies = result, copies

    def result(self, timeout: float | None = None) -> Any:
        output = self._result.result(timeout)
        for source, target in self._copies:
            target.copy_(source)
        return output


def late_draws(engine: VLLMEngine) -> list[int]:
    """Log-probabilities and kept ids are there when the batch is read, and not before.

    The list grows by the number of batches that compute each time that one is begun, less the one.
    """
    queue, computing = engine._queue, list[int]()
    begin = queue._begin

    def begin_late() -> bool:
        begun = begin()
        if begun:
            batch = queue._batches.pop()
            early = batch.drawn
            late = BatchDraws(
                early.numbers,
                torch.full_like(early.log_probs, torch.nan),
                None if early.kept is None else torch.full_like(early.kept, -2),
            )
            copies = [(early.log_probs, late.log_probs)]
            if early.kept is not None and late.kept is not None:
                copies.append((early.kept, late.kept))
            result, drawn = _Late(batch.result, copies), late
            queue._batches.append(replace(batch, result=result, drawn=drawn))
            computing.append(len(queue._batches) - 1)
        return begun

    assert isinstance(queue, StepQueue)
    queue._begin = begin_late  # type: ignore[method-assign]
    return computing
