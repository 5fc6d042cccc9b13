"""The migration threshold against an event simulation of the same assumptions."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.flow.costs import Costs
from hybridrl.flow.migration import (
    MigrationPlan,
    best_migration_plan,
    expected_seconds,
    serial_seconds,
    training_arrivals,
)


def simulate(
    lengths: list[int],
    num_instances: int,
    costs: Costs,
    per_token: float,
    threshold: int,
    cap: int,
    prompt: float,
    width: int = 1,
) -> float:
    """One decode step after the other, inference as a queue of work beside it."""
    wide = costs.at_width(width)
    left = sorted(lengths)
    on, waiting, now, generated = num_instances, 0.0, 0.0, 0
    moved = False
    while left:
        if not moved and len(left) <= threshold:
            moved = True
            tokens = prompt + generated
            keepers = min(num_instances // width, -(-len(left) // cap))
            if width > 1 and keepers * cap < len(left):
                return math.inf
            staying = keepers * max(1, len(left) / num_instances) if width == 1 else 0
            if len(left) > staying:
                pause = costs.call_s + (len(left) - staying) / keepers * wide.move(tokens)
                now += pause
                busy = width * min(keepers, len(left))
                waiting = max(0.0, waiting - pause * (num_instances - busy))
            on = keepers
        rows = max(1, len(left) / on)
        took = (wide if moved else costs).decode(rows, 1, rows * (prompt + generated + 0.5))
        now += took
        busy = min(on, len(left)) * (width if moved else 1)
        waiting = max(0.0, waiting - took * (num_instances - busy))
        generated += 1
        for length in [length for length in left if length <= generated]:
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
    wide_step_s=st.dictionaries(st.sampled_from([2, 3]), st.floats(1e-3, 1e-1)),
)
cases = {
    "lengths": st.lists(st.integers(1, 60), min_size=2, max_size=24),
    "num_instances": st.integers(2, 6),
    "costs": costs_of,
    "per_token": st.floats(0, 1e-2),
    "max_held": st.integers(1, 30),
    "prompt": st.integers(0, 50),
}


@settings(max_examples=80)
@given(**cases)
def test_seconds_and_choice_are_those_of_the_simulation(
    lengths: list[int],
    num_instances: int,
    costs: Costs,
    per_token: float,
    max_held: int,
    prompt: int,
) -> None:
    model = (num_instances, costs, per_token)
    caps = [min(max_held, costs.flat_rows(cached_per_row=prompt + max(lengths)))]
    while caps[-1] < max_held:
        caps.append(min(max_held, 2 * caps[-1]))
    thresholds = range(1, len(lengths))
    simulated = {
        (n, cap): simulate(lengths, *model, n, cap, prompt) for n in thresholds for cap in caps
    }
    expected = expected_seconds(lengths, *model, *zip(*simulated, strict=True), prompt)
    assert expected.tolist() == pytest.approx([*simulated.values()], rel=1e-6)
    best = best_migration_plan(lengths, *model, max_held, prompt)
    serial = serial_seconds(lengths, *model, prompt)
    least = min(simulated.values())
    if best.threshold:
        assert simulated[best[:2]] <= least * (1 + 1e-6)
        assert least < serial
    else:
        assert best == NEVER
        assert least >= serial * (1 - 1e-6)
    for n in thresholds:
        fixed = best_migration_plan(lengths, *model, max_held, prompt, threshold=n)
        assert fixed.threshold == n
        assert simulated[fixed[:2]] <= min(simulated[n, cap] for cap in caps) * (1 + 1e-6)


@settings(max_examples=80)
@given(width=st.sampled_from([2, 3]), must_move=st.booleans(), **cases)
def test_a_width_is_chosen_by_the_simulation(
    width: int, must_move: bool, lengths: list[int], num_instances: int, costs: Costs,
    per_token: float, max_held: int, prompt: int,
) -> None:  # fmt: skip
    """As narrow instances, or as wide ones; else the tail stays where it is."""
    model = (num_instances, costs, per_token)
    simulated: dict[MigrationPlan, float] = {}
    for tried in (1, width) if width <= num_instances else (1,):
        tail = costs.at_width(tried)
        caps = [min(max_held, tail.flat_rows(cached_per_row=prompt + max(lengths)))]
        while caps[-1] < max_held:
            caps.append(min(max_held, 2 * caps[-1]))
        plans = [(n, cap) for n in range(1, len(lengths)) for cap in caps]
        took = [simulate(lengths, *model, *plan, prompt, tried) for plan in plans]
        thresholds, most = zip(*plans, strict=True)
        expected = expected_seconds(lengths, *model, thresholds, most, prompt, width=tried)
        assert expected.tolist() == pytest.approx(took, rel=1e-6)
        simulated |= {MigrationPlan(*p, tried): s for p, s in zip(plans, took, strict=True)}
    widths = (width,) if must_move else (1, width)
    plan = best_migration_plan(
        lengths, *model, max_held, prompt, widths=widths, must_move=must_move
    )
    allowed = {p: s for p, s in simulated.items() if p.width in widths}
    serial = serial_seconds(lengths, *model, prompt)
    if plan.threshold:
        assert plan.width in widths
        assert simulated[plan] <= min(allowed.values()) * (1 + 1e-6)
        assert must_move or simulated[plan] < serial
    else:
        assert plan == NEVER
        least = min(allowed.values(), default=math.inf)
        assert least == math.inf if must_move else least >= serial * (1 - 1e-6)


def test_fewer_weights_a_rank_end_the_tail_sooner() -> None:
    """Also without inference. Rows are free here, but a step is not."""
    costs = Costs(step_s=0.01, wide_step_s={2: 0.006})
    lengths = [100] * 6 + [1000, 2000]
    plan = best_migration_plan(lengths, 2, costs, 0.0, 16, widths=(1, 2))
    assert plan.width == 2
    # The six end together, so a larger threshold would be no sooner.
    assert plan.threshold == 2
    slow = Costs(step_s=0.01, wide_step_s={2: 0.01})
    assert best_migration_plan(lengths, 2, slow, 0.0, 16, widths=(1, 2)) == NEVER
    forced = best_migration_plan(lengths, 2, slow, 0.0, 16, widths=(2,), must_move=True)
    assert forced.width == 2
    assert forced.moves


COSTS = Costs(step_s=0.01, row_s=1e-4, prefill_token_s=1e-5, call_s=1e-3)
NEVER = MigrationPlan(0, 0)


@given(num=st.integers(0, 40), length=st.integers(0, 50), num_instances=st.integers(1, 8))
def test_equal_lengths_leave_nothing_to_gather(num: int, length: int, num_instances: int) -> None:
    assert best_migration_plan([length] * num, num_instances, COSTS, 1e-3, 8, 10) == NEVER


@given(lengths=st.lists(st.integers(0, 500), max_size=40))
def test_one_instance_gathers_nothing(lengths: list[int]) -> None:
    assert best_migration_plan(lengths, 1, COSTS, 1e-3, 64, 10) == NEVER


@given(num=st.integers(2, 100), num_instances=st.integers(2, 8), times=st.integers(2, 100))
def test_one_long_response_is_gathered(num: int, num_instances: int, times: int) -> None:
    lengths = [20] * (num - 1) + [20 * times]
    assert best_migration_plan(lengths, num_instances, COSTS, 1e-4, 64, 10).threshold >= 1


def test_without_inference_there_is_nothing_to_gain() -> None:
    assert best_migration_plan([1, 2, 3, 400], 4, COSTS, 0.0, 64, 10) == NEVER


def test_a_batch_is_as_dense_as_it_pays() -> None:
    """Sixteen long ones on four instances: flat rows first, denser where inference is worth it."""
    lengths = [5] * 200 + [100] * 16
    cheap = Costs(step_s=0.01, row_s=1e-5)
    assert best_migration_plan(lengths, 4, cheap, 2e-3, 64) == MigrationPlan(16, 64), (
        "as many as ride along for free"
    )
    dear = Costs(step_s=0.01, row_s=3e-3)
    assert dear.flat_rows() == 2
    assert best_migration_plan(lengths, 4, dear, 1e-6, 64) == NEVER, "spread they are soonest done"
    gathered = best_migration_plan(lengths, 4, dear, 1e-2, 64)
    assert (gathered.threshold, gathered.cap) == (16, 8), "slower steps, but two instances freed"


def test_two_instances_with_dear_rows_still_free_one() -> None:
    """On a CPU a decode step of four rows costs twice one row's, and still an instance is freed."""
    costs = Costs(step_s=2e-3, row_s=6e-4, prefill_token_s=1e-4, call_s=3e-3)
    assert costs.flat_rows() < 4
    lengths = [20] * 56 + [300] * 8
    best = best_migration_plan(lengths, 2, costs, 1e-3, 256, 10)
    assert best.threshold == 8
    assert best.cap >= 8


