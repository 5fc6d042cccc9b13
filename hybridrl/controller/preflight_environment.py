"""Checks of a run's environment before it starts a process of its own."""

import contextlib
from collections.abc import Iterator
from typing import Any

from hybridrl.config import Config, ConfigError
from hybridrl.data.turns import TurnTemplate
from hybridrl.environments import Openings
from hybridrl.flow import Graph
from hybridrl.flow.graph import GenerateStage


def check_environment(config: Config, graph: Graph) -> None:
    """Raise where there is an environment, and nothing that it could answer."""
    generates = any(isinstance(stage, GenerateStage) for stage in graph.stages.values())
    if config.environment.is_on and not generates:
        allowed = "none: the recipe does not generate"
        raise ConfigError("environment.kind", config.environment.kind.value, allowed)


@contextlib.contextmanager
def openings(config: Config, tokenizer: Any) -> Iterator[Openings | None]:
    """What the environment says first to each task, and its tools; None without one.

    Raises for an environment that cannot be built, or whose tools the model cannot be told of.
    """
    if not config.environment.is_on:
        yield None
        return
    sources, judge = config.sources_of("reward"), config.reward
    with Openings(config.environment, sources, jail=judge.jail, limits=judge.limits) as opening:
        if opening.tools and config.data.chat:
            TurnTemplate(tokenizer, opening.tools).check(tokenizer.name_or_path)
        yield opening
