"""The server of a training API: its address, its key, its idle clients, and its end."""

import asyncio
import logging
import os
import secrets
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from aiohttp import web

from hybridrl.config import ConfigError, ServeConfig
from hybridrl.serving.futures import POLL_S
from hybridrl.serving.records import RecordRoutes
from hybridrl.serving.requests import ServeBackend
from hybridrl.serving.routes import Api
from hybridrl.serving.sessions import Sessions
from hybridrl.telemetry.watch import is_loopback, listen

logger = logging.getLogger(__name__)

HEARTBEAT_S = 10
"""Seconds between the signs of life of Tinker's SDK."""
KEY_FILE = "api_key"
GRACE_S = 5.0
"""Seconds that answers under way have at the end of the server."""


def read_key(run_dir: Path) -> str:
    """The key of a run's server, which is made once and kept in a file of mode 600.

    Raises ConfigError for a file that others may read, or that has no key.
    """
    path = run_dir / KEY_FILE
    with suppress(FileExistsError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as written:
            written.write(f"tml-{secrets.token_hex(16)}")  # the prefix that the SDK wants
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(str(path), oct(mode), "mode 600: others can read the key; delete it")
    key = path.read_text().strip()
    if not key.startswith("tml-") or len(key) < 20:
        raise ConfigError(str(path), f"{len(key)} characters", "a key tml-...; delete it")
    return key


class Server:
    """A training API over HTTP, from `start` to `close`.

    `failure` becomes the line of what ended it; any thread may wait for it.
    """

    def __init__(
        self,
        settings: ServeConfig,
        backend: ServeBackend,
        key: str,
        bound: socket.socket,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        """`bound` is a socket that listens at `settings.host`; see `listener`."""
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{host}:{bound.getsockname()[1]}"
        self.key = key
        self.failure: Future[str] = Future()
        self.api = Api(
            backend,
            key,
            largest_body=settings.largest_body,
            on_failure=self._fail,
            sessions=Sessions(),
            poll_s=poll_s,
        )
        self._settings = settings
        self._backend = backend
        self._bound = bound
        self._runner: web.AppRunner | None = None
        self._watch: asyncio.Task[None] | None = None

    def lines(self) -> tuple[str, str]:
        """What a user is told: what is served where, and what a client's shell needs."""
        info = self.api.backend.info
        weights = f"LoRA, rank {info.lora_rank}" if info.lora_rank else "all weights"
        return (
            f"serving {info.name} at {self.url} ({weights}; at most {info.max_tokens} tokens)",
            f"export TINKER_BASE_URL={self.url} TINKER_API_KEY={self.key}",
        )

    async def start(self) -> None:
        """Answer requests from now on."""
        app = web.Application(middlewares=[self.api.guard])
        app.add_routes([*self.api.routes(), *RecordRoutes(self.api).routes()])
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._bound).start()
        self._watch = asyncio.create_task(self._end_silent_clients())
        loop = asyncio.get_running_loop()
        self._backend.failure.add_done_callback(
            lambda failure: loop.call_soon_threadsafe(self.api.fail, failure.result())
        )

    async def close(self) -> None:
        """End: the running call ends, what is done is answered, the rest fails with a line."""
        if self._watch is not None:
            self._watch.cancel()
        self.api.refuse_new("the server ends")
        try:
            await self._backend.close()
        finally:
            self.api.futures.fail_all("the server has ended")
            if self._runner is not None:
                await self._runner.cleanup()  # after the long polls have told their clients
            await self.api.futures.close()

    def _fail(self, line: str) -> None:
        if not self.failure.done():
            self.failure.set_result(line)

    async def _end_silent_clients(self) -> None:
        idle_s = self._settings.idle_s
        if idle_s < 2 * HEARTBEAT_S:
            told = f"clients give a sign of life every {HEARTBEAT_S} s, and may lose their models"
            logger.warning("serve.idle_s=%g: %s", idle_s, told)
        while True:
            await asyncio.sleep(min(5.0, idle_s / 4))
            self.api.end_silent(idle_s)


def listener(settings: ServeConfig) -> socket.socket:
    """A socket that listens at the settings' address. Raises ConfigError where there can be none.

    It is bound before a rank starts, so that a port that is taken is refused at once.
    """
    if not is_loopback(settings.host):
        told = "whoever reaches it can try keys, and nothing is encrypted"
        logger.warning("serve.host=%s: %s", settings.host, told)
    return listen(settings.host, settings.port, keys=("serve.host", "serve.port"))


@contextmanager
def in_thread(
    settings: ServeConfig, backend: ServeBackend, key: str, bound: socket.socket
) -> Iterator[Server]:
    """A server in a thread of this process, until the end of the block.

    The end waits for the call that runs. An exception meanwhile, a second signal's say, cuts it
    short, and no thread keeps the process.
    """
    server = Server(settings, backend, key, bound)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # cancels what is left
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever, name="hybridrl-serve", daemon=True)
        try:
            thread.start()
            asyncio.run_coroutine_threadsafe(server.start(), loop).result()
            yield server
        finally:
            if thread.is_alive():
                try:
                    asyncio.run_coroutine_threadsafe(server.close(), loop).result()
                finally:
                    loop.call_soon_threadsafe(loop.stop)
                    thread.join()
