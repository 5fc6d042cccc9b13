"""Seconds of passes over a model's chunks, for the run's records."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from hybridrl.engines.train.packed import PackedBatch
from hybridrl.pipelines.problem import PassKind
from hybridrl.pipelines.recorded import RecordedPass

MOST = 128
"""Passes that are kept of a call."""

TimePass = Callable[[PassKind, int, int], AbstractContextManager[None]]
"""From a pass's kind, chunk and micro-batch: the context in which it computes."""


def untimed(kind: PassKind, chunk: int, micro_batch: int) -> AbstractContextManager[None]:
    """The context of a pass that nobody times."""
    return nullcontext()


class PassClock:
    """Times the passes of one engine once `enabled`; its ranks need not agree.

    On a GPU a pass takes the time of its stream, by events, so that nothing waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.enabled = device, False
        self._timed: list[tuple[RecordedPass, float | torch.cuda.Event]] = []
        """Passes with their seconds, or on a GPU with the event at their end."""
        self._starts: list[torch.cuda.Event] = []

    @contextmanager
    def of(self, kind: PassKind, chunk: int, row: PackedBatch) -> Iterator[None]:
        """Time the body, a pass of `row`. One that is computed in passes itself is left out."""
        if not self.enabled or row.passes or len(self._timed) == MOST:
            yield
            return
        lengths = row.packing.lengths
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        timed = RecordedPass(kind, chunk, row.ids.shape[1], len(row.targets), pairs, 0.0)
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._starts.append(start)
            self._timed.append((timed, end))
        else:
            began = time.perf_counter()
            yield
            self._timed.append((timed, time.perf_counter() - began))

    def take(self) -> tuple[RecordedPass, ...]:
        """The passes since the last call, in their order. On a GPU it waits for the last one."""
        timed, self._timed = self._timed, []
        starts, self._starts = self._starts, []
        seconds = [x for _, x in timed if isinstance(x, float)]
        ends = [x for _, x in timed if not isinstance(x, float)]
        if ends:
            ends[-1].synchronize()
        seconds += [a.elapsed_time(b) / 1e3 for a, b in zip(starts, ends, strict=True)]
        return tuple(
            each._replace(seconds=own) for (each, _), own in zip(timed, seconds, strict=True)
        )
