"""The one interface of rollout engines. An engine is local to a generation instance."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hybridrl.layout.plan import Plan
from hybridrl.layout.weight_switch import SwitchStats, Tensors


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are all tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class KV:
    """What one rank has cached of a parked request, in host memory.

    `blocks` [layers, 2, kv_heads, tokens, head_dim]: keys and values of the rank's own layers and
    heads, of all tokens of prompt and response but the pending last one; contiguous. It pickles as
    a numpy array, so that an object store takes and gives it without a copy; such a tensor may lie
    in read-only memory and is only to be read.
    """

    blocks: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values: layers * 2 * kv_heads * tokens * head_dim * itemsize."""
        return self.blocks.nbytes

    def __reduce__(self) -> tuple[Callable[..., "KV"], tuple[Any, ...]]:
        # As bytes: numpy has no bfloat16.
        return _unpickle_kv, (self.blocks.view(torch.uint8).numpy(), self.blocks.dtype)


def _unpickle_kv(array: npt.NDArray[np.uint8], dtype: torch.dtype) -> KV:
    with warnings.catch_warnings():
        # An object store gives read-only memory; nobody writes to it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return KV(torch.from_numpy(array).view(dtype))


@dataclass(slots=True)
class Request:
    """One response to generate.

    `stream` is the sample's 64-bit random key: token number i draws its uniform from (stream, i),
    so batch, order and rank change nothing. `prefix` names a prompt whose KV blocks requests with
    the same `prefix` share. `response_ids` and `log_probs` hold what was generated before a park.

    `kv` is what `park(..., with_kv=True)` found in the cache. `submit` then puts it back instead of
    computing it, whatever weights it was made with; each rank of an instance gives its own part.
    """

    id: object
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stream: int
    prefix: object = None
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kv: KV | None = None

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class Output:
    """A finished response; `finish` is `stop` or `length`.

    The last token is then the stop token, or that which completes a stop text.

    `log_probs[i]` is that of `token_ids[i]` under the distribution it was drawn from: after
    temperature, before top-k and top-p.
    """

    id: object
    token_ids: list[int]
    log_probs: list[float]
    finish: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the engine was made, and its present load.

    `running` counts finished requests that no step has handed out yet. For a cost model:
    `decode_tokens` are the drawn tokens (rows summed over `decode_steps`), `cached_tokens` what
    they attended to, summed likewise, `prefill_tokens` those
    computed in `prefill_calls` forward passes, `replayed_tokens` those computed by decode passes
    that draw nothing (deterministic engines only), `restored_tokens` those put back from a
    `Request.kv`; `kv_bytes_per_token` is this rank's. `has_cache` is False asleep and after
    `release_cache`.
    """

    running: int
    waiting: int
    decode_steps: int
    decode_tokens: int
    cached_tokens: int
    prefill_calls: int
    prefill_tokens: int
    replayed_tokens: int
    restored_tokens: int
    shared_prompt_tokens: int
    num_preempted: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_bytes_per_token: int
    has_cache: bool


class RolloutEngine(Protocol):
    """Continuous batching over a paged KV cache.

    States: asleep (no weights, no cache) -> `wake` -> ready -> `sleep`. A ready engine may give its
    cache back (`release_cache`) and makes a new one when there is work. Weights may be updated only
    while nothing runs.
    """

    @property
    def model(self) -> PreTrainedModel | None:
        """The module with the weights, which others may compute with; None where none has them."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, first come first served; a parked request goes on where it stopped.

        With its `kv`, if it has one, else by computing its tokens again.
        """
        ...

    def step(self) -> list[Output]:
        """One decode step for all running requests (admitting and prefilling waiting ones).

        Gives the finished ones; under pipeline parallelizm, those of the step before.
        """
        ...

    def park(self, ids: Iterable[object], with_kv: bool = False) -> list[Request]:
        """Take unfinished requests out, with what they have generated; `submit` resumes them.

        `with_kv` fills `Request.kv` of those that run; one that waits has what it was submitted
        with.
        """
        ...

    def update_weights(self, plan: Plan, source: Tensors) -> SwitchStats:
        """Fill this rank's part of the weights from the shards of training.

        All ranks of the plan call it together; see `WeightSwitch.switch` for `source`.
        """
        ...

    def write_weights(self, write: Callable[[Tensors], None]) -> None:
        """Have `write` fill this rank's part of the weights, without any message.

        It is called with tensors by name, with all of them or with those of one layer after the
        other, and fills each whole.
        """
        ...

    def release_cache(self) -> None:
        """Free the KV cache, keep the weights; nothing may run. Work brings the cache back."""
        ...

    def sleep(self) -> None:
        """Free weights and KV cache."""
        ...

    def wake(self) -> None:
        """Allocate the weights (`update_weights` fills them); work brings the cache."""
        ...

    def stats(self) -> Stats:
        """Counters and load."""
        ...

    def close(self) -> None:
        """End what the engine started."""
        ...