def test_memory_bounds_what_an_instance_keeps() -> None:
    lengths = [5] * 200 + [100] * 16
    assert best_migration_plan(lengths, 4, Costs(step_s=0.01), 2e-3, 16) == MigrationPlan(16, 16)
    assert best_migration_plan(lengths, 4, Costs(step_s=0.01), 2e-3, 4).cap <= 4


def test_the_plan_for_a_thousand_samples_is_near_the_best_of_all() -> None:
    draw = random.Random(0)
    lengths = [round(draw.lognormvariate(5, 1)) + 1 for _ in range(1024)]
    best = best_migration_plan(lengths, 64, COSTS, 1e-3, 256, 100)
    assert 0 < best.threshold < 1024
    model = (64, COSTS, 1e-3)
    every = [
        expected_seconds(lengths, *model, range(1, 1024), [cap] * 1023, 100).min()
        for cap in range(16, 257, 16)
    ]
    chosen = expected_seconds(lengths, *model, [best.threshold], [best.cap], 100)
    assert chosen <= min(every) * 1.01


def test_training_of_whole_groups_is_something_to_do() -> None:
    """Two groups of two on two instances; a decode step takes 1 s, training 10 s in all."""
    lengths, costs = [2, 2, 4, 40], Costs(step_s=1.0)
    training = training_arrivals(lengths, [2, 40], 10 / 48, 0.0)
    assert training.tolist() == [5.0, 0.0, 0.0, 5.0]
    assert serial_seconds(lengths, 2, costs, 0.0, training=training) == 40 + 5
    # From 2 to 40 one instance is free: the first group's 5 s are gone by then.
    seconds = expected_seconds(lengths, 2, costs, 0.0, [2], [2], training=training)
    assert seconds.tolist() == [40 + 2.5]
    assert best_migration_plan(lengths, 2, costs, 0.0, 8) == NEVER
    plan = best_migration_plan(lengths, 2, costs, 0.0, 8, training=training)
    assert plan.threshold > 0


def test_training_waits_for_the_longest_of_its_group() -> None:
    assert training_arrivals([1, 2, 3], [3, 9], 1.0, 1.0).tolist() == [0.0, 0.0, 9.0]
    assert training_arrivals([1, 2, 3], [], 1.0, 1.0).tolist() == [0.0, 0.0, 0.0]
