"""How a response grows by a drawn token, and what is handed out once it has ended."""

from hybridrl.engines.rollout.interface import Output, Request
from hybridrl.engines.rollout.stops import StopStrings


def append_token(
    request: Request, token: int, log_prob: float, stops: StopStrings | None
) -> str | None:
    """Append a drawn token to a response; why it has ended, `stop` or `length`, or None."""
    request.response_ids.append(token)
    request.log_probs.append(log_prob)
    if token in request.sampling.stop_token_ids or (
        stops is not None and stops.ended(request.response_ids, request.sampling.min_new_tokens)
    ):
        return "stop"
    if len(request.response_ids) >= request.sampling.max_new_tokens:
        return "length"
    return None


def output_of(request: Request, finish: str) -> Output:
    """A response that has ended."""
    response = request.response_ids, request.log_probs
    return Output(request.id, *response, finish, request.routed_experts)
