"""`hybridrl doctor`: problems of a run on these nodes."""

import sys
from pathlib import Path

from hybridrl.cli.output import fail, print_json
from hybridrl.config import ConfigError, SlurmClusterConfig
from hybridrl.telemetry.log import command_log


def doctor(args: list[str]) -> None:
    """Examine the nodes of a run and print the problems found."""
    from rich.console import Console

    from hybridrl.config import compose
    from hybridrl.doctor import command
    from hybridrl.jobs import commands
    from hybridrl.runtime.errors import JobError

    if {"-h", "--help"} & set(args):
        print(command.USAGE)
        return
    compose.register()
    outs = [arg.removeprefix("--links=") for arg in args if arg.startswith("--links=")]
    links = Path(outs[-1]) if outs else None
    if links is not None and not links.parent.is_dir():
        raise ConfigError("--links", str(links), "a file in a directory that is there")
    others = [arg for arg in args if arg != "--json" and not arg.startswith("--links=")]
    options = compose.parse_arguments(compose.resolve_arguments(others))
    config = compose.check(options.overrides, options.config_dir)
    run_dir = Path(config.run.dir)
    if isinstance(config.cluster, SlurmClusterConfig) and not command.inside_a_job():
        try:
            with command_log(config.log.level):
                output, code = commands.examine_nodes(
                    config.cluster, command.existing(run_dir), args
                )
        except JobError as error:
            fail(str(error), 1)
        print(output, end="")
        sys.exit(code)
    with command_log(config.log.level), Console(stderr=True).status("looking around"):
        report = command.examine(config, command.existing(run_dir), links is not None)
        if links is not None:
            command.write_links(report, links)
    if "--json" in args:
        print_json(report.record())
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.width = max(120, console.width)  # without a terminal it takes 80
        console.print(command.shown(report))
    sys.exit(0 if report.works else 1)
