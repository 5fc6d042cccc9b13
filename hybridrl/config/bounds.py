"""Numbers that a setting may have: finite ones, within the bounds that its field declares."""

import math
import operator
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from hybridrl.config.errors import ConfigError

T = TypeVar("T")

_KEEPS = {
    "least": operator.ge,
    "above": operator.gt,
    "most": operator.le,
    "below": operator.lt,
}
_WORDS = {
    ("least",): "{least:g} or more",
    ("above",): "above {above:g}",
    ("most",): "at most {most:g}",
    ("below",): "below {below:g}",
    ("least", "most"): "{least:g} to {most:g}",
    ("least", "below"): "{least:g} to below {below:g}",
    ("above", "most"): "above {above:g}, at most {most:g}",
    ("above", "below"): "above {above:g} and below {below:g}",
}


def bounded(default: T, *, allowed: str | None = None, **limits: float) -> T:
    """A field of a config or recipe dataclass, whose value keeps within `limits`.

    These are a lower limit (`least` or `above`), an upper one (`most` or `below`), or both, in this
    order. Null passes where the type has it. An error says `allowed` in place of the limits.

        clip: float = bounded(0.2, least=0, most=1)
        reference_ema_decay: float | None = bounded(None, above=0, below=1)
        temperature: float = bounded(1.0, least=0, allowed="0 (greedy) or above")
    """
    words = allowed or _WORDS[tuple(limits)].format(**limits)
    setting: T = field(default=default, metadata={"limits": limits, "allowed": words})
    return setting


def check_bounds(settings: Any, key: str = "") -> None:
    """Raise ConfigError for the first setting that is out of the bounds of its field.

    `settings` is a dataclass, `key` its place; the dataclasses in it follow.
    """
    values = {setting.name: getattr(settings, setting.name) for setting in fields(settings)}
    check_values(type(settings), values, key)
    for name, value in values.items():
        entries = value if isinstance(value, dict) else {}
        for path, inner in [(name, value), *((f"{name}.{k}", v) for k, v in entries.items())]:
            if is_dataclass(inner):
                check_bounds(inner, _below(key, path))


def check_values(kind: type, values: Mapping[str, Any], key: str) -> None:
    """As `check_bounds`, for the `values` of a dataclass `kind` that is not built yet."""
    hints = get_type_hints(kind)
    for setting in fields(kind):
        limits, value = setting.metadata.get("limits", {}), values[setting.name]
        if value is not None and not all(_KEEPS[k](value, x) for k, x in limits.items()):
            null = ", or null" if NoneType in get_args(hints[setting.name]) else ""
            allowed = setting.metadata["allowed"] + null
            raise ConfigError(_below(key, setting.name), value, allowed)


def check_at_least(settings: Any, name: str, other: str) -> None:
    """Raise ConfigError where a recipe's setting `name` is below its setting `other`."""
    value, least = getattr(settings, name), getattr(settings, other)
    if value < least:
        raise ConfigError(f"recipe.{name}", value, f"recipe.{other}={least} or more")


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def check_finite(values: Any, key: str = "") -> None:
    """Raise ConfigError for a number in `values`, settings as plain containers, that is not finite.

    `key` is their place. A setting without a value has null.
    """
    if isinstance(values, float) and not math.isfinite(values):
        raise ConfigError(key, values, "a finite number")
    if isinstance(values, dict):
        for name, value in values.items():
            check_finite(value, _below(key, str(name)))
    elif isinstance(values, list):
        for value in values:
            check_finite(value, key)
