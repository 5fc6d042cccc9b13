"""Sampling in vLLM from each sample's own random stream.

vLLM's generators have a state: a resumed request would draw the first numbers again. So a logits
processor samples the tokens as the native engine does: the uniform of (stream, position) against
the cumulative distribution. It leaves vLLM one choice a row. The log-probabilities are those of the
same logits and temperature, before penalties, top-k and the like, as in the native engine; or over
the kept ids, where these are recorded.

A draw needs no earlier token, only how many there are. So nothing waits for the device. Tokens stay
there; log-probabilities are on the host once vLLM has the step's tokens there. And vLLM may
schedule a step before the last one is read (`vllm.steps`). Penalties and bad words of several
tokens are the exception (`reads_tokens`).

The engine imports vLLM's names from here: only this module imports vLLM at its own import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from hybridrl.engines.rollout.batch import sampling_batch
from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.logit_edits import SeenTokens, barred
from hybridrl.engines.rollout.random import UniformTable
from hybridrl.engines.rollout.sampling import SamplingBatch, sample
from hybridrl.engines.rollout.vllm.steps import BatchDraws
from hybridrl.models.image_text import image_pads

__all__ = [
    "DRAWS",
    "Draws",
    "RequestOutputKind",
    "SamplingParams",
    "StreamSampler",
]

DRAWS = "hybridrl_draws"
"""The key of a request's `Draws` in vLLM's `SamplingParams.extra_args`."""


_Draw = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, eq=False, slots=True)
class Draws:
    """A request in vLLM, whose prompt there includes the first `start` tokens of the response.

    The engine and the logits processor share the object, so it must not be copied on the way.
    """

    request: Request
    start: int

    def __deepcopy__(self, memo: dict[int, Any]) -> "Draws":
        return self


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a batch, until requests join, leave or move: all but the tokens so far."""

    requests: Sequence[Request]
    slots: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    numbers: Mapping[object, int]
    sampling: SamplingBatch


class StreamSampler(LogitsProcessor):
    """Samples the next token of every request and leaves vLLM no other.

    The first tensor-parallel rank samples and broadcasts, so that all agree.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        slots = vllm_config.scheduler_config.max_num_seqs
        self._device = device
        self._places: dict[int, tuple[Draws, int]] = {}  # a row's request, and its slot
        self._free = list(range(slots - 1, -1, -1))
        self._uniforms = UniformTable(slots)
        self._seen = SeenTokens(slots, device)
        self._pads = image_pads(vllm_config.model_config.hf_config)
        self._rows: _Rows | None = None
        self._drawn: BatchDraws | None = None
        # NCCL allocates at the first broadcast. vLLM measures its memory after this.
        get_tp_group().broadcast(torch.zeros(1, device=device))

    def follow(self, input_batch: Any) -> None:
        """Take numbers of tokens from vLLM's `InputBatch`, whose arrays have them for all rows.

        vLLM need not bring the tokens themselves to the host before a draw.
        """
        self._input_batch = input_batch
        input_batch.logitsprocs_need_output_token_ids = False

    def is_argmax_invariant(self) -> bool:
        """No: this processor decides the maximum."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the rows of requests, in vLLM's order: removed, added, moved."""
        if batch_update is None:
            return
        self._rows = None
        for index in batch_update.removed:
            self._leave(index)
        for index, params, _, _ in batch_update.added:
            self._leave(index)
            slot = self._free.pop()
            self._uniforms.forget([slot])
            self._seen.forget([slot])
            assert params.extra_args is not None
            self._places[index] = params.extra_args[DRAWS], slot
        for source, target, direction in batch_update.moved:
            moved, other = self._places.pop(source, None), self._places.pop(target, None)
            if moved is not None:
                self._places[target] = moved
            if other is not None and direction is MoveDirectionality.SWAP:
                self._places[source] = other
            elif other is not None:
                self._free.append(other[1])

    def _leave(self, index: int) -> None:
        place = self._places.pop(index, None)
        if place is not None:
            self._free.append(place[1])

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab], changed in place: the sampled token's is infinite."""
        rows = self._rows = self._rows or self._gather(*logits.shape)
        tokens, log_probs, kept = self._draw(logits, rows)
        # vLLM copies the tokens after this, and waits for them before it reads the step.
        if kept is not None:
            kept = kept.to("cpu", non_blocking=True)
        self._drawn = BatchDraws(rows.numbers, log_probs.to("cpu", non_blocking=True), kept)
        return logits.scatter_(1, tokens[:, None], torch.inf)

    def take(self) -> BatchDraws:
        """The draws of the last batch."""
        drawn, self._drawn = self._drawn, None
        assert drawn is not None, "vLLM has sampled without the logits processor"
        return drawn

    def _gather(self, num_rows: int, vocab_size: int) -> _Rows:
        places = [self._places[index] for index in range(num_rows)]
        requests = [draws.request for draws, _ in places]
        return _Rows(
            requests=requests,
            slots=np.array([slot for _, slot in places], np.int64),
            starts=np.array([draws.start for draws, _ in places], np.int64),
            numbers={draws: row for row, (draws, _) in enumerate(places)},
            sampling=sampling_batch([r.sampling for r in requests], vocab_size, self._device),
        )

    def _draw(self, logits: torch.Tensor, rows: _Rows) -> _Draw:
        """What `sample` draws, on the device of every rank."""
        group, num_kept = get_tp_group(), rows.sampling.num_kept
        message = torch.empty(2 + num_kept, len(logits), dtype=torch.int64, device=self._device)
        if group.rank_in_group == 0:
            tokens, log_probs, kept = self._sample(logits, rows)
            if group.world_size == 1:
                return tokens, log_probs, kept
            message = torch.stack((tokens, log_probs.double().view(torch.int64)))
            if kept is not None:
                message = torch.cat((message, kept.T.long()))
        group.broadcast(message)
        return message[0], message[1].view(torch.float64), message[2:].T if num_kept else None

    def _sample(self, logits: torch.Tensor, rows: _Rows) -> _Draw:
        known, num_rows = self._input_batch, len(logits)
        # Of a prompt that is computed in parts vLLM drops what is drawn behind the first ones.
        in_vllm = known.num_tokens_no_spec[:num_rows] - known.num_prompt_tokens[:num_rows]
        counts = rows.starts + in_vllm
        uniforms = torch.from_numpy(self._uniforms.draw(rows.requests, rows.slots, counts))
        if self._device.type == "cuda":
            # Else the host would wait for the model.
            uniforms = uniforms.pin_memory()
        edits, edited = rows.sampling.edits, None
        if edits is not None:
            edited = edits.apply(logits, rows.requests, rows.slots, counts, self._seen)
        edited = barred(logits, self._pads, edited)
        uniforms = uniforms.to(self._device, non_blocking=True)
        return sample(logits, uniforms, rows.sampling, edited)
