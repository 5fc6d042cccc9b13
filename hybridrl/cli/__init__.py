"""`hybridrl train | eval | plan | submit | ...`: the rest of the line is Hydra overrides."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hybridrl.config import VALUE_MODELS, Config, ConfigError, SlurmClusterConfig
from hybridrl.system import signals
from hybridrl.system.imports import imports_uncollected
from hybridrl.telemetry.log import command_log
from hybridrl.telemetry.records import plain

Action = Callable[[Config], dict[str, Any]]
"""A run, from its config to the result that is printed."""
_WIDEST_TABLE = 1000  # columns of text

USAGE = """usage: hybridrl COMMAND [OVERRIDES]

  train    post-train a model by a recipe        hybridrl train --help
  eval     held-out accuracy of a model          hybridrl eval model.path=DIR data=...
           or of a run's checkpoints             hybridrl eval RUN --checkpoints all
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


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command line; exits the process."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": _train_or_check,
        "eval": _eval,
        "plan": _plan,
        "report": _report,
        "watch": _watch,
        "compare": _compare,
        "replay": partial(_inspect, "replay"),
        "blame": partial(_inspect, "blame"),
        "new-recipe": _new_recipe,
        "doctor": _doctor,
        "completion": _completion,
        **{name: partial(_job_command, name) for name in ("submit", "status", "logs", "cancel")},
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


def _train_or_check(args: list[str]) -> None:
    """Train, or with `--dry-run` check all that a run checks before a rank starts."""
    if "--dry-run" not in args:
        return _run(_train, args)
    from hybridrl.config import compose

    args = [arg for arg in args if arg != "--dry-run"]
    _check_config_files(args)
    compose.register()
    args = compose.resolve_arguments(args)
    if compose.check_command_line(args) is None:  # it only asks for information
        return _run(_train, args)
    configs = compose.runs_of(args)
    for config in configs:
        check_startable(config)
        check_run_dir(config)
    with imports_uncollected():
        from hybridrl.driver import train  # seconds
        from hybridrl.driver.dry_run import dry_run

    try:
        with command_log(configs[0].log.level):
            result = dry_run(configs)
    except train.RUN_ERRORS as error:
        _fail(str(error), 1)
    _print_json(result)


def _train(config: Config) -> dict[str, Any]:
    from hybridrl.driver.train import train

    return train(config)


def _evaluate(config: Config) -> dict[str, Any]:
    from hybridrl.driver.train import evaluate_only

    return evaluate_only(config)


