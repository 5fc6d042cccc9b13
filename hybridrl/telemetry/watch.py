"""`hybridrl watch`: the report page of a run, live, and its samples to search.

The server reads the files of one run directory and writes none, so the run may be running,
finished, or copied from elsewhere. No request names a path.
"""

import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from hybridrl.config.errors import ConfigError
from hybridrl.telemetry.watched_run import WatchedRun

PORT = 6007


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int, keys: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """A listening socket; raises ConfigError with one of `keys` where there can be none."""
    host_key, port_key = keys
    if not 0 <= port <= 65535:
        raise ConfigError(port_key, port, "0 (any free port) to 65535")
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            host_key, host, f"an address of this machine ({error.strerror})"
        ) from None
    try:
        both = family == socket.AF_INET6 and _is_unspecified(
            str(address[0])
        )  # names are IPv4's, too
        return socket.create_server(
            address[:2], family=family, dualstack_ipv6=both and socket.has_dualstack_ipv6()
        )
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(host_key, host, "an address of this machine") from None
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(port_key, port, "a free port: another program has it") from None
        raise ConfigError(
            port_key, port, f"a free port ({os.strerror(error.errno or 0)})"
        ) from None


def serve(run_dir: Path, host: str, port: int, started: Callable[[str], None]) -> None:
    """Serve until a signal comes; `started` is called with the address once it answers.

    A host that others reach gets a random token, which is in the address. Raises ConfigError for a
    directory, a host or a port that cannot be.
    """
    import uvicorn

    from hybridrl.telemetry.watch_app import make_app

    run = WatchedRun(run_dir)
    with listen(host, port) as server_socket:
        token = None if is_loopback(host) else secrets.token_urlsafe(16)
        hosts = ("*",) if token else ("localhost", "127.0.0.1", "::1", "[::1]", host)
        name = host if token is None else _reachable(host)
        shown = f"[{name}]" if ":" in name else name
        address = f"http://{shown}:{server_socket.getsockname()[1]}/"
        started(f"{address}?token={token}" if token else address)
        app = make_app(run, token, hosts)
        config = uvicorn.Config(
            app, log_level="error", access_log=False, timeout_graceful_shutdown=10
        )
        uvicorn.Server(config).run(sockets=[server_socket])


def _reachable(host: str) -> str:
    """The name for others' browsers of an address that may stand for all of this machine's."""
    return socket.gethostname() if _is_unspecified(host) else host


def _is_unspecified(host: str) -> bool:
    """Whether `host` stands for all addresses of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
