"""The one error that a user's input can cause."""

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A config value that cannot work: names the key, its value and the allowed values.

    The command line prints it as one line and exits with 2; nothing has been started by then.
    """

    def __init__(self, key: str, value: object, allowed: str | Iterable[object]) -> None:
        self.key = key
        self.value = value
        self.allowed = (
            allowed if isinstance(allowed, str) else "one of " + ", ".join(map(str, allowed))
        )
        super().__init__(key, value, self.allowed)

    def __str__(self) -> str:
        told = f"{self.key}={self.value}: wanted {self.allowed}"
        return told.replace("\n", "\\n").replace("\r", "\\r")  # names of a row's fields, too


class RenamedKeyError(ConfigError):
    """A key that has another name now, `allowed`."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}: renamed, now {self.allowed}"


def names(wrong: str, known: Sequence[str]) -> str:
    """`one of a, b, c`, with a hint where `wrong` looks like one of them."""
    close = difflib.get_close_matches(wrong, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return "one of " + ", ".join(sorted(known)) + hint
