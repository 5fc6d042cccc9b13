"""The migration threshold against an event simulation of the same assumptions."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridrl.costs.instance import Costs, Drafting
from hybridrl.costs.tail import StepModel, training_arrivals
from hybridrl.flow.migration import (
    MigrationPlan,
    TailPlan,
    best_plan,
    best_threshold,
    tail_plans,
)


def model_of(
    lengths: list[int],
    num_instances: int,
    costs: Costs,
    per_token: float,
    prompt: float = 0.0,
    **more: Any,
) -> StepModel:
    return StepModel(
        lengths=lengths,
        num_instances=num_instances,
        costs=costs,
        inference_s_per_token=per_token,
        prompt_tokens=prompt,
        **more,
    )


def plans_of(model: StepModel, max_held: int, **more: Any) -> dict[str, TailPlan]:
    plans = tail_plans([model], max_held, stay_call_steps=0, **more)
    return {plan.name: plan for plan in plans}


def chosen(model: StepModel, max_held: int, **more: Any) -> TailPlan:
    return best_plan([*plans_of(model, max_held, **more).values()])


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
    args = (lengths, num_instances, costs, per_token)
    caps = [min(max_held, costs.flat_rows(cached_per_row=prompt + max(lengths)))]
    while caps[-1] < max_held:
        caps.append(min(max_held, 2 * caps[-1]))
    thresholds = range(1, len(lengths))
    simulated = {(n, cap): simulate(*args, n, cap, prompt) for n in thresholds for cap in caps}
    model = model_of(*args, prompt)
    expected = model.expected_seconds(*zip(*simulated, strict=True))
    assert expected.tolist() == pytest.approx([*simulated.values()], rel=1e-6)
    seconds, best = best_threshold([model], max_held)
    assert seconds == pytest.approx(min(simulated.values()), rel=1e-6)
    assert simulated[best[:2]] == pytest.approx(seconds, rel=1e-6)
    for n in thresholds:
        _, fixed = best_threshold([model], max_held, n)
        assert fixed.threshold == n
        assert simulated[fixed[:2]] <= min(simulated[n, cap] for cap in caps) * (1 + 1e-6)
    plans = plans_of(model, max_held)
    if per_token:
        assert plans["overlap"].seconds == pytest.approx(min(simulated[1, cap] for cap in caps))
        assert plans["migrate"] == TailPlan("migrate", seconds, best)
    else:
        assert [*plans] == ["stay"]
    assert plans["stay"].seconds == model.serial_seconds()
    assert not plans["stay"].overlaps


@settings(max_examples=80)
@given(width=st.sampled_from([2, 3]), must_move=st.booleans(), **cases)
def test_a_width_is_chosen_by_the_simulation(
    width: int, must_move: bool, lengths: list[int], num_instances: int, costs: Costs,
    per_token: float, max_held: int, prompt: int,
) -> None:  # fmt: skip
    """As narrow instances, or as wide ones; else the tail stays where it is."""
    args = (lengths, num_instances, costs, per_token)
    least: dict[int, float] = {}
    for tried in (1, width) if width <= num_instances else (1,):
        tail = costs.at_width(tried)
        caps = [min(max_held, tail.flat_rows(cached_per_row=prompt + max(lengths)))]
        while caps[-1] < max_held:
            caps.append(min(max_held, 2 * caps[-1]))
        plans = [(n, cap) for n in range(1, len(lengths)) for cap in caps]
        took = [simulate(*args, *plan, prompt, tried) for plan in plans]
        expected = model_of(*args, prompt, width=tried).expected_seconds(*zip(*plans, strict=True))
        assert expected.tolist() == pytest.approx(took, rel=1e-6)
        least[tried] = min(took)
    candidates = plans_of(
        model_of(*args, prompt), max_held, widths=(width,) * must_move or (1, width)
    )
    wide = candidates.get(f"widen to {width}")
    if least.get(width, math.inf) == math.inf:  # too few instances, or no room
        assert wide is None
    else:
        assert wide is not None
        assert wide.seconds == pytest.approx(least[width], rel=1e-6)
        assert wide.migration.width == width
        assert ("stay" in candidates) == (not must_move)


def test_fewer_weights_a_rank_end_the_tail_sooner() -> None:
    """Wide instances pay without inference, too. Rows are free here, but a step is not."""
    costs = Costs(step_s=0.01, wide_step_s={2: 0.006})
    lengths = [100] * 6 + [1000, 2000]
    plan = chosen(model_of(lengths, 2, costs, 0.0), 16, widths=(1, 2)).migration
    assert plan.width == 2
    # The six end together, so a larger threshold would be no sooner.
    assert plan.threshold == 2
    slow = model_of(lengths, 2, Costs(step_s=0.01, wide_step_s={2: 0.01}), 0.0)
    assert chosen(slow, 16, widths=(1, 2)).migration == NEVER
    forced = chosen(slow, 16, widths=(2,)).migration
    assert forced.width == 2
    assert forced.moves


COSTS = Costs(step_s=0.01, row_s=1e-4, prefill_token_s=1e-5, call_s=1e-3)
NEVER = MigrationPlan(0, 0)


@given(num=st.integers(0, 40), length=st.integers(0, 50), num_instances=st.integers(1, 8))
def test_equal_lengths_leave_nothing_to_gather(num: int, length: int, num_instances: int) -> None:
    model = model_of([length] * num, num_instances, COSTS, 1e-3, 10)
    assert chosen(model, 8).migration == NEVER


@given(lengths=st.lists(st.integers(0, 500), max_size=40))
def test_one_instance_gathers_nothing(lengths: list[int]) -> None:
    assert chosen(model_of(lengths, 1, COSTS, 1e-3, 10), 64).name == "stay"


def test_without_inference_there_is_nothing_to_gain() -> None:
    assert chosen(model_of([1, 2, 3, 400], 4, COSTS, 0.0, 10), 64).migration == NEVER


def test_a_batch_is_as_dense_as_it_pays() -> None:
    """Sixteen long ones on four instances: flat rows first, denser where inference is worth it."""
    lengths = [5] * 200 + [100] * 16
    cheap = model_of(lengths, 4, Costs(step_s=0.01, row_s=1e-5), 2e-3)
    assert chosen(cheap, 64).migration == (16, 64, 1), "as many as ride along for free"
    costs = Costs(step_s=0.01, row_s=3e-3)
    assert costs.flat_rows() == 2
    spread = chosen(model_of(lengths, 4, costs, 1e-6), 64)
    assert spread.migration == NEVER, "spread they are soonest done"
    gathered = chosen(model_of(lengths, 4, costs, 1e-2), 64).migration
    assert gathered.threshold >= 16
    assert gathered.cap > 2


def test_two_instances_with_dear_rows_still_free_one() -> None:
    """On a CPU a decode step of four rows costs twice one row's, and still an instance is freed."""
    costs = Costs(step_s=2e-3, row_s=6e-4, prefill_token_s=1e-4, call_s=3e-3)
    assert costs.flat_rows() < 4
    best = chosen(model_of([20] * 56 + [300] * 8, 2, costs, 1e-3, 10), 256).migration
    assert best.threshold == 8
    assert best.cap >= 8


