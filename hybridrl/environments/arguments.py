"""Checks of the arguments that a user's settings give to a program."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrl.config import ConfigError, EnvironmentConfig

PATH, PARAMS = "environment.path", "environment.params"


def check_arguments(
    function: Callable[..., Any], own: Sequence[str], config: EnvironmentConfig
) -> None:
    """Raise ConfigError where `function` does not take the arguments `own` and the params."""
    signature = inspect.signature(function)
    try:
        signature.bind(*own, **config.params)
    except TypeError as error:
        allowed = f"arguments of {signature} after {len(own)} of its own ({error})"
        raise ConfigError(PARAMS, dict(config.params), allowed) from error


def read_params(config: EnvironmentConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The params over their `defaults`, whose types they have. Raises ConfigError."""
    for name, value in config.params.items():
        if name not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            allowed = f"{known}, for environment.kind={config.kind.value}"
            raise ConfigError(PARAMS, name, allowed)
        kind = type(defaults[name])
        if not isinstance(value, (int, float) if kind is float else kind):
            raise ConfigError(f"{PARAMS}.{name}", value, f"a value like {defaults[name]!r}")
    return {**defaults, **config.params}
