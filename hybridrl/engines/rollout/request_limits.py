"""The largest requests that an engine takes, and the refusal of others."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from hybridrl.engines.rollout.interface import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The largest requests of an engine; sequences are of prompt and response, in tokens.

    `last_cached`: the cache must have room for the last token of a response, too.
    """

    vocab_size: int
    max_sequence: int
    block_size: int
    num_blocks: int
    last_cached: bool = False


def check_positions(max_sequence: int, max_positions: int) -> None:
    """Raise ValueError for sequences that have more tokens than the model has positions."""
    if max_sequence > max_positions:
        raise ValueError(
            f"max_sequence={max_sequence}: the model's max_position_embeddings is {max_positions}"
        )


def check_requests(
    requests: Sequence[Request], limits: AdmissionLimits, unfinished: Container[object]
) -> None:
    """Raise ValueError for a request that can never run or whose id is taken."""
    seen: set[object] = set()
    for request in requests:
        _check(request, limits)
        if request.id in seen or request.id in unfinished:
            raise ValueError(f"request {request.id!r} is already in the engine")
        seen.add(request.id)


def _check(request: Request, limits: AdmissionLimits) -> None:
    name, sampling = f"request {request.id!r}", request.sampling
    if not request.prompt_ids:
        raise ValueError(f"{name} has an empty prompt")
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < limits.vocab_size:
        raise ValueError(
            f"{name} has token ids {min(request.prompt_ids)} to {max(request.prompt_ids)}; "
            f"the model's vocabulary has 0 to {limits.vocab_size - 1}"
        )
    if len(request.response_ids) >= sampling.max_new_tokens and not request.is_held:
        raise ValueError(
            f"{name} has {len(request.response_ids)} response tokens already; "
            f"rollout.max_new_tokens={sampling.max_new_tokens}"
        )
    total = len(request.prompt_ids) + sampling.max_new_tokens
    reach = (
        f"{name} may reach {total} tokens (prompt {len(request.prompt_ids)} + "
        f"rollout.max_new_tokens={sampling.max_new_tokens}); "
    )
    if total > limits.max_sequence:
        raise ValueError(f"{reach}the longest sequence is {limits.max_sequence}")
    if -(-(total - (not limits.last_cached)) // limits.block_size) > limits.num_blocks:
        cached = limits.num_blocks * limits.block_size
        raise ValueError(f"{reach}rollout.kv_cache_tokens={cached} can never hold it")
