"""Options of `hybridrl plan`: how they are written, and their numbers."""

from hybridrl.config import ConfigError


def option_name(name: str) -> str:
    """Example: `gpus_per_node` is `--gpus-per-node`."""
    return f"--{name.replace('_', '-')}"


def read_number(option: str, text: str, least: float, *, whole: bool, below: int) -> float:
    """The number of an option such as `--nodes`; raises ConfigError."""
    try:
        number: float = int(text) if whole else float(text)
    except ValueError:
        number = least - 1
    if not least <= number < below:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(option, text, f"{kind}, {least:g} or more")
    return number
