"""CUDA graphs of a decode step, one for each bucket of rows.

A graph holds the addresses of weights, cache and state: whoever frees one of them drops the graphs.
"""

import logging
from collections.abc import Sequence

import torch

from hybridrl.engines.rollout.graph_step import GraphStep

logger = logging.getLogger(__name__)

Step = tuple[torch.Tensor, ...]
"""The results of a `GraphStep` in a graph, which its next replay overwrites."""


class CapturedSteps:
    """Replays `step` for any slots [rows], where `rows` is one of `buckets`.

    A bucket is captured when it is first needed. All graphs share one memory pool, since they are
    replayed one after the other on one stream.
    """

    def __init__(
        self, step: GraphStep, buckets: Sequence[int], spare: int, device: torch.device
    ) -> None:
        """`spare` is the slot in which nothing runs: a step over it alone changes nothing."""
        self._step, self._buckets, self._spare = step, frozenset(buckets), spare
        self._slots = torch.full((max(buckets),), spare, dtype=torch.int32, device=device)
        self._rows: torch.Tensor | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Step]] = {}

    @property
    def num_captured(self) -> int:
        """Graphs so far."""
        return len(self._graphs)

    def __call__(self, slots: torch.Tensor) -> Step:
        """A step of the sequences in `slots`, uncaptured where they are of no bucket."""
        rows = len(slots)
        if rows not in self._buckets:
            return self._step(slots)
        if rows not in self._graphs:
            self._graphs[rows] = self._captured(rows)
            self._rows = None
        if slots is not self._rows:
            self._slots[:rows].copy_(slots)
            self._rows = slots
        graph, drawn = self._graphs[rows]
        graph.replay()
        return drawn

    def _captured(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Step]:
        """The graph of a step of so many rows, and its results."""
        self._slots.fill_(self._spare)
        slots = self._slots[:rows]
        # Kernels are compiled and libraries take their workspaces before a capture, not in it.
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._step(slots)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            drawn = self._step(slots)
        logger.info("captured a decode step of %d rows as a CUDA graph", rows)
        return graph, drawn