def _eval(args: list[str]) -> None:
    """Evaluate a model, or checkpoints of a run."""
    if not args or "=" in args[0] or args[0].startswith("-"):
        return _run(_evaluate, args)
    from hybridrl.config import compose
    from hybridrl.config.stored_run import overrides_of
    from hybridrl.telemetry.rundata import checkpoints_of

    parser = argparse.ArgumentParser(prog="hybridrl eval", allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoints", default="final", help="all, final, or steps: 40,80")
    parser.error = _refuse  # type: ignore[method-assign]
    options, rest = parser.parse_known_args(args)
    compose.register()
    run_dir = options.run
    stored = overrides_of(run_dir, rest)
    checkpoints = checkpoints_of(run_dir, options.checkpoints)
    own_dir = run_dir / "evaluations" / time.strftime("%Y%m%d-%H%M%S")
    settings = [
        f"model.path='{next(iter(checkpoints.values()))}'",
        f"run.dir='{own_dir}'",
        *("warm_start.steps=0", "actor.lora.rank=0", "trainer.resume=never"),
    ]

    def evaluate(config: Config) -> dict[str, Any]:
        from hybridrl.driver.train import evaluate_checkpoints

        return evaluate_checkpoints(config, run_dir, checkpoints)

    _run(evaluate, [*stored, *settings, *rest])


def _run(action: Action, args: list[str]) -> None:
    """Check the overrides; Hydra then composes the configs and calls `job` for each."""
    import hydra
    from omegaconf import DictConfig

    _check_config_files(args)
    from hybridrl.config import compose

    compose.register()
    args = compose.resolve_arguments(args)
    first = compose.check_command_line(args)
    new_parents: list[Path] = []
    if first is not None:  # Hydra makes the directory and writes into it before it calls the job
        check_model_settings(first)
        if action is _train:
            check_run_dir(first)
        new_parents = [path for path in Path(first.run.dir).absolute().parents if not path.exists()]

    @hydra.main(version_base="1.3", config_path="pkg://hybridrl.conf", config_name="train")
    def job(composed: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        composed.run.dir = HydraConfig.get().runtime.output_dir
        try:
            config = compose.to_config(composed)
            check_startable(config)
            if action is _train:
                check_run_dir(config)  # of a sweep
            _job(action, config)
        except ConfigError as error:
            _remove_refused(Path(composed.run.dir), new_parents)
            _fail(str(error), 2)

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    sys.argv = [f"hybridrl {'train' if action is _train else 'eval'}", *args]
    try:
        job()
    except OSError as error:  # Hydra makes the run directory
        allowed = f"a writable directory ({error.strerror})"
        raise ConfigError("run.dir", error.filename, allowed) from error


def _check_config_files(args: Sequence[str]) -> None:
    """Raise ConfigError for a model on the command line that its `config.json` alone rules out.

    It comes before any heavy import; models that are named elsewhere are refused later.
    """
    from hybridrl.models.config_json import check_config_json

    for key, _, value in (arg.partition("=") for arg in args):
        if key.endswith((".path", ".model")):
            check_config_json(value.strip("'\""), key)


def check_startable(config: Config) -> None:
    """Raise ConfigError for a model that has no weights, or that its `config.json` rules out."""
    if config.model.shape and config.model.path is None:
        raise ConfigError("model.path", "null", "weights; model.shape is enough for plan")
    check_model_settings(config)


def check_model_settings(config: Config) -> None:
    """Raise ConfigError for settings that a model's `config.json` alone rules out."""
    from hybridrl.models.config_json import check_has_experts, check_layouts, check_value_layout

    check_has_experts(config.model.path, config.trainer)
    check_layouts(config.model, config.trainer.layout, config.rollout.layout)
    for role, name in VALUE_MODELS.items():
        settings = config.value_model_of(role)
        check_value_layout(settings.path, config.model, settings.layout, name)


def check_run_dir(config: Config) -> None:
    """Raise ConfigError where a training run would add its metrics to those of another."""
    metrics = Path(config.run.dir) / "metrics.jsonl"
    there = metrics.is_file() and metrics.stat().st_size > 0  # a run that did not get far has none
    if there and not config.trainer.resumes:
        allowed = "a directory without a run"
        if config.cluster.holds_models:
            allowed += ", or trainer.resume=auto to continue it"
        raise ConfigError("run.dir", config.run.dir, allowed)


def _remove_refused(run_dir: Path, new_parents: Sequence[Path]) -> None:
    """Remove the directory of a refused run, if it holds Hydra's notes and the tiny model alone.

    Its parents that were created for it, `new_parents`, go with it, innermost first.
    """
    if run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= {".hydra", "start"}:
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
            died = isinstance(error, train.RayStartError)
            died = died or (isinstance(error, train.WorkerError) and error.died)
            _fail(f"{error}; {where}", 1, config if died else None)
    except KeyboardInterrupt as stopped:
        again = config if signals.time_is_up() else None
        _fail(f"{str(stopped) or 'interrupted'}; {where}", signals.exit_code(), again)
    _print_json({**result, "seconds": round(time.time() - started, 1)})


def _plan(args: list[str]) -> None:
    """Plan a mapping, a switch, memory or schedules, for machines that need not be present."""
    if args[:1] == ["schedule"]:
        return _plan_schedule(args[1:])
    if args[:1] == ["auto"]:
        return _plan_auto(args[1:])
    from rich.console import Console
    from rich.table import Table

    from hybridrl.plan import memory_command

    if {"-h", "--help"} & set(args):
        print(memory_command.USAGE)
        return
    plan = memory_command.run(args)
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in plan.rows():
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(120, console.width)  # without a terminal it takes 80
    console.print(table)
    _print_json(plan.record())


def _plan_schedule(args: list[str]) -> None:
    """Replay response lengths under every schedule."""
    from rich.console import Console

    from hybridrl.planner import command

    if {"-h", "--help"} & set(args):
        print(command.USAGE)
        return
    with Console(stderr=True).status("replaying") as status:
        lines, remarks, record = command.run(
            args, lambda done, of: status.update(f"replaying: {done} of {of}")
        )
    _print_table(lines, remarks)
    _print_json(record)


def _plan_auto(args: list[str]) -> None:
    """Search a mapping of a recipe's roles to a cluster."""
    from rich.console import Console

    from hybridrl.plan import mapping_command

    if {"-h", "--help"} & set(args):
        print(mapping_command.USAGE)
        return
    with Console(stderr=True).status("searching") as status:
        report = mapping_command.run(
            args, lambda done, of: status.update(f"replayed {done} of {of} candidates at most")
        )
    _print_table(report.table(), report.remarks())
    _print_json(report.record())


def _print_table(lines: Sequence[tuple[str, ...]], remarks: Sequence[str]) -> None:
    """The first line is the header."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for name in lines[0]:
        table.add_column(name, no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    console = Console(highlight=False, soft_wrap=True)
    # A file has all of a line, a narrow terminal the start of each column.
    console.width = max(100, console.width) if console.is_terminal else _WIDEST_TABLE
    console.print(table)
    for remark in remarks:
        console.print(remark, markup=False)


def _report(args: list[str]) -> None:
    from hybridrl.telemetry.report import render

    if len(args) != 1:
        _fail("report: wanted one run directory", 2)
    print(render(Path(args[0])))


def _watch(args: list[str]) -> None:
    """Serve a run's page until Ctrl-C."""
    from hybridrl.telemetry import watch

    parser = argparse.ArgumentParser(
        prog="hybridrl watch",
        description="The page of a run, live, in a browser: also of a finished or copied one.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    parser.add_argument("--port", type=int, default=watch.PORT, help="0 is any free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="0.0.0.0 for other machines: the address has a token"
    )
    parser.error = _refuse  # type: ignore[method-assign]
    options = parser.parse_args(args)
    with contextlib.suppress(KeyboardInterrupt):  # this is how it ends
        watch.serve(
            options.run,
            options.host,
            options.port,
            lambda address: print(f"{options.run}: {address} (Ctrl-C ends it)", flush=True),
        )


def _compare(args: list[str]) -> None:
    """Print a table of runs and write a page."""
    from rich.console import Console
    from rich.table import Table

    from hybridrl.telemetry import compare
    from hybridrl.telemetry.rundata import load

    parser = argparse.ArgumentParser(
        prog="hybridrl compare", description="Runs side by side; seeds are joined."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="or a sweep's directory")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="the page")
    parser.error = _refuse  # type: ignore[method-assign]
    options = parser.parse_args(args)
    groups = compare.grouped([load(run) for run in compare.find_runs(options.runs)])
    header, *lines = zip(*compare.table(groups), strict=True)  # a column a group
    table = Table(box=None, pad_edge=False, header_style="")
    for name in header:
        table.add_column(name, no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(120, console.width)  # without a terminal it takes 80
    console.print(table)
    try:
        page = compare.render(groups, options.out)
    except OSError as error:
        raise ConfigError("--out", options.out, f"a file to write ({error.strerror})") from None
    _print_json({"page": str(page), "groups": compare.record(groups)})


def _inspect(command: str, args: list[str]) -> None:
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
        _fail(str(error), 1)
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
    _print_json(result.record)
    sys.exit(0 if result.equal else 1)


def _doctor(args: list[str]) -> None:
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
            _fail(str(error), 1)
        print(output, end="")
        sys.exit(code)
    with command_log(config.log.level), Console(stderr=True).status("looking around"):
        report = command.examine(config, command.existing(run_dir), links is not None)
        if links is not None:
            command.write_links(report, links)
    if "--json" in args:
        _print_json(report.record())
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.width = max(120, console.width)  # without a terminal it takes 80
        console.print(command.shown(report))
    sys.exit(0 if report.works else 1)


def _new_recipe(args: list[str]) -> None:
    """Copy a recipe of the package into the working directory."""
    from hybridrl.config.recipe_folder import new_recipe

    parser = argparse.ArgumentParser(
        prog="hybridrl new-recipe", description="Copy a recipe of the package, to change it."
    )
    parser.add_argument("name", metavar="NAME", help="the new folder and its function")
    parser.add_argument("--from", dest="source", required=True, help="a recipe of the package")
    parser.error = _refuse  # type: ignore[method-assign]
    options = parser.parse_args(args)
    folder = new_recipe(options.name, options.source, Path.cwd())
    print(f"{folder}; to run it: hybridrl train recipe=./{folder.name}")


def _completion(args: list[str]) -> None:
    """Print a shell's script, or, after `--`, what the last word may become."""
    from hybridrl.config import completion

    if args[:1] == ["--"]:
        print(*completion.complete(args[1:]), sep="\n")
    else:
        print(completion.script(" ".join(args)), end="")


def _job_command(command: str, args: list[str]) -> None:
    """Run one of submit, status, logs and cancel."""
    from hybridrl.jobs import commands
    from hybridrl.runtime.errors import JobError

    if command != "submit" and {"-h", "--help"} & set(args):
        print(USAGE)
        return
    of_jobs = {
        "submit": commands.submit,
        "status": commands.status,
        "logs": commands.logs,
        "cancel": commands.cancel,
    }
    try:
        for line in of_jobs[command](args):
            print(line, flush=True)
    except JobError as error:
        _fail(str(error), 1)
    except BrokenPipeError:  # the reader has closed the pipe: hybridrl logs RUN | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(record: Any) -> None:
    """The last line of a command: strict JSON, so numbers that are not finite are texts."""
    print(json.dumps(plain(record), allow_nan=False), flush=True)


def _refuse(message: str) -> NoReturn:
    allowed = message.removeprefix("the following arguments are required: ")
    raise ConfigError("arguments", " ".join(sys.argv[1:]), allowed)


def _fail(message: str, code: int, again: Config | None = None) -> NoReturn:
    """Print the reason and exit; a Slurm job that may start `again` is requeued first."""
    left = _restarts_left(again) if again else None
    if again and left is not None:
        number, most = again.cluster.requeue - left, again.cluster.requeue
        message += f"; the job starts again ({number + 1} of {most})" if left else ""
        message += "" if left else f"; all {most} restarts of cluster.requeue are used up"
    print(f"hybridrl: {' '.join(message.split())}", file=sys.stderr, flush=True)
    if left:
        from hybridrl.runtime import slurm
        from hybridrl.runtime.errors import JobError

        try:
            slurm.start_again()
        except JobError as error:
            _fail(str(error), code)
    sys.exit(code)


def _restarts_left(config: Config) -> int | None:
    """How often this job may start again; None where it must not."""
    from hybridrl.runtime import slurm
    from hybridrl.runtime.errors import JobError

    try:
        return slurm.restarts_left(config.cluster)
    except JobError as error:  # Slurm does not answer, so it cannot start it again either
        print(f"hybridrl: {error}", file=sys.stderr, flush=True)
        return None


if __name__ == "__main__":
    main()
