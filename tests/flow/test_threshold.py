"""The migration threshold against an event simulation of the same assumptions."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.flow.costs import Costs
from hybridrl.flow.threshold import best_threshold, expected_seconds, serial_seconds


def simulate(
    lengths: list[int],
    num_instances: int,
    costs: Costs,
    per_token: float,
    max_held: int,
    prompt: float,
    threshold: int,
) -> float:
    """One decode step after the other, inference as a queue of work beside it."""
    left = sorted(lengths)
    on, waiting, now, made = num_instances, 0.0, 0.0, 0
    moved = False
    while left:
        if not moved and len(left) <= threshold:
            moved = True
            tokens = prompt + made
            flat = costs.flat_rows(cached_per_row=tokens)
            keepers = min(num_instances, -(-len(left) // max(1, min(flat, max_held))))
            staying = keepers * max(1, len(left) / num_instances)
            if len(left) > staying:
                pause = costs.call_s + (len(left) - staying) / keepers * costs.move(tokens)
                now += pause
                waiting = max(0.0, waiting - pause * (num_instances - min(keepers, len(left))))
            on = keepers
        rows = max(1, len(left) / on)
        took = costs.decode(rows, 1, rows * (prompt + made + 0.5))
        now += took
        waiting = max(0.0, waiting - took * (num_instances - min(on, len(left))))
        made += 1
        for length in [length for length in left if length <= made]:
            left.remove(length)
            waiting += per_token * (prompt + length)
    return now + waiting / num_instances


costs_of = st.builds(
    Costs,
    step_s=st.floats(1e-3, 1e-1),
    row_s=st.floats(0, 1e-2),
    cached_token_s=st.floats(0, 1e-5),
    prefill_token_s=st.floats(0, 1e-3),
    call_s=st.floats(0, 1e-2),
    kv_token_s=st.floats(0, 1e-3),
    kv_call_s=st.floats(0, 1e-2),
)
cases = {
    "lengths": st.lists(st.integers(1, 60), min_size=2, max_size=24),
    "num_instances": st.integers(2, 6),
    "costs": costs_of,
    "per_token": st.floats(0, 1e-2),
    "max_held": st.integers(1, 30),
    "prompt": st.integers(0, 50),
}


@settings(max_examples=60, deadline=None)
@given(**cases)
def test_seconds_and_choice_are_those_of_the_simulation(
    lengths: list[int],
    num_instances: int,
    costs: Costs,
    per_token: float,
    max_held: int,
    prompt: int,
) -> None:
    tried = range(1, len(lengths))
    args = (num_instances, costs, per_token, max_held, prompt)
    found = expected_seconds(lengths, *args, list(tried))
    # Several samples end together: thresholds between them are reached in the same step.
    simulated = [simulate(lengths, *args, n) for n in tried]
    ordered = sorted(lengths)
    distinct = [n for n in tried if ordered[-n] > ordered[-n - 1]]
    assert [found[n - 1] for n in distinct] == pytest.approx(
        [simulated[n - 1] for n in distinct], rel=1e-6
    )
    best = best_threshold(lengths, *args)
    serial = serial_seconds(lengths, num_instances, costs, per_token, prompt)
    if best:
        assert simulate(lengths, *args, best) <= min(simulated) * (1 + 1e-6)
        assert simulated[best - 1] < serial
    else:
        assert min((simulated[n - 1] for n in distinct), default=serial) >= serial * (1 - 1e-6)


COSTS = Costs(step_s=0.01, row_s=1e-4, prefill_token_s=1e-5, call_s=1e-3)


@given(num=st.integers(0, 40), length=st.integers(0, 50), num_instances=st.integers(1, 8))
def test_equal_lengths_leave_nothing_to_gather(num: int, length: int, num_instances: int) -> None:
    assert best_threshold([length] * num, num_instances, COSTS, 1e-3, 8, 10) == 0


@given(lengths=st.lists(st.integers(0, 500), max_size=40))
def test_one_instance_gathers_nothing(lengths: list[int]) -> None:
    assert best_threshold(lengths, 1, COSTS, 1e-3, 64, 10) == 0


@given(num=st.integers(2, 100), num_instances=st.integers(2, 8), times=st.integers(2, 100))
def test_one_long_response_is_gathered(num: int, num_instances: int, times: int) -> None:
    lengths = [20] * (num - 1) + [20 * times]
    assert best_threshold(lengths, num_instances, COSTS, 1e-4, 64, 10) >= 1


def test_without_inference_there_is_nothing_to_gain() -> None:
    assert best_threshold([1, 2, 3, 400], 4, COSTS, 0.0, 64, 10) == 0


def test_a_batch_that_slows_the_longest_is_not_gathered() -> None:
    """Sixteen long ones on four instances: where rows are dear they stay where they are."""
    lengths = [5] * 200 + [100] * 16
    cheap = best_threshold(lengths, 4, Costs(step_s=0.01, row_s=1e-5), 2e-3, 64)
    dear = expected_seconds(lengths, 4, Costs(step_s=0.01, row_s=1e-2), 2e-3, 64, 0.0, [16])
    assert cheap == 16
    stay = serial_seconds(lengths, 4, Costs(step_s=0.01, row_s=1e-2), 2e-3)
    assert dear[0] == pytest.approx(stay), "sixteen rows do not fit on fewer, so nobody moves"


def test_kv_memory_bounds_the_keepers() -> None:
    lengths = [5] * 200 + [100] * 16
    costs = Costs(step_s=0.01)
    roomy, tight = (
        expected_seconds(lengths, 4, costs, 2e-3, held, 0.0, [16])[0] for held in (16, 4)
    )
    assert roomy < tight


def test_a_thousand_samples_take_milliseconds() -> None:
    draw = random.Random(0)
    lengths = [round(draw.lognormvariate(5, 1)) + 1 for _ in range(1024)]
    took = []
    for _ in range(5):
        start = time.perf_counter()
        best = best_threshold(lengths, 64, COSTS, 1e-3, 64, 100)
        took.append(time.perf_counter() - start)
    assert 0 < best < 1024
    # 9 ms on one core of a quiet machine; the room is for a busy one.
    assert min(took) < 0.1
    every = expected_seconds(lengths, 64, COSTS, 1e-3, 64, 100, np.arange(1, 1024))
    assert every[best - 1] <= every.min() * 1.01
