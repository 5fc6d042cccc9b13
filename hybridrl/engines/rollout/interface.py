"""The one interface of rollout engines. An engine is local to a generation instance."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are all tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Request:
    """One response to generate.

    `stream` is the sample's 64-bit random key: token number i draws its uniform from (stream, i),
    so batch, order and rank change nothing. `prefix` names a prompt whose KV blocks requests with
    the same `prefix` share. `response_ids` and `log_probs` hold what was generated before a park.
    """

    id: object
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stream: int
    prefix: object = None
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Output:
    """A finished response; `finish` is `stop` (the stop token is its last one) or `length`.

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

    `running` counts finished requests that no step has handed out yet.
    """

    running: int
    waiting: int
    decode_steps: int
    decode_tokens: int
    prefill_tokens: int
    shared_prompt_tokens: int
    kv_blocks_free: int
    kv_blocks_total: int


class RolloutEngine(Protocol):
    """Continuous batching over a paged KV cache.

    States: asleep (no weights, no cache) -> `wake` -> ready -> `sleep`. Weights may be updated
    only while nothing runs.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, first come first served; a parked request goes on where it stopped."""
        ...

    def step(self) -> list[Output]:
        """One decode step for all running requests (admitting and prefilling waiting ones).

        Gives the finished ones; under pipeline parallelism, those of the step before.
        """
        ...

    def park(self, ids: Iterable[object]) -> list[Request]:
        """Take unfinished requests out, with what they have generated; `submit` resumes them."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors, named as in `state_dict()`, into the engine's parameters."""
        ...

    def sleep(self) -> None:
        """Free weights and KV cache."""
        ...

    def wake(self) -> None:
        """Allocate weights (to be filled by `update_weights`) and KV cache."""
        ...

    def stats(self) -> Stats:
        """Counters and load."""
        ...