def test_memory_bounds_what_an_instance_keeps() -> None:
    model = model_of([5] * 200 + [100] * 16, 4, Costs(step_s=0.01), 2e-3)
    assert chosen(model, 16).migration == (16, 16, 1)
    assert chosen(model, 4).migration.cap <= 4


@pytest.mark.long
def test_the_plan_for_a_thousand_samples_is_near_the_best_of_all() -> None:
    draw = random.Random(0)
    lengths = [round(draw.lognormvariate(5, 1)) + 1 for _ in range(1024)]
    model = model_of(lengths, 64, COSTS, 1e-3, 100)
    seconds, best = best_threshold([model], 256)
    assert 0 < best.threshold < 1024
    every = [
        model.expected_seconds(range(1, 1024), [cap] * 1023).min() for cap in range(16, 257, 16)
    ]
    assert seconds <= min(every) * 1.01


# Thresholds just before and after another instance is needed, which a ladder alone steps over.
@example(seed=40538, width=1, trains=True)
@example(seed=478, width=2, trains=False)
@example(seed=100854, width=1, trains=False)
@example(seed=100871, width=1, trains=True)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), width=st.sampled_from([1, 2]), trains=st.booleans())
def test_the_plan_for_hundreds_of_samples_is_near_the_best_of_all(
    seed: int, width: int, trains: bool
) -> None:
    """Not all of many plans are tried; calls and ways to training make steps in what they take."""
    draw = random.Random(seed)
    num, sigma = draw.choice([80, 200, 500]), draw.choice([0.3, 0.8, 1.2, 2.0])
    lengths = sorted(round(draw.lognormvariate(5, sigma)) + 1 for _ in range(num))
    costs = Costs(
        step_s=0.01,
        row_s=draw.choice([0, 1e-5, 3e-4, 1e-3]),
        cached_token_s=draw.choice([0, 1e-7, 1e-6]),
        prefill_token_s=1e-4,
        call_s=draw.choice([0, 1e-3]),
        kv_token_s=1e-5,
        kv_call_s=1e-3,
        wide_step_s={2: 0.006},
    )
    model = replace(
        model_of(lengths, draw.choice([4, 16, 64]), costs, draw.choice([0, 1e-4, 1e-3]), 50),
        call_steps=64,
        call_s=draw.choice([0, 0.6]),
        training=training_arrivals(lengths, lengths[7::8], 20.0) if trains else None,
        switch_s=draw.choice([0, 2.0]),
        width=width,
    )
    seconds, best = best_threshold([model], 64)
    caps = [min(64, costs.at_width(width).flat_rows(cached_per_row=50 + lengths[-1]))]
    while caps[-1] < 64:
        caps.append(min(64, 2 * caps[-1]))
    every = min(model.expected_seconds(range(1, num), [cap] * (num - 1)).min() for cap in caps)
    assert seconds <= every * 1.005
    assert best.width == width


