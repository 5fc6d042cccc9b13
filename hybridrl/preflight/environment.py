"""Checks of a run's environment before it starts a process of its own."""

import contextlib
from collections.abc import Iterator
from typing import Any

from hybridrl.config import Config, ConfigError
from hybridrl.config.environment import EnvironmentKind
from hybridrl.data.tool_forms import call_form
from hybridrl.data.turns import TurnTemplate
from hybridrl.environments import Openings
from hybridrl.flow import Graph
from hybridrl.flow.graph import GenerateStage
from hybridrl.flow.sample import TURN_REWARDS


def check_environment(config: Config, graph: Graph) -> None:
    """Raise where there is an environment, and nothing that it could answer; or the reverse."""
    environment = config.environment
    if not environment.is_on:
        if any(TURN_REWARDS in getattr(stage, "outputs", ()) for stage in graph.stages.values()):
            kinds = ", ".join(kind.value for kind in EnvironmentKind if kind.value != "none")
            raise ConfigError("environment.kind", "none", f"{kinds}: the recipe reads turn_rewards")
        return
    kind = "environment.kind", environment.kind.value
    if not any(isinstance(stage, GenerateStage) for stage in graph.stages.values()):
        raise ConfigError(*kind, "none: the recipe does not generate")


@contextlib.contextmanager
def openings(config: Config) -> Iterator[Openings | None]:
    """What the environment says first to each task, and its tools; None without one.

    Raises for an environment that cannot be built.
    """
    if not config.environment.is_on:
        yield None
        return
    sources, judge = config.sources_of("reward"), config.reward
    with Openings(config.environment, sources, jail=judge.jail, limits=judge.limits) as opening:
        yield opening


def turn_template(config: Config, tokenizer: Any, opening: Openings) -> TurnTemplate:
    """What stands between turns, and the form of calls in them.

    Raises where the model cannot be told what tools say, or nothing here reads its calls.
    """
    setting, chat = config.environment.tool_calls, config.data.chat
    form = call_form(setting, tokenizer, chat, opening.tools)
    template = TurnTemplate(tokenizer, opening.tools, chat, form)
    if opening.tools and chat:
        template.check(tokenizer.name_or_path)
    return template
