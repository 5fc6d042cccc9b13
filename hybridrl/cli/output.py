"""What commands print: tables, one line of JSON, and one line for an error."""

import json
import sys
from collections.abc import Container, Sequence
from typing import Any, NoReturn

from hybridrl.config import ConfigError
from hybridrl.telemetry.records import plain

_WIDEST_TABLE = 1000  # columns of text

USAGE = """usage: hybridrl COMMAND [OVERRIDES]

  train    post-train a model by a recipe        hybridrl train --help
  eval     held-out accuracy of a model          hybridrl eval model.path=DIR data=...
           or of a run's checkpoints             hybridrl eval RUN --checkpoints all
  serve    Tinker's training API                 hybridrl serve --help
  plan     mapping, memory, schedule, on paper   hybridrl plan auto --help
  report   render a run's page                   hybridrl report RUN
  watch    the same page live, and all samples   hybridrl watch RUN [--port=6007]
  compare  several runs, seeds joined            hybridrl compare RUN RUN ...
  replay   a step of a run again                 hybridrl replay RUN --step N
  blame    where two runs first differ           hybridrl blame RUN RUN
  new-recipe  copy a recipe to change it         hybridrl new-recipe NAME --from=grpo
  submit   a run as a job of Slurm or of Ray     hybridrl submit --help
  status, logs [-f], cancel                      of submitted runs: hybridrl status [RUN|JOB]
  doctor   problems of a run on these nodes      hybridrl doctor --help
  completion  TAB in your shell                  eval "$(hybridrl completion bash|zsh|fish)"

A run or a plan ends with one JSON line on stdout. Errors a user can mend are one line on stderr,
exit 2."""


def print_table(
    rows: Sequence[Sequence[str]], remarks: Sequence[str] = (), *, wraps: Container[int] = ()
) -> None:
    """Print rows, the first of which is the header, and remarks below them.

    On a terminal the columns of `wraps` take several lines, and the others lose their end.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for number in range(len(rows[0]) if rows else 0):
        table.add_column(no_wrap=number not in wraps)
    for row in rows:
        table.add_row(*row)
    # Texts may have brackets. A file has all of a line.
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.width = max(100, console.width) if console.is_terminal else _WIDEST_TABLE
    console.print(table)
    for remark in remarks:
        print(remark)


def print_json(record: Any) -> None:
    """The last line of a command: strict JSON, so numbers that are not finite are texts."""
    print(json.dumps(plain(record), allow_nan=False), flush=True)


def refuse(message: str) -> NoReturn:
    """Raise ConfigError for arguments that a parser refuses."""
    allowed = message.removeprefix("the following arguments are required: ")
    raise ConfigError("arguments", " ".join(sys.argv[1:]), allowed)


def fail(message: str, code: int) -> NoReturn:
    """Print the reason and exit."""
    print_error(message)
    sys.exit(code)


def print_error(message: str) -> None:
    """Print a reason as one line on stderr."""
    print(f"hybridrl: {' '.join(message.split())}", file=sys.stderr, flush=True)
