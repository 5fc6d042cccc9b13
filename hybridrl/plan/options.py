"""Options of `hybridrl plan`: how they are written, and their numbers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.config import ConfigError

_OVERRIDE = re.compile(r"[+~]{0,2}[\w./@]+=")
"""How an override begins. Values such as `gpu:model=8b` have a colon before the first `=`."""


def read_options(
    what: str,
    args: Sequence[str],
    numbers: Mapping[str, float],
    texts: Sequence[str] = (),
    below: int = 2**20,
) -> tuple[dict[str, Any], list[str]]:
    """The options of `hybridrl plan WHAT` that are there by name, and the other arguments.

    An option is `--name=value` or `--name value`. `numbers` has the least value of each option that
    is a number, a whole one where that is an int; all are `below` the last one. Raises ConfigError,
    also for an option with an option or an override in place of its value.
    """
    names = {option_name(name): name for name in (*texts, *numbers)}
    options: dict[str, Any] = {}
    rest = []
    left = iter(args)
    for arg in left:
        option, equals, text = arg.partition("=")
        if option not in names:
            rest.append(arg)
            continue
        if not equals:
            text = next(left, "")
            if not text or text.startswith("-") or _OVERRIDE.match(text):
                allowed = f"{option}=VALUE, as hybridrl plan {what} --help lists it"
                raise ConfigError(option, text, allowed)
        options[names[option]] = text
    for name in options.keys() & numbers.keys():
        options[name] = read_number(option_name(name), options[name], numbers[name], below)
    return options, rest


def option_name(name: str) -> str:
    """Example: `gpus_per_node` is `--gpus-per-node`."""
    return f"--{name.replace('_', '-')}"


def read_number(option: str, text: str, least: float, below: int = 2**20) -> float:
    """The number of an option such as `--nodes`; raises ConfigError. See `read_options`."""
    whole = isinstance(least, int)
    try:
        number: float = int(text) if whole else float(text)
    except ValueError:
        number = least - 1
    if not least <= number < below:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(option, text, f"{kind}, {least:g} or more")
    return number
