"""From the settings of an environment to its program and tools."""

import inspect
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from hybridrl.config import ConfigError, EnvironmentConfig, EnvironmentKind, SourceConfig
from hybridrl.config.dotted import load_function, load_object
from hybridrl.environments.arguments import PATH, check_arguments, read_params
from hybridrl.environments.program import Environment, Model, of_class
from hybridrl.environments.task import EpisodeTask
from hybridrl.environments.tools import with_tools

FORMS = "async def f(task, model, rng), or a class with reset and step"

LOADERS = {
    EnvironmentKind.function: "hybridrl.environments.load:user_program",
    EnvironmentKind.tools: "hybridrl.environments.load:user_tools",
    EnvironmentKind.grid: "hybridrl.environments.grid:grid",
    EnvironmentKind.retry: "hybridrl.environments.retry:retry",
    EnvironmentKind.python: "hybridrl.environments.python:python",
    EnvironmentKind.gym: "hybridrl.environments.gym:gym",
    EnvironmentKind.verifiers: "hybridrl.environments.verifiers:verifiers",
}
"""Every kind: the function that makes it of the settings."""


def load_environment(
    config: EnvironmentConfig, sources: Mapping[str, SourceConfig] | None = None
) -> Environment:
    """The environment of `config`; runs a user's module. Raises ConfigError.

    `sources` are `data.sources`, whose datasets judge their own rows.
    """
    make = load_function("environment.kind", LOADERS[config.kind])
    environment: Environment = make(config, sources or {})
    return environment


def user_program(config: EnvironmentConfig, sources: Mapping[str, SourceConfig]) -> Environment:
    """kind=function: an async function, or a class."""
    loaded: Any = load_object(PATH, str(config.path), FORMS)
    if isinstance(loaded, type) and all(hasattr(loaded, name) for name in ("reset", "step")):
        check_arguments(loaded, (), config)
        return Environment(of_class(lambda: loaded(**config.params)))
    if not inspect.iscoroutinefunction(loaded):
        tools = "; a list of tools is environment=tools" if isinstance(loaded, list) else ""
        raise ConfigError(PATH, config.path, f"{FORMS}, not {type(loaded).__name__}{tools}")
    function: Callable[..., Any] = loaded
    check_arguments(function, ("task", "model", "rng"), config)

    async def program(task: EpisodeTask, model: Model, rng: Random) -> float | None:
        value: float | None = await function(task, model, rng, **config.params)
        return value

    return Environment(program)


def user_tools(config: EnvironmentConfig, sources: Mapping[str, SourceConfig]) -> Environment:
    """kind=tools: a list of functions."""
    functions: Any = load_object(PATH, str(config.path), "a list of functions")
    if not isinstance(functions, list | tuple) or not functions:
        what = "an empty one" if functions == [] else type(functions).__name__
        raise ConfigError(PATH, config.path, f"a list of functions, not {what}")
    read_params(config, {})
    return with_tools(functions, str(config.path))
