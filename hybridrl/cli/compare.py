"""`hybridrl compare`: several runs side by side, as a table and as a page."""

import argparse
from pathlib import Path

from hybridrl.cli.output import print_json, print_table, refuse
from hybridrl.config import ConfigError


def compare(args: list[str]) -> None:
    """Print a table of runs and write a page."""
    from hybridrl.telemetry import compare as comparison
    from hybridrl.telemetry.rundata import load

    parser = argparse.ArgumentParser(
        prog="hybridrl compare", description="Runs side by side; seeds are joined."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="or a sweep's directory")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="the page")
    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_args(args)
    groups = comparison.grouped([load(run) for run in comparison.find_runs(options.runs)])
    print_table(list(zip(*comparison.table(groups), strict=True)))  # a column a group
    try:
        page = comparison.render(groups, options.out)
    except OSError as error:
        raise ConfigError("--out", options.out, f"a file to write ({error.strerror})") from None
    print_json({"page": str(page), "groups": comparison.record(groups)})
