"""A walk on a grid: each turn is a step, each reply the new place."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from hybridrl.config import ConfigError, EnvironmentConfig, SourceConfig
from hybridrl.environments.arguments import PARAMS, read_params
from hybridrl.environments.program import Environment, Model
from hybridrl.environments.task import EpisodeTask

MOVES = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}
"""What each letter adds to column and row."""
DEFAULTS = {"size": 5, "slip": 0.25}

Cell = tuple[int, int]


def grid(config: EnvironmentConfig, sources: Mapping[str, SourceConfig]) -> Environment:
    """kind=grid: walk from a place to another, `b2>d4:` says from b2 to d4.

    A turn is one of the letters n, e, s, w; its last one counts. With the probability `slip` the
    step goes another way, so that only those who read the reply know where they are. A step off
    the grid stays. The last turn earns 1 where the walk has come to its end, which ends it.
    """
    params = read_params(config, DEFAULTS)
    size, slip = params["size"], params["slip"]
    if not 2 <= size <= 9:
        raise ConfigError(f"{PARAMS}.size", size, "2 to 9")
    if not 0 <= slip < 1:
        raise ConfigError(f"{PARAMS}.slip", slip, "0 to below 1")

    async def program(task: EpisodeTask, model: Model, rng: Random) -> float | None:
        place, goal = places_in(task.question, size)
        turn = await model.turn(task.messages)
        while True:
            place = stepped(place, turn.text, size, slip, rng)
            if place == goal:
                return 1.0
            turn = await model.turn(named(place))

    return Environment(program)


def stepped(place: Cell, text: str, size: int, slip: float, rng: Random) -> Cell:
    """The place after a step, which draws twice from `rng` whatever it is."""
    slips, letter = rng.random() < slip, rng.choice(sorted(MOVES))
    move = MOVES.get(letter if slips else text.strip().lower()[-1:], (0, 0))
    x, y = place[0] + move[0], place[1] + move[1]
    return (x, y) if 0 <= x < size and 0 <= y < size else place


def named(place: Cell) -> str:
    """`(1, 2)` is `b3`."""
    return f"{'abcdefghi'[place[0]]}{place[1] + 1}"


def places_in(question: str, size: int) -> tuple[Cell, Cell]:
    """The two places of a question; raises ValueError for one that names others."""
    begin, _, end = question.strip().rstrip(":").partition(">")
    known = {named((x, y)): (x, y) for x in range(size) for y in range(size)}
    if begin not in known or end not in known:
        raise ValueError(f"the question is {question!r:.40}, wanted two places of a grid of {size}")
    return known[begin], known[end]


def tasks(
    seed: int, size: int = 5, slip: float = 0.25, turns: int = 8, blind: float = 0.5
) -> Iterator[dict[str, Any]]:
    """Rows of kind=function sources: `b2>d4:`, with a walk as the answer, letters and places.

    A share `blind` of its steps go anywhere, the others nearer to the end: walks to warm up on.
    """
    draw = Random(seed)
    while True:
        place, goal = ((draw.randrange(size), draw.randrange(size)) for _ in range(2))
        if place == goal:
            continue
        question, walk = f"{named(place)}>{named(goal)}:", ""
        for _ in range(turns):
            letter = draw.choice(sorted(MOVES))
            if draw.random() >= blind:
                letter = draw.choice(_nearer(place, goal))
            place = stepped(place, letter, size, slip, draw)
            walk += letter if place == goal else letter + named(place)
            if place == goal:
                break
        yield {"question": question, "answer": walk}


def _nearer(place: Cell, goal: Cell) -> list[str]:
    """The letters of the steps that come nearer to a place."""
    return [
        letter
        for letter, (x, y) in MOVES.items()
        if x * (goal[0] - place[0]) + y * (goal[1] - place[1]) > 0
    ]
