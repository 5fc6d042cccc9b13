"""`hybridrl serve`: Tinker's training API, until a signal ends it."""

from contextlib import suppress

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
        with serving(args) as server, suppress(KeyboardInterrupt):  # this is how it ends
            print("\n".join(server.lines()), flush=True)
            line = server.failure.result()
    except RUN_ERRORS as error:
        fail(str(error), 1)
    if line is not None:
        fail(line, 1)
