"""`hybridrl replay` and `hybridrl blame`: a step again, and where two runs first differ."""

import sys

from hybridrl.cli.output import fail, print_json
from hybridrl.system.imports import imports_uncollected


def inspect(command: str, args: list[str]) -> None:
    """Run `replay` or `blame`: a table, a line of JSON, exit 1 where runs differ."""
    from rich.console import Console
    from rich.table import Table

    with imports_uncollected():
        from hybridrl.driver import train
        from hybridrl.replay import commands as replay_commands

    inspections = {"replay": replay_commands.replay, "blame": replay_commands.blame}
    try:
        result = inspections[command](args)
    except train.RUN_ERRORS as error:
        fail(str(error), 1)
    table = Table(box=None, pad_edge=False, header_style="")
    for name in result.rows[0] if result.rows else ():
        table.add_column(name, no_wrap=name != "compared")  # which may be long; names stay whole
    for row in result.rows[1:]:
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True, markup=False)  # texts may have brackets
    console.width = max(120, console.width)  # without a terminal it takes 80
    for line in result.lines:
        console.print(line)
    console.print(table)
    print_json(result.record)
    sys.exit(0 if result.equal else 1)
