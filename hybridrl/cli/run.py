"""Runs of `train` and `eval`: overrides are checked, Hydra composes, the result is printed."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hybridrl.cli.output import fail, print_error, print_json
from hybridrl.config import Config, ConfigError
from hybridrl.preflight.settings import (
    check_command,
    check_config_files,
    check_model_settings,
    check_run_dir,
    check_startable,
)
from hybridrl.system import signals
from hybridrl.system.imports import imports_uncollected
from hybridrl.system.owned_folder import LOCK

Action = Callable[[Config], dict[str, Any]]
"""A run, from its config to the result that is printed."""


def run(command: str, action: Action, args: list[str]) -> None:
    """Check the overrides; Hydra then composes the configs and calls `job` for each.

    `command` is `train`, which begins or continues a training run, or `eval`.
    """
    import hydra
    from omegaconf import DictConfig

    check_config_files(args)
    from hybridrl.config import compose

    compose.register()
    args = compose.resolve_arguments(args)
    first = compose.check_command_line(args)
    new_parents: list[Path] = []
    if first is not None:  # Hydra makes the directory and writes into it before it calls the job
        check_model_settings(first)
        check_command(first, command)
        if command == "train":
            check_run_dir(first)
        new_parents = [path for path in Path(first.run.dir).absolute().parents if not path.exists()]

    @hydra.main(version_base="1.3", config_path="pkg://hybridrl.conf", config_name="train")
    def job(composed: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        composed.run.dir = HydraConfig.get().runtime.output_dir
        try:
            config = compose.to_config(composed)
            check_startable(config)
            if command == "train":
                check_run_dir(config)  # of a sweep
            _job(action, config)
        except ConfigError as error:
            _remove_refused(Path(composed.run.dir), new_parents)
            fail(str(error), 2)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    sys.argv = [f"hybridrl {command}", *args]
    try:
        job()
    except OSError as error:  # Hydra makes the run directory
        allowed = f"a writable directory ({error.strerror})"
        raise ConfigError("run.dir", error.filename, allowed) from error


def _remove_refused(run_dir: Path, new_parents: Sequence[Path]) -> None:
    """Remove the directory of a refused run, if it holds Hydra's notes and the tiny model alone.

    Its parents that were created for it, `new_parents`, go with it, innermost first.
    """
    if run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= {".hydra", "start", LOCK}:
        shutil.rmtree(run_dir, ignore_errors=True)
        for path in new_parents:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()


def _job(action: Action, config: Config) -> None:
    started = time.time()
    where = f"the run directory is {config.run.dir}"
    try:
        with imports_uncollected():
            from hybridrl.driver import train  # seconds, which belong to the run

        try:
            result = action(config)
        except train.RUN_ERRORS as error:
            died = isinstance(error, train.RayStartError | train.WorkerError) and error.died
            _end(f"{error}; {where}", 1, config if died else None)
    except KeyboardInterrupt as stopped:
        again = config if signals.time_is_up() else None
        _end(f"{str(stopped) or 'interrupted'}; {where}", signals.exit_code(), again)
    print_json({**result, "seconds": round(time.time() - started, 1)})


def _end(message: str, code: int, again: Config | None) -> NoReturn:
    """Print the reason and exit; a Slurm job that may start `again` is requeued first."""
    left = _restarts_left(again) if again else None
    if again and left is not None:
        number, most = again.cluster.requeue - left, again.cluster.requeue
        message += f"; the job starts again ({number + 1} of {most})" if left else ""
        message += "" if left else f"; all {most} restarts of cluster.requeue are used up"
    print_error(message)
    if left:
        from hybridrl.runtime import slurm
        from hybridrl.runtime.errors import JobError

        try:
            slurm.start_again()
        except JobError as error:
            fail(str(error), code)
    sys.exit(code)


def _restarts_left(config: Config) -> int | None:
    """How often this job may start again; None where it must not."""
    from hybridrl.runtime import slurm
    from hybridrl.runtime.errors import JobError

    try:
        return slurm.restarts_left(config.cluster)
    except JobError as error:  # Slurm does not answer, so it cannot start it again either
        print_error(str(error))
        return None
