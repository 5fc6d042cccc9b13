"""`hybridrl train`, and with `--dry-run` its checks alone."""

from typing import Any

from hybridrl.cli.output import fail, print_json
from hybridrl.cli.run import run
from hybridrl.config import Config
from hybridrl.preflight.settings import check_config_files, check_run_dir, check_startable
from hybridrl.system.imports import imports_uncollected
from hybridrl.telemetry.log import command_log


def train(args: list[str]) -> None:
    """Train, or with `--dry-run` check all that a run checks before a rank starts."""
    if "--dry-run" not in args:
        return run("train", _train, args)
    from hybridrl.config import compose

    args = [arg for arg in args if arg != "--dry-run"]
    check_config_files(args)
    compose.register()
    args = compose.resolve_arguments(args)
    if compose.check_command_line(args) is None:  # it only asks for information
        return run("train", _train, args)
    configs = compose.runs_of(args)
    for config in configs:
        check_startable(config)
        check_run_dir(config)
    with imports_uncollected():
        from hybridrl.driver import train as runs  # seconds
        from hybridrl.driver.dry_run import dry_run

    try:
        with command_log(configs[0].log.level):
            result = dry_run(configs)
    except runs.RUN_ERRORS as error:
        fail(str(error), 1)
    print_json(result)


def _train(config: Config) -> dict[str, Any]:
    from hybridrl.driver.train import train

    return train(config)
