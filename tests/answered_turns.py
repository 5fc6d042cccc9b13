"""Conversations whose replies follow from what the model wrote, for tests of rollout engines."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from hybridrl.engines.rollout.interface import HeldTurn, Output, Request, RolloutEngine

MOST_TURNS = 5


def reply_of(turn: HeldTurn, vocab: int, most: int) -> list[int] | None:
    """The reply to a turn, 1 to 9 tokens that follow from it; None: the episode has ended."""
    draw = random.Random(repr((turn.id, turn.token_ids, turn.response_tokens)))
    reply = [draw.randrange(vocab) for _ in range(draw.randint(1, 9))]
    ended = draw.random() < 1 / MOST_TURNS or turn.response_tokens + len(reply) >= most
    return None if ended else reply


def converse(
    engine: RolloutEngine,
    requests: Iterable[Request],
    vocab: int,
    wait: Callable[[HeldTurn], int] = lambda turn: 0,
) -> dict[object, Output]:
    """Submit conversations and answer each turn `wait` steps after it ended: outputs by id."""
    requests = list(requests)
    most = {request.id: request.sampling.max_new_tokens for request in requests}
    engine.submit(requests)
    outputs = dict[object, Output]()
    due: list[tuple[int, HeldTurn]] = []
    for step in range(10_000):
        due += [(step + wait(turn), turn) for turn in engine.take_turns()]
        for number, turn in [pair for pair in due if pair[0] <= step]:
            due.remove((number, turn))
            answer(engine, turn, vocab, most, outputs)
        stats = engine.stats()
        assert stats.held == len(due)
        if not (stats.running or stats.waiting or due):
            return outputs
        assert not engine.step(), "a conversation ended by itself"
    raise AssertionError("the queue does not drain")


def converse_in_lockstep(
    engine: RolloutEngine, requests: Iterable[Request], vocab: int
) -> dict[object, Output]:
    """Submit conversations and answer their turns together, once none runs: outputs by id.

    Meanwhile the cache is released.
    """
    requests, outputs = list(requests), dict[object, Output]()
    most = {request.id: request.sampling.max_new_tokens for request in requests}
    engine.submit(requests)
    while len(outputs) < len(requests):
        turns = list[HeldTurn]()
        while engine.stats().running + engine.stats().waiting:
            assert not engine.step()
            turns += engine.take_turns()
        engine.sleep(keep_weights=True)
        assert not engine.stats().has_cache
        for turn in turns:
            answer(engine, turn, vocab, most, outputs)
    return outputs


def recomputed(
    make: Callable[[], RolloutEngine], request: Request, vocab: int
) -> tuple[list[int], list[float], list[tuple[int, int]]]:
    """A conversation turn by turn, each a resumed request of its own, by one long prefill.

    Tokens, log-probabilities and the turns' bounds.
    """
    sampling, response, log_probs, turns = request.sampling, [], [], []
    while True:
        start = len(response)
        limit = min(sampling.max_new_tokens, start + sampling.max_turn_tokens)
        one = replace(sampling, max_new_tokens=limit, max_turn_tokens=0)
        engine = make()
        alone = replace(
            request, sampling=one, response_ids=list(response), log_probs=list(log_probs)
        )
        engine.submit([alone])
        (output,) = [output for _ in range(limit) for output in engine.step()]
        response, log_probs = list(output.token_ids), list(output.log_probs)
        turns.append((start, len(response)))
        turn = HeldTurn(request.id, response[start:], output.finish, len(response))
        reply = reply_of(turn, vocab, sampling.max_new_tokens)
        if reply is None:
            return response, log_probs, turns
        response += reply
        log_probs += [0.0] * len(reply)


def converse_on_the_move(
    engines: tuple[RolloutEngine, RolloutEngine],
    requests: Iterable[Request],
    vocab: int,
    with_kv: bool,
    every: int = 1,
) -> tuple[dict[object, Output], dict[str, int]]:
    """Converse while all requests move to the other engine after `every` steps.

    Returns the outputs by id, and the number of requests that moved in each state.

    They are running, held, or answered without having continued.
    """
    requests, outputs = list(requests), dict[object, Output]()
    most = {request.id: request.sampling.max_new_tokens for request in requests}
    moved = {"running": 0, "held": 0, "answered": 0}
    engines[0].submit(requests)
    for number in range(10_000):
        here, there = engines[number % 2], engines[1 - number % 2]
        for _ in range(every):
            here.step()
        # Under pp tokens are in flight after a step; `park` collects them.
        later = list(here.park([request.id for request in requests], with_kv))
        here.submit(later)
        turns = here.take_turns()
        states = dict.fromkeys(most, "running") | {turn.id: "held" for turn in turns}
        for turn in turns[::2]:  # the others are answered where they go
            states[turn.id] = "answered"
            answer(here, turn, vocab, most, outputs)
        parked = here.park(list(most), with_kv)
        for request in parked:
            moved[states[request.id]] += 1
            assert request.is_held == (states[request.id] == "held")
        there.submit(parked)
        assert there.stats().held == len(turns[1::2])
        for turn in turns[1::2]:
            answer(there, turn, vocab, most, outputs)
        if len(outputs) == len(most):
            return outputs, moved
    raise AssertionError("the conversations do not end")


def answer(
    engine: RolloutEngine,
    turn: HeldTurn,
    vocab: int,
    most: dict[object, int],
    outputs: dict[object, Output],
) -> None:
    """Continue a held request, or finish it."""
    output = engine.answer(turn.id, reply_of(turn, vocab, most[turn.id]))
    if output is not None:
        outputs[turn.id] = output
