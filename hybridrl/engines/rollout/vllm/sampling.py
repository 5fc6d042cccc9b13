"""Sampling in vLLM from each sample's own random stream.

vLLM's generators have a state: a resumed request would draw the first numbers again. So a logits
processor samples the tokens as the native engine does: the uniform of (stream, position) against
the cumulative distribution. It leaves vLLM one choice a row. The log-probabilities are those of the
same logits and temperature, before penalties, top-k and the like, as in the native engine.

The engine imports vLLM's names from here: only this module imports vLLM at its own import.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.logit_edits import SeenTokens
from hybridrl.engines.rollout.random import UniformTable
from hybridrl.engines.rollout.sampling import SamplingBatch, sample

__all__ = [
    "DRAWS",
    "Draws",
    "RequestOutputKind",
    "SamplingParams",
    "StreamSampler",
    "tokens_input",
]

DRAWS = "hybridrl_draws"
"""The key of a request's `Draws` in vLLM's `SamplingParams.extra_args`."""


@dataclass(eq=False, slots=True)
class Draws:
    """A request in vLLM, whose prompt there includes the first `start` tokens of the response.

    The engine and the logits processor share the object, so it must not be copied on the way.
    """

    request: Request
    start: int

    def __deepcopy__(self, memo: dict[int, Any]) -> "Draws":
        return self

    def record(self, position: int, log_prob: float) -> None:
        """Record the log-probability of response token `position`.

        A prompt that is computed in chunks samples after each; only the last counts.
        """
        del self.request.log_probs[position:]
        self.request.log_probs.append(log_prob)


@dataclass(eq=False, slots=True)
class _Row:
    draws: Draws
    drawn: list[int]  # vLLM's list of the tokens so far
    slot: int


class StreamSampler(LogitsProcessor):
    """Samples the next token of every request and leaves vLLM no other.

    The first tensor-parallel rank samples and broadcasts, so that all agree.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        slots = vllm_config.scheduler_config.max_num_seqs
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._uniforms = UniformTable(slots)
        self._seen = SeenTokens(slots, device)
        self._batch: SamplingBatch | None = None

    def is_argmax_invariant(self) -> bool:
        """No: this processor decides the maximum."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the rows of requests, in vLLM's order: removed, added, moved."""
        if batch_update is None:
            return
        self._batch = None
        for index in batch_update.removed:
            self._leave(index)
        for index, params, _, drawn in batch_update.added:
            self._leave(index)
            slot = self._free.pop()
            self._uniforms.forget([slot])
            self._seen.forget([slot])
            assert params.extra_args is not None
            self._rows[index] = _Row(params.extra_args[DRAWS], drawn, slot)
        for source, target, direction in batch_update.moved:
            moved, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if other is not None and direction is MoveDirectionality.SWAP:
                self._rows[source] = other
            elif other is not None:
                self._free.append(other.slot)

    def _leave(self, index: int) -> None:
        row = self._rows.pop(index, None)
        if row is not None:
            self._free.append(row.slot)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab], changed in place: the sampled token's is infinite."""
        rows = [self._rows[index] for index in range(len(logits))]
        positions = np.array([row.draws.start + len(row.drawn) for row in rows], np.int64)
        tokens, log_probs = self._draw(logits, rows, positions)
        for row, position, log_prob in zip(
            rows, positions.tolist(), log_probs.tolist(), strict=True
        ):
            row.draws.record(position, log_prob)
        return logits.scatter_(1, tokens.to(logits.device)[:, None], torch.inf)

    def _draw(
        self, logits: torch.Tensor, rows: list[_Row], positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [rows] int64 and their log-probabilities [rows]."""
        group = get_tp_group()
        message = torch.empty(2, len(rows), dtype=torch.int64)
        if group.rank_in_group == 0:
            requests = [row.draws.request for row in rows]
            slots = np.array([row.slot for row in rows], np.int64)
            uniforms = torch.from_numpy(self._uniforms.draw(requests, slots, positions))
            if self._batch is None:
                self._batch = SamplingBatch.of(
                    [request.sampling for request in requests], logits.shape[-1], self._device
                )
            edited = None
            if self._batch.edits is not None:
                edited = self._batch.edits.apply(logits, requests, slots, positions, self._seen)
            tokens, log_probs = sample(logits, uniforms.to(self._device), self._batch, edited)
            if group.world_size == 1:
                return tokens, log_probs
            message = torch.stack((tokens, log_probs.double().view(torch.int64))).cpu()
        dist.broadcast(message, group=group.cpu_group, group_src=0)
        return message[0], message[1].view(torch.float64)