# -- training ------------------------------------------------------------------------------------


def two_groups() -> StepModel:
    """Two groups of two on two instances; a decode step takes 1 s, training 10 s in all."""
    lengths = [2, 2, 4, 40]
    training = training_arrivals(lengths, [2, 40], 10.0)
    assert training.tolist() == [5.0, 0.0, 0.0, 5.0]
    return model_of(lengths, 2, Costs(step_s=1.0), 0.0, training=training)


def test_training_of_whole_groups_is_something_to_do() -> None:
    model = two_groups()
    assert model.serial_seconds() == 40 + 5
    # From 2 to 40 one instance is free: the first group's 5 s are gone by then.
    assert model.expected_seconds([2], [2]).tolist() == [40 + 2.5]
    plans = plans_of(model, 8)
    assert [*plans] == ["stay", "train early", "migrate", "migrate, train early"]
    assert plans["stay"].seconds == 40 + 5
    assert plans["train early"].seconds == 40 + 2.5
    assert chosen(model, 8).trains_early


@pytest.mark.parametrize(("switch_s", "left_s"), [(10.0, 0.0), (34.0, 3.0), (50.0, 5.0)])
def test_a_freed_instance_s_way_to_training_takes_its_time(switch_s: float, left_s: float) -> None:
    """It is free from 4 to 40, without a migration: its training begins `switch_s` later."""
    model = replace(two_groups(), switch_s=switch_s)
    assert best_threshold([model], 8, 1)[0] == 40 + (left_s + 5) / 2
    assert chosen(model, 8).trains_early == (switch_s < 40)


def test_training_waits_for_the_longest_of_its_group() -> None:
    assert training_arrivals([1, 2, 3], [3, 9], 9.0).tolist() == [0.0, 0.0, 9.0]
    assert training_arrivals([1, 2, 3], [], 9.0).tolist() == [0.0, 0.0, 0.0]


