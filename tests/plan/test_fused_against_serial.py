"""Fused never loses to serial: both in virtual time, on the same lengths, at many kinds of costs.

Nor do its mechanisms, whatever is chosen. The first steps, in which costs and lengths are learned,
are left out.
"""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import (
    EarlyBackward,
    FusedScheduleConfig,
    ScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.costs.instance import Costs, Drafting
from hybridrl.flow.workload import Group, Workload
from hybridrl.plan.schedule import Setting, replay, replay_steps
from hybridrl.plan.schedule_command import read_setting
from hybridrl.schedule.dealing import Dealer

RECORDED = Path(__file__).parent / "recorded_run"
LEARNING, STEPS = 5, 10
WIDE_LEARNING, WIDE_STEPS = 10, 16  # a width is tried until three of its calls were seen
SERIAL, FUSED = SerialScheduleConfig(), FusedScheduleConfig()
EARLY = FusedScheduleConfig(early_backward=EarlyBackward.auto)


def lengths(draw: random.Random, num: int, size: int) -> tuple[int, ...]:
    """Response tokens of `num` prompts with a tail, alike within a prompt or not."""
    median, sigma, alike = (
        draw.choice([20, 60, 200]),
        draw.choice([0.2, 0.5, 0.8, 1.1]),
        draw.random(),
    )
    drawn = []
    for _ in range(num):
        prompt = math.sqrt(alike) * draw.gauss(0, 1)
        for _ in range(size):
            x = prompt + math.sqrt(1 - alike) * draw.gauss(0, 1)
            drawn.append(max(1, min(4096, round(median * math.exp(sigma * x)))))
    return tuple(drawn)


def setting(seed: int, passes: tuple[str, ...], steps: int = STEPS) -> Setting:
    """From free rows to dear ones, from calls that cost nothing to some that cost three steps."""
    draw = random.Random(seed)
    prompts, size = draw.choice([8, 16, 32]), draw.choice([4, 8, 16])
    num_instances = draw.choice([2, 4, 8])
    step = 10 ** draw.uniform(-3.3, -1.7)
    row = step * 10 ** draw.uniform(-3.5, -0.7)
    costs = Costs(
        step_s=step,
        row_s=row,
        cached_token_s=row * 10 ** draw.uniform(-4, -2),
        prefill_token_s=row * draw.uniform(0.1, 1),
        admit_s=row * draw.uniform(0, 5),
        call_s=step * draw.uniform(0, 3),
        token_s=dict.fromkeys(passes, row * draw.uniform(0.05, 0.8)),
        stage_call_s=dict.fromkeys(passes, step * draw.uniform(0, 3)),
        kv_token_s=row * draw.uniform(0.01, 0.5),
        kv_call_s=step * draw.uniform(0, 5),
        round_trip_s=10 ** draw.uniform(-3.3, -2.3),
    )
    drawn = lengths(draw, prompts * steps, size)
    groups = tuple(
        Group(draw.randint(10, 60), drawn[i : i + size]) for i in range(0, len(drawn), size)
    )
    return Setting(
        costs=costs,
        num_instances=num_instances,
        max_held=max(16, prompts * size // num_instances),
        decode_steps=draw.choice([16, 64]),
        workload=Workload(groups, prompts, steps),
        group_size=size,
    )


def trained(seed: int, steps: int = STEPS) -> Setting:
    """With training that is short or long beside generation, and a way to it of 0 to 30 steps.

    Two wide instances of two and, where there are more, one of four: sooner or later than one.
    """
    of = setting(seed, ((), ("reference",), ("reference", "reward"))[seed % 3], steps)
    draw = random.Random(seed + 1000)
    costs, wide = of.costs, {2: of.costs.step_s * draw.uniform(0.5, 1.1)}
    if of.num_instances > 2:
        wide[4] = wide[2] * draw.uniform(0.5, 1.1)
    costs = replace(
        costs,
        train_token_s=costs.row_s * draw.uniform(0.1, 2.5) / of.num_instances,
        train_switch_s=costs.step_s * draw.uniform(0, 30),
        wide_step_s=wide,
    )
    return replace(of, costs=costs)


def step(of: Setting, config: ScheduleConfig, skip: int = LEARNING) -> float:
    """Seconds of a step, after the first `skip`."""
    return replay(of, config, skip=skip).step_s


def front(of: Setting, config: ScheduleConfig) -> float:
    """Seconds of generation and forward passes in a step, after `LEARNING` steps."""
    return replay(of, config, skip=LEARNING).front_s


def some(*fast: int, of: int = 24) -> list[Any]:
    """Return so many seeds; those besides `fast`, which show each mechanism, are slow."""
    return [pytest.param(x, marks=() if x in fast else pytest.mark.slow) for x in range(of)]


@pytest.mark.parametrize("seed", some(0, 1, of=4))
def test_where_nothing_can_be_gained_it_is_serial(seed: int) -> None:
    """No forward passes, and prompts of which nothing tells the length."""
    verified = setting(seed, ())
    serial, fused = (front(verified, config) for config in (SERIAL, FUSED))
    assert fused == pytest.approx(serial, rel=1e-6)


@pytest.mark.parametrize("seed", some(0, 1, 2, 3, of=8))
def test_it_is_within_a_hundredth_of_the_better(seed: int) -> None:
    """Serial may be the better; every other seed has two kinds of forward passes."""
    passes = ("reference", "reward")[: 1 + seed % 2]
    compared = setting(seed, passes)
    serial, fused = (front(compared, config) for config in (SERIAL, FUSED))
    assert fused <= 1.01 * serial


@pytest.mark.long
def test_so_it_is_on_each_recorded_step() -> None:
    """The run is the long-tailed task of test_learning.py with a reference, ten steps of fused."""
    recorded, _ = read_setting([f"--costs={RECORDED}", f"--lengths={RECORDED}"])
    serial, fused, early = (
        [step for step, _ in replay_steps(recorded, config)] for config in (SERIAL, FUSED, EARLY)
    )
    assert len(serial) == 10
    for ours, theirs in zip(fused[1:], serial[1:], strict=True):
        assert ours["front_s"] <= 1.01 * theirs["front_s"]
    for ours, *theirs in zip(early[1:], serial[1:], fused[1:], strict=True):
        assert ours["step_s"] <= 1.01 * min(step["step_s"] for step in theirs)


@pytest.mark.parametrize("seed", [104, 134])
def test_where_passes_beside_decoding_cost_more_than_they_save_they_wait(seed: int) -> None:
    """Their own calls, and shorter ones of decoding: 1.02 of serial, if they are begun anyway."""
    compared = trained(seed)
    assert step(compared, FUSED) <= 1.005 * step(compared, SERIAL)


@pytest.mark.long
@pytest.mark.parametrize("seed", some(0, 3, 4, 13, 18, 21))
def test_so_is_early_backward(seed: int) -> None:
    """Begun wherever it may, it takes 1.05, 1.08 and 1.03 of the better with seeds 4, 18, 21."""
    compared = trained(seed)
    serial, fused, early = (step(compared, config) for config in (SERIAL, FUSED, EARLY))
    share = early / min(serial, fused)
    print(f"seed {seed}: {share:.4f} of the better, serial {serial:.4g} s, fused {fused:.4g} s")
    assert share <= 1.01
    assert share < 0.97 or seed not in (0, 3, 5, 13, 20)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_refill_within_a_call(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many samples as rows: calls that hand them out one batch of rows at a time.

    What is printed is how many times as long such a step takes: 1.02 to 1.17.
    """
    of = setting(seed, ())
    of = replace(of, max_held=max(4, of.max_held // 4))
    refilled = front(of, FUSED)
    monkeypatch.setattr(Dealer, "_ahead", lambda self, num_queued: 0)
    by_call = front(of, FUSED)
    print(f"seed {seed}: {by_call / refilled:.3f} of the refilled")
    assert refilled < by_call


def with_a_wide_tail(compared: Setting, seed: int) -> float:
    """The share of the better of serial and fused that a step with all plans takes; printed."""
    serial, fused = (step(compared, config, WIDE_LEARNING) for config in (SERIAL, FUSED))
    wide = replace(compared, widths=tuple(compared.costs.wide_step_s))
    share = step(wide, EARLY, WIDE_LEARNING) / min(serial, fused)
    print(f"seed {seed}: {share:.4f} of the better, serial {serial:.4g} s, fused {fused:.4g} s")
    return share


@pytest.mark.long
@pytest.mark.parametrize("seed", some(4, 19))
def test_so_is_a_wide_tail_with_it(seed: int) -> None:
    """Within a hundredth of the better, but for two of the settings."""
    most = {11: 1.035, 21: 1.015}.get(seed, 1.01)
    assert with_a_wide_tail(trained(seed, WIDE_STEPS), seed) <= most


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 9])
def test_a_trial_of_a_width_costs_little(seed: int) -> None:
    """Wide steps take twice as long: 1.11, 1.23 and 1.13 if the whole tail tries them."""
    compared = trained(seed, 8)
    slow = replace(compared.costs, wide_step_s={2: 2 * compared.costs.step_s})
    wide = replace(compared, costs=slow, widths=(2,))
    assert step(wide, EARLY, 1) <= 1.08 * step(compared, EARLY, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", some(10))
def test_so_are_all_together_where_rows_guess_ahead(seed: int) -> None:
    compared = trained(seed, WIDE_STEPS)
    drafting = Drafting(tokens=None, accept=random.Random(seed).uniform(0.2, 0.9))
    guessing = replace(compared, costs=replace(compared.costs, drafting=drafting))
    assert with_a_wide_tail(guessing, seed) <= (1.015 if seed == 21 else 1.01)
