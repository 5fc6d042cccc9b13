"""`hybridrl train | eval | plan | submit | ...`: one file a command.

Start from `main`. The rest of a command's line is Hydra overrides.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from hybridrl.cli.compare import compare
from hybridrl.cli.completion import completion
from hybridrl.cli.doctor import doctor
from hybridrl.cli.eval import evaluate
from hybridrl.cli.jobs import job_command
from hybridrl.cli.new_recipe import new_recipe
from hybridrl.cli.output import USAGE, fail
from hybridrl.cli.plan import plan
from hybridrl.cli.replay import blame, inspect, replay
from hybridrl.cli.report import report
from hybridrl.cli.serve import serve
from hybridrl.cli.train import train
from hybridrl.cli.watch import watch
from hybridrl.config import ConfigError
from hybridrl.system import signals


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command line; exits the process."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": train,
        "eval": evaluate,
        "serve": serve,
        "plan": plan,
        "report": report,
        "watch": watch,
        "compare": compare,
        "replay": partial(inspect, replay),
        "blame": partial(inspect, blame),
        "new-recipe": new_recipe,
        "doctor": doctor,
        "completion": completion,
        **{name: partial(job_command, name) for name in ("submit", "status", "logs", "cancel")},
    }
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if args else 2)
    if args[0] not in commands:
        fail(f"{args[0]}: wanted one of {', '.join(commands)}", 2)
    signals.install()
    try:
        commands[args[0]](args[1:])
    except ConfigError as error:
        fail(str(error), 2)
    except KeyboardInterrupt:
        fail("interrupted", signals.exit_code())
