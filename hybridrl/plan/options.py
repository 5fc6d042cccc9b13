"""Options of `hybridrl plan`: how they are written, and their numbers."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hybridrl.config import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Argparse's own error is several lines."""
        raise ConfigError("option", message, "--name=value, as hybridrl plan --help lists it")


def read_options(
    args: Sequence[str],
    numbers: Mapping[str, float],
    texts: Sequence[str] = (),
    below: int = 2**20,
) -> tuple[dict[str, Any], list[str]]:
    """The options that are there by name, and the other arguments.

    `numbers` has the least value of each option that is a number, a whole one where that is an
    int; all are `below` the last one. Raises ConfigError.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in (*texts, *numbers):
        parser.add_argument(option_name(name))
    known, rest = parser.parse_known_args(list(args))
    options: dict[str, Any] = {n: text for n, text in vars(known).items() if text is not None}
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
