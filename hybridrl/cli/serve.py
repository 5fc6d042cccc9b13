"""`hybridrl serve`: Tinker's training API, until a signal ends it."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from hybridrl.cli.output import fail
from hybridrl.preflight.settings import check_config_files
from hybridrl.system.imports import imports_uncollected

HELP = """usage: hybridrl serve [OVERRIDES]

Tinker's training API over HTTP: a client's loop takes the place of a recipe.

  hybridrl serve model=pretrained model.path=DIR actor.lora.rank=32 cluster.ranks=8
  hybridrl serve model.path=DIR actor.lora.rank=0 serve.port=0    (all weights; any free port)

It prints its address and the line that a client's shell needs. Ctrl-C and SIGTERM end it. The
settings are those of `hybridrl train`, less recipe, data and judges; `serve.*` are its own."""


def serve(args: list[str]) -> None:
    """Serve until Ctrl-C or SIGTERM, or until a rank dies."""
    if "-h" in args or "--help" in args:
        print(HELP)
        return
    check_config_files(args)
    with imports_uncollected():
        from hybridrl.driver.train import RUN_ERRORS  # seconds
        from hybridrl.serving.start import serving
    line = None
    try:
        # An interrupt is how it ends.
        with _own_output() as output, serving(args) as server, suppress(KeyboardInterrupt):
            print("\n".join(server.lines()), file=output, flush=True)
            line = server.failure.result()
    except RUN_ERRORS as error:
        fail(str(error), 1)
    if line is not None:
        fail(line, 1)


@contextmanager
def _own_output() -> Iterator[TextIO]:
    """Within, this is standard output; what others print to it goes to standard error.

    A rank may be this process, and its libraries print past Python: vLLM's, from C++.
    """
    with os.fdopen(os.dup(1), "w") as output:
        _flush()
        os.dup2(2, 1)
        try:
            yield output
        finally:
            _flush()
            os.dup2(output.fileno(), 1)


def _flush() -> None:
    """Write what Python and C have buffered for standard output to where it now goes."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
