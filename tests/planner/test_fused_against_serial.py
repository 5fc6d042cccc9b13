"""Fused never loses to serial: both in virtual time, on the same lengths, at many kinds of costs.

The first steps, in which costs and lengths are learned, are left out.
"""

import math
import random

import pytest

from hybridrl.config import FusedScheduleConfig, ScheduleConfig, SerialScheduleConfig
from hybridrl.flow.costs import Costs
from hybridrl.planner.schedule import Setting, replay
from hybridrl.planner.workload import Group, Workload

LEARNING, STEPS = 5, 10


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


def setting(seed: int, passes: tuple[str, ...]) -> Setting:
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
    drawn = lengths(draw, prompts * STEPS, size)
    groups = tuple(
        Group(draw.randint(10, 60), drawn[i : i + size]) for i in range(0, len(drawn), size)
    )
    return Setting(
        costs=costs,
        num_instances=num_instances,
        max_held=max(16, prompts * size // num_instances),
        decode_steps=draw.choice([16, 64]),
        workload=Workload(groups, prompts, STEPS),
        group_size=size,
    )


def front(of: Setting, config: ScheduleConfig) -> float:
    """Seconds of generation and forward passes in a step, after `LEARNING` steps."""
    return replay(of, config, skip=LEARNING).front_s


@pytest.mark.parametrize("seed", range(4))
def test_where_nothing_can_be_gained_it_is_serial(seed: int) -> None:
    """No forward passes, and prompts of which nothing tells the length."""
    verified = setting(seed, ())
    serial, fused = (front(verified, c) for c in (SerialScheduleConfig(), FusedScheduleConfig()))
    assert fused == pytest.approx(serial, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_within_a_hundredth_of_the_better(seed: int) -> None:
    """Of itself and of serial; every other time with two kinds of forward passes."""
    passes = ("reference", "reward")[: 1 + seed % 2]
    compared = setting(seed, passes)
    serial, fused = (front(compared, c) for c in (SerialScheduleConfig(), FusedScheduleConfig()))
    assert fused <= 1.01 * serial
