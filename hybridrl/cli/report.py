"""`hybridrl report`: a run's page as one file."""

from pathlib import Path

from hybridrl.cli.output import fail


def report(args: list[str]) -> None:
    """Write the page of a run and print its path."""
    from hybridrl.telemetry.report import render

    if len(args) != 1:
        fail("report: wanted one run directory", 2)
    print(render(Path(args[0])))
