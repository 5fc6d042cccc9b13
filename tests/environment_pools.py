"""What tests of environments share: tasks, settings, and a model with its turns prepared."""

from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.config import EnvironmentConfig
from hybridrl.environments import (
    EpisodePool,
    EpisodeStart,
    EpisodeStep,
    EpisodeTask,
    ModelTurn,
)

Make = Callable[..., EnvironmentConfig]
Pool = Callable[..., EpisodePool]


def settled(config: EnvironmentConfig, max_new_tokens: int = 64) -> EnvironmentConfig:
    """Settings as a run has them."""
    config.resolve(max_new_tokens)
    config.check(max_new_tokens)
    return config


def task(question: str, **row: Any) -> EpisodeTask:
    """A task with one message."""
    return EpisodeTask(
        ({"role": "user", "content": question},), {"question": question, **row}, source="s"
    )


def played(
    pool: EpisodePool, task: EpisodeTask, turns: Sequence[str], id: tuple[Any, ...] = (0, "", 0)
) -> tuple[EpisodeStart, list[EpisodeStep]]:
    """An episode in which the model says `turns`, until it ends or fails."""
    start = pool.start(id, task).result(60)
    steps = list[EpisodeStep]()
    for text in turns:
        if start.failure or (steps and steps[-1].messages is None):
            break
        steps.append(pool.turn(id, ModelTurn(text, "stop", 7, 2)).result(60))
    return start, steps
