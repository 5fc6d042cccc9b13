"""`hybridrl eval`: a model, or checkpoints of a run, on held-out prompts."""

import argparse
import time
from pathlib import Path
from typing import Any

from hybridrl.cli.output import refuse
from hybridrl.cli.run import run
from hybridrl.config import Config


def evaluate(args: list[str]) -> None:
    """Evaluate a model, or checkpoints of a run."""
    if not args or "=" in args[0] or args[0].startswith("-"):
        return run("eval", _evaluate, args)
    from hybridrl.config import compose
    from hybridrl.config.stored_run import overrides_of
    from hybridrl.telemetry.rundata import checkpoints_of

    parser = argparse.ArgumentParser(prog="hybridrl eval", allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoints", default="final", help="all, final, or steps: 40,80")
    parser.error = refuse  # type: ignore[method-assign]
    options, rest = parser.parse_known_args(args)
    compose.register()
    run_dir = options.run
    stored = overrides_of(run_dir, rest, repeats=False)
    checkpoints = checkpoints_of(run_dir, options.checkpoints)
    own_dir = run_dir / "evaluations" / time.strftime("%Y%m%d-%H%M%S")
    settings = [
        f"model.path='{next(iter(checkpoints.values()))}'",
        f"run.dir='{own_dir}'",
        *("warm_start.steps=0", "actor.lora.rank=0", "trainer.resume=never"),
        "trainer.save_samples=false",
    ]

    def of_checkpoints(config: Config) -> dict[str, Any]:
        from hybridrl.driver.train import evaluate_checkpoints

        return evaluate_checkpoints(config, run_dir, checkpoints)

    run("eval", of_checkpoints, [*stored, *settings, *rest])


def _evaluate(config: Config) -> dict[str, Any]:
    from hybridrl.driver.train import evaluate_only

    return evaluate_only(config)