# -- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train_s", "expected"),
    [
        (10.0, {"stay": 45.0, "train early": 42.5, "widen to 2": 35.2}),
        (60.0, {"stay": 70.0, "train early": 55.0, "widen to 2": 60.2}),
    ],
)
def test_the_example_of_the_docs(train_s: float, expected: dict[str, float]) -> None:
    """docs/tail.md, Choosing."""
    lengths = [2, 2, 4, 40]
    costs = Costs(step_s=1.0, wide_step_s={2: 0.7}, kv_call_s=1.0, prefill_token_s=1.0)
    training = training_arrivals(lengths, [2, 40], train_s)
    model = model_of(lengths, 2, costs, 0.0, training=training, switch_s=4.0)
    plans = {plan.name: plan for plan in tail_plans([model], 8, stay_call_steps=0, widths=(1, 2))}
    assert {name: plans[name].seconds for name in expected} == pytest.approx(expected)
    best = best_plan([*plans.values()]).name
    assert best == min(expected, key=lambda name: expected[name])


def test_one_extraordinary_step_does_not_decide_for_all() -> None:
    """Moving takes 4 s. In three steps of four it saves 1 s, in the other one 14 s."""
    costs = Costs(step_s=1.0, wide_step_s={2: 0.5}, kv_call_s=4.0, prefill_token_s=1.0)
    usual, other = model_of([10, 20], 2, costs, 0.0), model_of([10, 46], 2, costs, 0.0)
    names = {}
    for models in ([usual] * 3 + [other], [usual], [other]):
        plans = tail_plans(models, 8, stay_call_steps=0, widths=(1, 2))
        names[len(models), models[0] is usual] = {plan.name: plan.seconds for plan in plans}
    assert names[1, True] == {"stay": 20.0, "widen to 2": 10 + 4 + 5.0}
    assert names[1, False] == {"stay": 46.0, "widen to 2": 10 + 4 + 18.0}
    assert names[4, True] == {"stay": 26.5, "widen to 2": (3 * 19 + 32) / 4}


def test_a_plan_has_to_save_a_hundredth() -> None:
    stay, other = TailPlan("stay", 10.0), TailPlan("train early", 9.95, NEVER, True)
    assert best_plan([stay, other]) is stay
    assert best_plan([stay, other._replace(seconds=9.8)]).name == "train early"


def test_calls_that_end_sooner_cost_something() -> None:
    """Waiting for ends costs calls: 2.2 s of them, more than the 2.1 s that can be trained."""
    costs = Costs(step_s=1.0, call_s=0.3, round_trip_s=0.2)
    training = training_arrivals([2, 2, 4, 40], [2, 40], 4.2)
    model = model_of([2, 2, 4, 40], 2, costs, 0.0, training=training, call_steps=8)
    plans = {p.name: p for p in tail_plans([model], 8, stay_call_steps=64)}
    assert plans["stay"].seconds == pytest.approx(40 + 40 * 0.5 / 64 + 2.1)
    assert plans["train early"].seconds == pytest.approx(40 + 40 * 0.5 / 8 + 1.05)
    assert not best_plan([*plans.values()]).trains_early


def test_a_wide_instance_has_room_for_all_that_may_be_left() -> None:
    """A call may end when only two of six are left, or all six: one wide instance has to do."""
    costs = Costs(step_s=1.0, row_s=1.0, wide_step_s={2: 0.5})
    model = model_of([1] * 4 + [10, 11, 12, 13, 20, 21], 2, costs, 0.0, call_steps=60, call_s=60.0)
    plans = {
        p.name: p for p in tail_plans([model], 8, stay_call_steps=60, threshold=6, widths=(2,))
    }
    assert plans["widen to 2"].migration.threshold == 6
    assert plans["widen to 2"].migration.cap >= 6


def test_guesses_make_the_tail_shorter() -> None:
    """Drafts of two, each right half of the time: 1.75 tokens a step, of which each costs a row."""
    drafting = Drafting(tokens=2, accept=0.5)
    costs = Costs(step_s=1.0, row_s=0.1, drafting=drafting)
    model = model_of([7, 7], 2, costs, 0.0)
    assert model.serial_seconds() == pytest.approx(7 * (1 + 3 * 0.1) / 1.75)


def test_a_threshold_of_the_user_is_kept() -> None:
    model = two_groups()
    assert [*plans_of(model, 8, threshold=0)] == ["stay", "train early"]
    plans = plans_of(model, 8, threshold=3)
    assert [*plans] == ["migrate", "migrate, train early"]
    assert {plan.migration.threshold for plan in plans.values()} == {3}
    assert [*plans_of(model, 8, widths=(2,))] == ["widen to 2", "widen to 2, train early"]
    assert [*plans_of(model, 8, widths=(4,))] == ["stay", "train early"]


