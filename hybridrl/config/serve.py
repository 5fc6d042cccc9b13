"""The server of `hybridrl serve`: its address, its clients' rights, and how work takes turns."""

from dataclasses import dataclass

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class ServeConfig:
    """The training API over HTTP; `hybridrl serve` alone reads it."""

    host: str = "127.0.0.1"
    """The address to listen at. Others than loopback let every machine that reaches it try keys."""
    port: int = bounded(8000, least=0, most=65535)
    """The port to listen at; 0 is any that is free."""
    name: str | None = None
    """The name of the base model that clients ask for. Null: `model.path`."""
    idle_s: float = bounded(900.0, above=0)
    """Seconds without a sign of life after which a client's models are freed. Files stay."""
    patience_s: float = bounded(2.0, least=0)
    """Seconds that work of the other phase waits before training and generation change places."""
    snapshots: int = bounded(16, least=1)
    """Snapshots for sampling that are kept in memory. Beyond them those with files go first, then
    the least recently sampled ones."""
    largest_body: int = bounded(64 << 20, least=1 << 20)
    """Bytes of a request, of which clients send several for a large batch."""

    def check_unused(self, command: str) -> None:
        """Raise ConfigError where a setting differs from its default: `command` does not serve."""
        for name in self.__slots__:
            value, default = getattr(self, name), getattr(ServeConfig(), name)
            if value != default:
                raise ConfigError(f"serve.{name}", value, f"{default}, with hybridrl {command}")
