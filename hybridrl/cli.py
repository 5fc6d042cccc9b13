"""`hybridrl train | eval | report`: the rest of the line is Hydra overrides."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.cluster import signals
from hybridrl.config import ConfigError

USAGE = """usage: hybridrl COMMAND [OVERRIDES]

  train    post-train a model by a recipe        hybridrl train --help
  eval     held-out accuracy of a model          hybridrl eval model.path=DIR data=...
  report   render a run's page                   hybridrl report RUN

A run ends with one JSON line on stdout. Errors a user can mend are one line on stderr, exit 2."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command line; exits the process."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": lambda rest: _run("train", rest),
        "eval": lambda rest: _run("evaluate_only", rest),
        "report": _report,
    }
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if args else 2)
    if args[0] not in commands:
        _fail(f"{args[0]}: wanted one of {', '.join(commands)}", 2)
    signals.install()
    try:
        commands[args[0]](args[1:])
    except ConfigError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", signals.exit_code())


def _run(action: str, args: list[str]) -> None:
    """Check the overrides, then let Hydra compose the config(s) and call the job for each."""
    import hydra
    from omegaconf import DictConfig

    from hybridrl.config import compose

    compose.register()
    compose.check_command_line(args)

    @hydra.main(version_base="1.3", config_path="pkg://hybridrl.conf", config_name="train")
    def job(composed: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        composed.run.dir = HydraConfig.get().runtime.output_dir
        try:
            _job(action, compose.to_config(composed))
        except ConfigError as error:
            _fail(str(error), 2)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    sys.argv = [f"hybridrl {'train' if action == 'train' else 'eval'}", *args]
    try:
        job()
    except OSError as error:  # Hydra makes the run directory
        allowed = f"a writable directory ({error.strerror})"
        raise ConfigError("run.dir", error.filename, allowed) from error


def _job(action: str, config: Any) -> None:
    started = time.time()
    where = f"the run directory is {config.run.dir}"
    try:
        from hybridrl.controller import job  # seconds, which belong to the run

        try:
            result = getattr(job, action)(config)
        except (job.WorkerError, job.TrainingStopped, OSError) as error:
            _fail(f"{error}; {where}", 1)
    except KeyboardInterrupt:
        _fail(f"interrupted; {where}", signals.exit_code())
    print(json.dumps({**result, "seconds": round(time.time() - started, 1)}), flush=True)


def _report(args: list[str]) -> None:
    from pathlib import Path

    from hybridrl.telemetry.report import render

    if len(args) != 1:
        _fail("report: wanted one run directory", 2)
    print(render(Path(args[0])))


def _fail(message: str, code: int) -> None:
    print(f"hybridrl: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
