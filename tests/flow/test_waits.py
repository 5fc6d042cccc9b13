"""Waits for environments: what is likely of the first reply, and when parking pays."""

import json
import random
from collections.abc import Sequence

import pytest

from hybridrl.flow.costs import Costs
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
