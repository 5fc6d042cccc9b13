"""Conversations: a turn ends, its request is held, and goes on behind the reply."""

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from answered_turns import converse, converse_in_lockstep, converse_on_the_move, recomputed
from transformers import PreTrainedModel

from hybridrl.engines.rollout.cache_fill import KVCosts
from hybridrl.engines.rollout.interface import HeldTurn, Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.speculation import make_speculation
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.models.shard import GenParallel

VOCAB = 52
Make = Callable[..., NativeEngine]
LIMITS = {"max_new_tokens": 60, "max_turn_tokens": 9, "stop_token_ids": (3, 7, 20, 41)}


def conversations(num: int, group: int = 3, **changes: object) -> list[Request]:
    """Conversations of 60 tokens in turns of at most 9, `group` of a prompt."""
    sampling = SamplingParams(**{**LIMITS, **changes})  # type: ignore[arg-type]
    prompts = [list(range(5 + i, 8 + 3 * i)) for i in range(1 + num // group)]
    return [
        Request(
            i, prompts[i // group], sampling, stream_key(1, i // group, k=i % group), i // group
        )
        for i in range(num)
    ]


def same(got: dict[object, Output], wanted: dict[object, Output]) -> None:
    assert got.keys() == wanted.keys()
    for id, output in got.items():
        assert output.token_ids == wanted[id].token_ids
        assert output.turns == wanted[id].turns
        # Measured: 4e-6 between one long prefill and decode steps of this model.
        assert output.log_probs == pytest.approx(wanted[id].log_probs, abs=1e-5)


def waits(turn: HeldTurn) -> int:
    return sum(turn.token_ids) % 7


@pytest.mark.long
@pytest.mark.parametrize("block_size", [1, 4])
def test_kept_equals_recomputed(block_size: int, model: PreTrainedModel, make_engine: Make) -> None:
    """Several at once, which wait; only new tokens are computed."""
    requests = conversations(7)
    engine = make_engine(model, block_size=block_size)
    outputs = converse(engine, requests, VOCAB, waits)
    prefilled, turns = 0, 0
    for request in requests:
        output = outputs[request.id]
        tokens, log_probs, bounds = recomputed(lambda: make_engine(model), request, VOCAB)
        assert output.token_ids == tokens
        assert [(turn.start, turn.stop) for turn in output.turns] == bounds
        assert output.log_probs == pytest.approx(log_probs, abs=1e-5)
        replies = len(tokens) - sum(stop - start for start, stop in bounds)
        # A reply's last token is pending, and the turn's last one was.
        prefilled += len(request.prompt_ids) - 1 + replies
        turns += len(bounds)
    assert turns > 2 * len(requests)
    assert {turn.finish for o in outputs.values() for turn in o.turns} == {"stop", "length"}
    stats = engine.stats()
    assert stats.prefill_tokens + stats.shared_prompt_tokens == prefilled
    assert stats.recomputed_tokens == stats.held == 0 < stats.kept_tokens
    assert stats.kv_blocks_free == stats.kv_blocks_total


def test_log_probs_are_those_of_a_full_forward(model: PreTrainedModel, make_engine: Make) -> None:
    """Log-probabilities of the model's tokens; a reply's are 0."""
    requests = conversations(4, temperature=0.7)
    for request in requests:
        output = converse(make_engine(model), [request], VOCAB)[request.id]
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
        with torch.no_grad():
            log_p = (model(ids).logits[0].float() / 0.7).log_softmax(-1)
        start = len(request.prompt_ids)
        full = log_p[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0].tolist()
        written = {i for turn in output.turns for i in range(turn.start, turn.stop)}
        wanted = [value if i in written else 0.0 for i, value in enumerate(full)]
        assert output.log_probs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("kv_cache_tokens", [0, 84, 120])
def test_few_rows_and_few_blocks(
    kv_cache_tokens: int, copies: bool, deterministic: bool, model: PreTrainedModel,
    make_engine: Make, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The queue drains though held requests have every block, and tokens stay the same."""
    requests = conversations(8)
    wanted = converse(make_engine(model, deterministic=deterministic), requests, VOCAB)
    engine = make_engine(
        model, max_running=3, kv_cache_tokens=kv_cache_tokens, deterministic=deterministic
    )
    monkeypatch.setattr(engine._costs, "copies", lambda tokens, in_host: copies)
    outputs = converse(engine, requests, VOCAB, waits)
    stats = engine.stats()
    assert (stats.recomputed_tokens > 0) == (kv_cache_tokens > 0 and not copies)
    assert (stats.moved_tokens > 0) == (kv_cache_tokens > 0 and copies)
    assert stats.restored_tokens <= stats.moved_tokens
    assert stats.kv_blocks_free == stats.kv_blocks_total
    if deterministic:
        assert outputs == wanted
    else:
        same(outputs, wanted)


@pytest.mark.long
@pytest.mark.parametrize("deterministic", [False, True])
def test_conversations_are_preempted(
    deterministic: bool, model: PreTrainedModel, make_engine: Make
) -> None:
    """Turns are long and none is held, so that those that decode have to give way to each other."""
    requests = conversations(8, max_turn_tokens=30, stop_token_ids=(3,))
    wanted = converse(make_engine(model, deterministic=deterministic), requests, VOCAB, waits)
    engine = make_engine(model, max_running=3, kv_cache_tokens=84, deterministic=deterministic)
    outputs = converse(engine, requests, VOCAB)
    assert engine.stats().num_preempted > 2
    if deterministic:
        assert outputs == wanted
    else:
        same(outputs, wanted)


@pytest.mark.parametrize("copies", [True, False])
def test_the_cache_is_released_while_all_wait(
    copies: bool, model: PreTrainedModel, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another role may have the memory meanwhile."""
    requests = conversations(4)
    wanted = converse(make_engine(model), requests, VOCAB)
    engine = make_engine(model)
    monkeypatch.setattr(engine._costs, "copies", lambda tokens, in_host: copies)
    same(converse_in_lockstep(engine, requests, VOCAB), wanted)
    stats = engine.stats()
    assert (stats.kept_tokens, stats.moved_tokens > 0, stats.recomputed_tokens > 0) == (
        0, copies, not copies,
    )  # fmt: skip


def test_measured_costs_decide() -> None:
    """A copy there and back against a prefill, as one rank has measured them."""
    asked: list[float] = []

    def agree(times: list[float]) -> list[float]:
        asked.extend(times)
        return times

    for seconds, copied in ((8e-6, True), (1.9e-6, False)):
        costs = KVCosts(agree, most_tokens=1000)
        costs.copy.saw(100, 100 * 1e-6)
        assert costs.copies(100, in_host=0)  # not known yet
        costs = KVCosts(agree, most_tokens=1000)
        costs.copy.saw(100, 100 * 1e-6)
        costs.prefill.saw(3, 1.0)  # too few to tell
        costs.prefill.saw(500, 500 * seconds)
        assert costs.copies(100, in_host=900) == copied
        assert not costs.copies(100, in_host=901)
    assert asked == pytest.approx([0, 1e-6, 8e-6, 1e-6, 0, 1e-6, 1.9e-6, 1e-6])
    assert KVCosts(None, 1000).copies(1000, 0)


def test_states_are_copied_too() -> None:
    """As many bytes as 500 tokens' keys and values: a copy of few tokens takes more than a prefill.

    The copy that is measured takes 600 us, of 100 tokens and the states.
    """
    costs = KVCosts(lambda times: times, most_tokens=2000, state_tokens=500)
    clock = mock.patch("time.perf_counter", side_effect=[0.0, 600e-6])
    with clock, costs.timing_copy(100, torch.zeros(1)):
        pass
    assert costs.copy.seconds == pytest.approx(1e-6)
    costs.prefill.saw(1000, 8e-3)
    assert not costs.copies(100, in_host=0)
    assert costs.copies(1000, in_host=0)
    assert costs.copies(1000, in_host=500)
    assert not costs.copies(1000, in_host=501)
    without = KVCosts(lambda times: times, most_tokens=2000)
    without.copy.saw(1000, 1e-3)
    without.prefill.saw(1000, 8e-3)
    assert without.copies(100, in_host=0)


@pytest.mark.long
@pytest.mark.parametrize("with_kv", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_held_and_answered_ones_move(
    with_kv: bool, deterministic: bool, model: PreTrainedModel, make_engine: Make
) -> None:
    """Parked while it runs, while it is held, and between the reply and its first pass."""
    requests = conversations(6)
    wanted = converse(make_engine(model, deterministic=deterministic), requests, VOCAB)
    engines = tuple(make_engine(model, deterministic=deterministic) for _ in range(2))
    outputs, moved = converse_on_the_move(engines, requests, VOCAB, with_kv)
    assert min(moved.values()) > 0
    for engine in engines:
        stats = engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total
        assert (stats.restored_tokens > 0) == with_kv
    if deterministic:
        assert outputs == wanted
    else:
        same(outputs, wanted)


def test_guessed_ahead(model: PreTrainedModel, make_engine: Make) -> None:
    """Drafts end with a turn, and read what replies say."""
    requests = conversations(6, group=1, temperature=0.2, stop_token_ids=())
    wanted = converse(make_engine(model), requests, VOCAB)
    engine = make_engine(model, speculation=make_speculation(4, GenParallel()))
    outputs = converse(engine, requests, VOCAB, waits)
    same(outputs, wanted)
    stats = engine.stats()
    assert stats.accepted_tokens > 0
    assert stats.kv_blocks_free == stats.kv_blocks_total


def test_a_stop_text_is_of_one_turn(model: PreTrainedModel, make_engine: Make) -> None:
    """A reply that has the text does not end the turn behind it, nor does a text across both."""

    def decode(ids: object) -> str:
        return "".join(chr(60 + id) for id in ids)  # type: ignore[attr-defined]

    free = replace(conversations(1)[0].sampling, stop_token_ids=())
    request = replace(conversations(1)[0], sampling=free)
    first = next_turn(make_engine(model), request, [])
    text = decode(first.token_ids[3:5])
    engine = make_engine(model, stops=StopStrings(decode, [text]))
    turn = next_turn(engine, request, [])
    assert (turn.token_ids, turn.finish) == (first.token_ids[:5], "stop")
    half, rest = first.token_ids[3], first.token_ids[4]
    engine.answer(0, [half, rest, 1, half])
    while not (turns := engine.take_turns()):
        engine.step()
    assert len(turns[0].token_ids) > 1 or turns[0].token_ids == [rest]
    assert turns[0].finish == ("stop" if text in decode(turns[0].token_ids) else "length")


def next_turn(engine: NativeEngine, request: Request, reply: list[int]) -> HeldTurn:
    engine.submit([request])
    while not (turns := engine.take_turns()):
        engine.step()
    return turns[0]


def test_a_turn_may_use_up_the_response(model: PreTrainedModel, make_engine: Make) -> None:
    """It is held like any other; a reply finds no room, and the sample is finished or moves."""
    (request,) = conversations(1, max_new_tokens=5, stop_token_ids=())
    engine = make_engine(model)
    turn = next_turn(engine, request, [])
    assert (turn.finish, turn.response_tokens) == ("length", 5)
    with pytest.raises(ValueError, match=r"would have 6 response tokens .*max_new_tokens=5"):
        engine.answer(0, [1])
    other = make_engine(model)
    other.submit(engine.park([0]))
    output = other.answer(0, None, "length")
    assert (output.token_ids, output.finish) == (turn.token_ids, "length")


def test_bad_answers_change_nothing(model: PreTrainedModel, make_engine: Make) -> None:
    requests = conversations(2)
    engine = make_engine(model, max_running=1)
    engine.submit(requests)
    engine.step()
    for id, status in ((0, "running"), (1, "waiting"), (9, "unknown")):
        with pytest.raises(ValueError, match=f"request {id} is {status}; only a held one"):
            engine.answer(id, [1])
    while not (turns := engine.take_turns()):
        engine.step()
    with pytest.raises(ValueError, match="token ids 4 to 52"):
        engine.answer(turns[0].id, [4, VOCAB])
    engine.answer(turns[0].id, [4])
    with pytest.raises(ValueError, match="only a held one"):
        engine.answer(turns[0].id, None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_empty_reply(deterministic: bool, model: PreTrainedModel, make_engine: Make) -> None:
    """The response goes on as if no turn had ended, also where it is computed again."""
    (request,) = conversations(1, max_new_tokens=12, max_turn_tokens=4, stop_token_ids=())
    engines = [make_engine(model, deterministic=deterministic) for _ in range(2)]
    whole = replace(request.sampling, max_turn_tokens=0)
    (wanted,) = recomputed_whole(engines[0], replace(request, sampling=whole))
    engines[0].submit([request])
    for number in range(3):
        here, there = engines[number % 2], engines[1 - number % 2]
        while not here.take_turns():
            here.step()
        if number < 2:
            here.answer(0, [])
            (parked,) = here.park([0])
            assert not parked.is_held
            there.submit([parked])
    output = engines[0].answer(0, None)
    assert output.token_ids == wanted.token_ids
    assert [turn.start for turn in output.turns] == [0, 4, 8]
    assert output.log_probs == pytest.approx(wanted.log_probs, abs=0 if deterministic else 1e-5)


def recomputed_whole(engine: NativeEngine, request: Request) -> list[Output]:
    engine.submit([request])
    return [output for _ in range(12) for output in engine.step()]
