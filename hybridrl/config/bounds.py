"""What numbers a setting may have: finite ones, within the bounds that its field declares."""

import math
import operator
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from hybridrl.config.errors import ConfigError

T = TypeVar("T")

_LIMITS = {
    "least": (operator.ge, "{:g} or more"),
    "above": (operator.gt, "above {:g}"),
    "most": (operator.le, "at most {:g}"),
    "below": (operator.lt, "below {:g}"),
}


def bounded(default: T, **limits: float) -> T:
    """The field of a recipe's dataclass with a `default`, whose value keeps within `limits`.

    These are some of `least`, `above`, `most` and `below`; null passes where the type has it.

        clip: float = bounded(0.2, least=0, most=1)
        reference_ema_decay: float | None = bounded(None, above=0, below=1)
    """
    assert limits.keys() <= _LIMITS.keys(), limits
    made: T = field(default=default, metadata={"limits": limits})
    return made


def check_bounds(settings: Any, key: str) -> None:
    """Raise ConfigError for the first setting that is out of the bounds of its field.

    `settings` is a dataclass, `key` where it stands; those in it follow.
    """
    values = {setting.name: getattr(settings, setting.name) for setting in fields(settings)}
    check_values(type(settings), values, key)
    for name, value in values.items():
        inner = value if isinstance(value, dict) else {}
        for path, part in [(name, value), *((f"{name}.{k}", v) for k, v in inner.items())]:
            if is_dataclass(part):
                check_bounds(part, f"{key}.{path}")


def check_values(kind: type, values: Mapping[str, Any], key: str) -> None:
    """As `check_bounds`, for the `values` of the dataclass `kind` before it is made."""
    hints = get_type_hints(kind)
    for setting in fields(kind):
        limits, value = setting.metadata.get("limits", {}), values[setting.name]
        if value is not None and not all(_LIMITS[k][0](value, x) for k, x in limits.items()):
            null = ", or null" if NoneType in get_args(hints[setting.name]) else ""
            raise ConfigError(f"{key}.{setting.name}", value, _words(limits) + null)


def check_at_least(settings: Any, name: str, other: str) -> None:
    """Raise ConfigError where a recipe's setting `name` is below its setting `other`."""
    value, least = getattr(settings, name), getattr(settings, other)
    if value < least:
        raise ConfigError(f"recipe.{name}", value, f"recipe.{other}={least} or more")


def _words(limits: Mapping[str, float]) -> str:
    if limits.keys() == {"least", "most"}:
        return "{least:g} to {most:g}".format(**limits)
    return " and ".join(words.format(limits[k]) for k, (_, words) in _LIMITS.items() if k in limits)


def check_finite(values: Any, key: str = "") -> None:
    """Raise ConfigError for a number in `values`, settings as plain containers, that is not finite.

    `key` is where they stand. Where a setting may have no value, that is null.
    """
    if isinstance(values, float) and not math.isfinite(values):
        raise ConfigError(key, values, "a finite number")
    if isinstance(values, dict):
        for name, value in values.items():
            check_finite(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        for value in values:
            check_finite(value, key)
