"""The walk on a grid: its places, its chance, its rows; and first messages before a run."""

import collections
from itertools import islice
from random import Random

import pytest
from environment_pools import Make, Pool, played, settled, task

from hybridrl.config import ConfigError, EnvironmentConfig, EnvironmentKind
from hybridrl.environments import EpisodeStep, Openings
from hybridrl.environments.grid import named, places_in, stepped, tasks


def config(**params: float) -> EnvironmentConfig:
    return settled(EnvironmentConfig(kind=EnvironmentKind.grid, params=params))


@pytest.mark.long
def test_a_walk_comes_to_its_end(pool: Pool) -> None:
    start, steps = played(pool(config(slip=0.0)), task("b2>d3:"), ["e", "n", "??", "e"])
    assert start.messages == ({"role": "user", "content": "b2>d3:"},)
    replies = [step.messages[0]["content"] for step in steps[:-1] if step.messages]
    assert replies == ["c2", "c3", "c3"]
    assert steps[-1] == EpisodeStep(None, (0.0, 0.0, 0.0, 1.0))


def test_a_walk_ends_after_its_turns_and_stays_on_the_grid(pool: Pool) -> None:
    _, steps = played(pool(config(slip=0.0)), task("a1>e5:"), ["w"] * 9)
    assert {step.messages[0]["content"] for step in steps if step.messages} == {"a1"}
    assert steps[-1] == EpisodeStep(None, (0.0,) * 8, "length")


def test_steps_slip_as_often_as_said() -> None:
    rng = Random(0)
    ends = collections.Counter(stepped((2, 2), "n", 5, 0.4, rng) for _ in range(4000))
    assert abs(ends[(2, 3)] / 4000 - 0.7) < 0.03  # 0.6, and a quarter of the slips
    assert all(abs(ends[place] / 4000 - 0.1) < 0.02 for place in ((2, 1), (1, 2), (3, 2)))


def test_rows_are_the_same_for_a_seed_and_their_walks_are_walks() -> None:
    rows = list(islice(tasks(7), 300))
    assert rows == list(islice(tasks(7), 300)) != list(islice(tasks(8), 300))
    reached = 0
    for row in rows:
        place, goal = places_in(row["question"], 5)
        assert place != goal
        letters = row["answer"][::3]
        assert set(letters) <= set("nesw")
        assert len(letters) <= 8
        reached += len(row["answer"]) % 3 == 1 or row["answer"].endswith(named(goal))
    assert 60 < reached < 280  # half-blind walks often miss


@pytest.mark.long
@pytest.mark.parametrize("question", ["b2", "b2>z9:", "b2>b9:"])
def test_other_questions_are_refused_before_a_run(question: str) -> None:
    with (
        Openings(config()) as opening,
        pytest.raises(ConfigError, match=r"environment\.kind=grid: wanted .*two places of a grid"),
    ):
        opening([task("a1>b2:"), task(question)])


PROGRAMS = """
async def fixed(task, model, rng):
    await model.turn(f"{task.question} {task.seed % 10}")


async def drawn(task, model, rng):
    await model.turn(f"{task.question} {rng.random()}")


async def ordered(task, model, rng):
    await model.turn(" ".join({"one", "two", "three", "four", "five", "six", "seven"}))
"""


@pytest.mark.long
def test_first_messages_follow_from_the_task(make: Make) -> None:
    asked = [task(f"{n}?") for n in range(600)]
    with Openings(make(PROGRAMS, "fixed")) as opening:
        firsts = opening(asked)
    assert [m["content"] for (m,) in firsts] == [f"{t.question} {t.seed % 10}" for t in asked]


@pytest.mark.parametrize("name", ["drawn", "ordered"])
def test_a_first_message_of_chance_is_refused(make: Make, name: str) -> None:
    with (
        Openings(make(PROGRAMS, name)) as opening,
        pytest.raises(ConfigError, match=r"environment\.path=.*: wanted a program whose first"),
    ):
        opening([task("a?"), task("b?")])
