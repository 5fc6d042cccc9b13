"""Waits for environments: the first reply, when parking pays, when a call is to end."""

import json
import random
from collections.abc import Sequence

import pytest

from hybridrl.costs.instance import Costs
from hybridrl.flow.executor import EpisodeReply, Replied, TurnEnded
from hybridrl.flow.sample import SampleId
from hybridrl.flow.turns import OpenTurns, enough_turns
from hybridrl.flow.waits import WaitModel, worth_parking


def seen(waits: Sequence[float]) -> WaitModel:
    model = WaitModel()
    model.saw(waits)
    return model


@pytest.mark.parametrize("waited", [[0.0], [3.0], [0.0] * 4, [0.5, 1.0, 4.0]])
def test_the_first_reply_of_several(waited: list[float]) -> None:
    """Against the median of many draws of such waits, each of which is longer than so far."""
    draw = random.Random(0)
    waits = [draw.lognormvariate(1.0, 1.0) for _ in range(1000)]

    def left(seconds: float) -> float:
        return draw.choice([wait for wait in waits if wait > seconds]) - seconds

    firsts = sorted(min(map(left, waited)) for _ in range(401))
    step = max(waits) / 63  # of the times that are looked at
    assert seen(waits).first(waited) == pytest.approx(firsts[200], rel=0.15, abs=step)


def test_nothing_is_said_of_what_was_not_seen() -> None:
    assert WaitModel().first([0.0]) == 0.0
    assert seen([1.0] * 15).first([0.0]) == 0.0
    model = seen([1.0, 2.0] * 10)
    assert model.first([]) == 0.0
    assert model.first([5.0]) == 0.0  # longer than any
    again = WaitModel()
    again.load_state_dict(json.loads(json.dumps(model.state_dict())))
    assert again.first([0.5]) == model.first([0.5]) > 0


def test_parking_pays_where_the_wait_is_longer_than_the_moves() -> None:
    """Two samples of 100 tokens: two calls of 1 s, and 2 x 0.5 s to move each, or 1 s as text."""
    costs = Costs(
        step_s=1.0, prefill_token_s=0.01, kv_token_s=0.005, call_s=0.75, round_trip_s=0.25
    )
    assert worth_parking(costs, 3.01, 2, 100)
    assert not worth_parking(costs, 2.99, 2, 100)


@pytest.mark.parametrize(("call_s", "one_in"), [(0.002, 8), (0.02, 2), (1.0, 1), (0.0, 64)])
def test_calls_end_sooner_where_they_cost_less(call_s: float, one_in: int) -> None:
    """Turns of 16 tokens, each of which takes 16 ms in a batch of ten rows."""
    costs = Costs(step_s=0.006, row_s=0.001, call_s=call_s / 2, round_trip_s=call_s / 2)
    assert enough_turns(costs, 10, 16.0) == one_in


def test_the_tokens_of_turns_are_learned_without_those_of_replies() -> None:
    turns, a, b = OpenTurns(), SampleId(0), SampleId(1)
    turns.ended([TurnEnded(a, (), "", "stop", 10), TurnEnded(b, (), "", "stop", 4)], 1.0)
    assert turns.turn_tokens == 7
    turns.replied(Replied((EpisodeReply(a, (1, 2, 3)),), (2.5,)))
    turns.answer([a])
    turns.ended([TurnEnded(a, (), "", "stop", 23)], 5.0)  # ten of its own
    assert turns.turn_tokens == 8
    turns.replied(Replied((EpisodeReply(a, None), EpisodeReply(b, None)), (1.0, 4.0)))
    assert (turns.waited(a), turns.waited(b)) == (3.5, 4.0)
    turns.forget([a])
    assert turns.waited(a) == 0


def test_what_is_left_of_a_wait_is_the_median_of_those_that_were_longer() -> None:
    model = seen([1.0, 2.0, 3.0, 4.0] * 5)
    assert model.mean == 2.5
    assert model.left([0.0, 2.5, 8.0]) == [3.0, 1.5, 2.0]
    assert model.left([]) == []
    few = seen([1.0] * 15)
    assert (few.mean, few.left([0.5])) == (0.0, [0.0])


def test_conversations_end_once_the_last_has_made_its_turns() -> None:
    """A conversation has four turns.

    Sample a has made two and waits since second 1; b has made none.
    """
    turns, a, b = OpenTurns(waits_seen=seen([3.0] * 20), expected=4.0), SampleId(0), SampleId(1)
    turns.ended([TurnEnded(a, (), "", "stop", 5)], 0.0)
    turns.replied(Replied((EpisodeReply(a, (1,)),), (3.0,)))
    turns.answer([a])
    turns.ended([TurnEnded(a, (), "", "stop", 9)], 1.0)
    assert turns.seconds_left([a], 0.5, 2.0) == 2 * 3.5 + 2.0
    assert turns.seconds_left([a, b], 0.5, 2.0) == 4 * 3.5
    assert turns.seconds_left([], 0.5, 2.0) == 0.0


def test_a_sample_that_begins_anew_stays_in_its_window() -> None:
    turns, a, b = OpenTurns(), SampleId(0), SampleId(1)
    turns.open_window({a: 2})
    turns.ended([TurnEnded(a, (), "", "stop", 5)], 0.0)
    turns.replied(Replied((EpisodeReply(a, (1,)),), (1.0,)))
    assert [answer.ids for answer in turns.answer([a])] == [(a,)]
    turns.ended([TurnEnded(a, (), "", "stop", 10), TurnEnded(b, (), "", "stop", 4)], 1.0)
    turns.replied(Replied((EpisodeReply(a, (1,)), EpisodeReply(b, (1,))), (2.0, 2.0)))
    assert (turns.rests(a), turns.rests(b)) == (True, False)
    assert [answer.ids for answer in turns.answer([a, b])] == [(b,)]
    turns.forget([a, b])
    assert (turns.is_open(a), turns.waited(a)) == (False, 0.0)
    turns.ended([TurnEnded(a, (), "", "stop", 3)], 3.0)
    turns.replied(Replied((EpisodeReply(a, (1,)),), (1.0,)))
    assert turns.rests(a)  # with those that it made before
    turns.close_window()
    assert not turns.rests(a)
    assert turns.can_go([a])
