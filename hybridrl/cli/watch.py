"""`hybridrl watch`: a run's page live, in a browser."""

import argparse
import contextlib
from pathlib import Path

from hybridrl.cli.output import refuse


def watch(args: list[str]) -> None:
    """Serve a run's page until Ctrl-C."""
    from hybridrl.telemetry.watch import PORT, serve

    parser = argparse.ArgumentParser(
        prog="hybridrl watch",
        description="The page of a run, live, in a browser: also of a finished or copied one.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--port", type=int, default=PORT, help="0 is any free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 for other machines: the address has a token"
    )
    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_args(args)
    with contextlib.suppress(KeyboardInterrupt):  # this is how it ends
        serve(
            options.run,
            options.host,
            options.port,
            lambda address: print(f"{options.run}: {address} (Ctrl-C ends it)", flush=True),
        )
