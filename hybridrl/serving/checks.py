"""What a request may not ask: it fails alone, with a line, before a rank sees it."""

import math

from hybridrl.algorithms.tinker_losses import TinkerLoss, tinker_loss
from hybridrl.serving.requests import (
    Datum,
    ForwardBackward,
    Int32,
    Refused,
    SampleRequest,
    ServedModel,
)


def checked_loss(request: ForwardBackward) -> TinkerLoss:
    """The loss of a request; raises Refused for one that there is not, or that lacks inputs."""
    widest = max((_width(datum) for datum in request.data), default=0)
    num_targets = 0 if all(map(_is_shifted, request.data)) else widest
    try:
        loss = tinker_loss(request.loss, request.settings, num_targets)
    except ValueError as error:
        raise Refused(str(error)) from None
    for number, datum in enumerate(request.data):
        _check_inputs(datum, f"data[{number}]", request.loss, loss)
    return loss


def _width(datum: Datum) -> int:
    return datum.targets.shape[1] if datum.targets.ndim == 2 else 1


def _is_shifted(datum: Datum) -> bool:
    """Whether each target is the input token behind it."""
    return datum.targets.ndim == 1 and bool((datum.targets[:-1] == datum.tokens[1:]).all())


def _check_inputs(datum: Datum, name: str, loss: str, wanted: TinkerLoss) -> None:
    if len(datum.targets) != len(datum.tokens):
        raise Refused(f"{name}: {len(datum.tokens)} tokens, {len(datum.targets)} target_tokens")
    for key in wanted.inputs:
        if key not in datum.inputs:
            raise Refused(f"{name}: loss_fn={loss} needs loss_fn_inputs.{key}")
        if datum.inputs[key].shape != datum.targets.shape:
            shape, own = list(datum.targets.shape), list(datum.inputs[key].shape)
            raise Refused(f"{name}: {key} is {own}, wanted {shape}, as target_tokens")
    if unknown := sorted(datum.inputs.keys() - {*wanted.inputs}):
        known = ", ".join(wanted.inputs)
        raise Refused(f"{name}: loss_fn_inputs.{unknown[0]} is none of {loss}'s: {known}")


def check_data(request: ForwardBackward, served: ServedModel) -> None:
    """Raise Refused for data that is too long, or is not of the vocabulary."""
    if not request.data:
        raise Refused("data is empty")
    for number, datum in enumerate(request.data):
        name, length = f"data[{number}]", len(datum.tokens)
        if not 1 <= length <= served.max_tokens:
            raise Refused(f"{name} has {length} tokens, wanted 1 to {served.max_tokens}")
        if datum.targets.ndim > 2 or not datum.targets.size:
            raise Refused(f"{name}: target_tokens are {list(datum.targets.shape)}, wanted [N, K]")
        check_tokens(datum.tokens, f"{name} has the token", served.vocab)
        check_tokens(datum.targets, f"{name} has the target", served.vocab)


def check_tokens(tokens: Int32, what: str, vocab: int) -> None:
    """Raise Refused for a token that is not in the vocabulary."""
    wrong = tokens[(tokens < 0) | (tokens >= vocab)]
    if wrong.size:
        raise Refused(f"{what} {wrong[0]}, the vocabulary has 0 to {vocab - 1}")


def check_sample(request: SampleRequest, served: ServedModel) -> int:
    """Raise Refused for samples that cannot be drawn; the most tokens of a response."""
    settings, length = request.settings, len(request.prompt)
    check_tokens(request.prompt, "the prompt has the token", served.vocab)
    if request.named is not None:
        check_tokens(request.named[request.named >= 0], "a named token is", served.vocab)
    if "" in settings.stop_texts:
        raise Refused("stop: a text is empty")
    for name, value, most in (
        ("temperature", settings.temperature, math.inf),
        ("top_k", settings.top_k, math.inf),
        ("top_p", settings.top_p, 1),
    ):
        if not 0 <= value <= most:
            allowed = "0 or above" if most == math.inf else f"0 to {most}"
            raise Refused(f"{name}={value}: wanted {allowed}")
    if not 1 <= length <= served.max_tokens:
        raise Refused(f"the prompt has {length} tokens, wanted 1 to {served.max_tokens}")
    rest = served.max_tokens - length
    most_tokens = rest if settings.max_tokens is None else settings.max_tokens
    if request.count and not 1 <= most_tokens <= rest:
        raise Refused(
            f"max_tokens={most_tokens}: wanted 1 to {rest} behind a prompt of {length} tokens,"
            f" since this server computes {served.max_tokens}"
        )
    return most_tokens
