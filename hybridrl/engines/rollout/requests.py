"""The requests that an engine takes, and how their responses grow and end."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from hybridrl.engines.rollout.interface import REST, HeldTurn, Output, Request, Turn
from hybridrl.engines.rollout.kept_ids import IdArray
from hybridrl.engines.rollout.stops import StopStrings


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


def append_token(
    request: Request,
    token: int,
    log_prob: float,
    kept: IdArray | None,
    stops: StopStrings | None,
) -> str | None:
    """Append a drawn token; why it ends the response or a turn, or None: see `finish_of`.

    `kept` are the ids that it was drawn from, where the request keeps them.
    """
    request.response_ids.append(token)
    request.log_probs.append(log_prob)
    if request.kept_ids is not None:
        assert kept is not None, f"request {request.id!r} keeps ids"
        request.kept_ids.append(kept)
    return finish_of(request, stops)


def finish_of(request: Request, stops: StopStrings | None) -> str | None:
    """Why the last token ends the response, or the turn of a conversation, or None.

    `stop` or `length`; `REST` where it does not end, but the request rests there. Stop texts are
    looked for in the turn alone.
    """
    sampling, start, ids = request.sampling, request.turn_start, request.response_ids
    if ids[-1] in sampling.stop_token_ids:
        return "stop"
    for texts in (stops, request.stops):
        if texts is not None and texts.may_close(ids[-1:]):
            turn = ids[start:] if start else ids
            if texts.ended(turn, max(0, sampling.min_new_tokens - start)):
                return "stop"
    num_tokens, most = len(ids), sampling.max_turn_tokens
    if num_tokens >= sampling.max_new_tokens or (most and num_tokens - start >= most):
        return "length"
    return REST if num_tokens == request.rests_at else None


def tokens_left(request: Request) -> int:
    """The tokens that may be drawn until the response or its turn has to end, or it rests."""
    sampling = request.sampling
    ends = [sampling.max_new_tokens]
    if sampling.max_turn_tokens:
        ends.append(request.turn_start + sampling.max_turn_tokens)
    if request.rests_at:
        ends.append(request.rests_at)
    return min(ends) - len(request.response_ids)


def end_turn(request: Request, finish: str) -> HeldTurn:
    """The turn in progress has ended, or rests; the request is held from now on."""
    stop = len(request.response_ids)
    rests = stop == request.rests_at
    if finish == REST:
        return HeldTurn(request.id, [], finish, stop, rests)
    request.turns.append(Turn(request.turn_start, stop, finish))
    return HeldTurn(request.id, request.response_ids[request.turn_start :], finish, stop, rests)


def append_reply(request: Request, tokens: Sequence[int], vocab_size: int) -> None:
    """Append a reply to a held request, whose next turn begins behind it.

    Raises ValueError, before anything is appended, for tokens that cannot continue it.
    """
    name, most = f"request {request.id!r}", request.sampling.max_new_tokens
    total = len(request.response_ids) + len(tokens)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(
            f"{name} is answered with token ids {min(tokens)} to {max(tokens)}; "
            f"the model's vocabulary has 0 to {vocab_size - 1}"
        )
    if total >= most:
        raise ValueError(
            f"{name} would have {total} response tokens with the reply; "
            f"rollout.max_new_tokens={most} must leave room for another"
        )
    request.response_ids += tokens
    request.log_probs += [0.0] * len(tokens)
    if request.kept_ids is not None:
        request.kept_ids.append_whole(len(tokens))
    request.turn_start = total


def output_of(request: Request, finish: str) -> Output:
    """A response that has ended."""
    return Output(
        id=request.id,
        token_ids=request.response_ids,
        log_probs=request.log_probs,
        finish=finish,
        routed_experts=request.routed_experts,
        turns=tuple(request.turns),
        kept_ids=request.kept_ids,
        recomputed_at=tuple(request.recomputed_at),
    )