# -- waits ---------------------------------------------------------------------------------------


def simulate_waiting(
    lengths: list[int], waits: list[int], num_instances: int, per_token: float, threshold: int,
    cap: int, prompt: int,
) -> float:  # fmt: skip
    """Rows are free and a token takes a second, so that each sample ends in a time of its own."""
    ends = sorted((tokens + wait, tokens) for tokens, wait in zip(lengths, waits, strict=True))
    left, on, now, waiting, moved = len(ends), num_instances, 0.0, 0.0, False
    for end, tokens in ends:
        if end > now and not moved and left <= threshold:
            moved, on = True, min(num_instances, -(-left // cap))
        waiting = max(0.0, waiting - (end - now) * (num_instances - min(on, left)))
        now, left, waiting = end, left - 1, waiting + per_token * (prompt + tokens)
    return now + waiting / num_instances


@settings(max_examples=80)
@given(
    samples=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 200)), min_size=2, max_size=24),
    num_instances=st.integers(2, 6),
    per_token=st.floats(0, 1),
    max_held=st.integers(1, 30),
    prompt=st.integers(0, 50),
)
def test_those_that_wait_end_later(
    samples: list[tuple[int, int]],
    num_instances: int,
    per_token: float,
    max_held: int,
    prompt: int,
) -> None:
    lengths, waits = map(list, zip(*samples, strict=True))
    args = (lengths, num_instances, Costs(step_s=1.0), per_token, prompt)
    model = model_of(*args, waits=waits if any(waits) else ())
    thresholds = range(1, len(lengths))
    simulated = {
        n: simulate_waiting(lengths, waits, num_instances, per_token, n, max_held, prompt)
        for n in thresholds
    }
    expected = model.expected_seconds([*thresholds], [max_held] * len(simulated))
    assert expected.tolist() == pytest.approx([*simulated.values()], rel=1e-6)
    work = per_token * sum(prompt + length for length in lengths) / num_instances
    longest = max(length + wait for length, wait in samples)
    assert model.serial_seconds() == pytest.approx(longest + work)


def test_those_that_wait_take_no_row() -> None:
    """Each of four makes 10 tokens and waits half of its time, so that two of four are rows."""
    costs = Costs(step_s=1.0, row_s=1.0)
    model = model_of([10] * 4, 1, costs, 0.0, waits=[30.0] * 4)
    assert model.usual_pace == pytest.approx(3.0, rel=0.01)
    assert model.serial_seconds() == pytest.approx(60.0, rel=0.01)
    assert model_of([10] * 4, 1, costs, 0.0).serial_seconds() == 50.0


def test_what_waits_is_the_tail() -> None:
    """`two_groups`, whose last sample waits for 36 s instead of decoding them."""
    lengths, waits = [2, 2, 4, 4], [0.0, 0.0, 0.0, 36.0]
    waiting = model_of(lengths, 2, Costs(step_s=1.0), 0.0, switch_s=8.0, waits=waits)
    assert waiting.ends([2, 4], [0.0, 36.0]) == [2, 40]
    training = training_arrivals(waiting.ends(lengths, waits), [2, 40], 10.0)
    plan = chosen(replace(waiting, training=training), 8)
    assert plan.trains_early
    assert plan.seconds == 40 + 2.5
    ready = training_arrivals(lengths, [2, 4], 10.0)
    assert not chosen(replace(waiting, waits=(), training=ready), 8).trains_early


def test_equal_lengths_are_gathered_where_some_wait() -> None:
    """Three of 24 wait: they leave three of four instances to the passes of the others."""
    costs, lengths, waits = Costs(step_s=0.01), [10] * 24, [0.0] * 21 + [5.0] * 3
    plan = chosen(model_of(lengths, 4, costs, 0.03, 10, waits=waits), 16)
    assert (plan.name, plan.migration.threshold) == ("migrate", 3)
    assert chosen(model_of(lengths, 4, costs, 0.03, 10), 16).migration == NEVER
