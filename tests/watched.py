"""The server of `hybridrl watch` in a thread, for a browser."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from hybridrl.telemetry.watch import listen
from hybridrl.telemetry.watch_app import make_app
from hybridrl.telemetry.watched_run import WatchedRun


@contextlib.contextmanager
def served(run_dir: Path, token: str | None = None) -> Iterator[str]:
    """The address of a run that is watched."""
    with listen("127.0.0.1", 0) as server_socket:
        app = make_app(WatchedRun(run_dir), token, ["127.0.0.1"])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [server_socket]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server_socket.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
