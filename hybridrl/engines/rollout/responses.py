"""How a response grows by a drawn token or a reply, and what is handed out once it has ended."""

from collections.abc import Sequence

from hybridrl.engines.rollout.interface import HeldTurn, Output, Request, Turn
from hybridrl.engines.rollout.stops import StopStrings


def append_token(
    request: Request, token: int, log_prob: float, stops: StopStrings | None
) -> str | None:
    """Append a drawn token to a response; returns what `finish_of` says then."""
    request.response_ids.append(token)
    request.log_probs.append(log_prob)
    return finish_of(request, stops)


def finish_of(request: Request, stops: StopStrings | None) -> str | None:
    """Why the last token ends the response, or the turn of a conversation: `stop` or `length`.

    None if it goes on. Call it after every drawn token. Stop texts are looked for in the turn
    alone.
    """
    sampling, start = request.sampling, request.turn_start
    if request.response_ids[-1] in sampling.stop_token_ids:
        return "stop"
    if stops is not None:
        turn = request.response_ids[start:] if start else request.response_ids
        if stops.ended(turn, max(0, sampling.min_new_tokens - start)):
            return "stop"
    return "length" if tokens_left(request) <= 0 else None


def tokens_left(request: Request) -> int:
    """The tokens that may still be drawn in the response, or in the turn of a conversation."""
    sampling, num_tokens = request.sampling, len(request.response_ids)
    most = sampling.max_new_tokens
    if sampling.max_turn_tokens:
        most = min(most, request.turn_start + sampling.max_turn_tokens)
    return most - num_tokens


def end_turn(request: Request, finish: str) -> HeldTurn:
    """The turn in progress has ended; the request is held from now on."""
    stop = len(request.response_ids)
    request.turns.append(Turn(request.turn_start, stop, finish))
    return HeldTurn(request.id, request.response_ids[request.turn_start :], finish, stop)


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
    request.turn_start = total


def output_of(request: Request, finish: str) -> Output:
    """A response that has ended."""
    response = request.response_ids, request.log_probs
    return Output(request.id, *response, finish, request.routed_experts, tuple(request.turns))
