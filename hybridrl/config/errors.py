"""The one error that a user's input can cause."""

from collections.abc import Iterable


class ConfigError(ValueError):
    """A config value that cannot work: names the key, the value and what is allowed.

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
        return f"{self.key}={self.value}: wanted {self.allowed}"
