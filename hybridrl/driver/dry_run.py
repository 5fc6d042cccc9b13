"""`hybridrl train --dry-run`: all that a run checks before its ranks start, and no more."""

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config import Config, ConfigError, RunConfig
from hybridrl.driver.followed_run import check_followed, check_followed_inputs
from hybridrl.driver.origin import find_origin
from hybridrl.driver.resumed_inputs import check_inputs, known_rows
from hybridrl.preflight.prepare import prepare

logger = logging.getLogger(__name__)


def check_runs(
    configs: Sequence[Config],
    run_dirs: Sequence[Path],
    reads: bool = False,
    show: Callable[[str], object] = lambda text: None,
) -> list[Config]:
    """Check every run as it would itself, in a temporary directory, and the run that it resumes.

    Nothing is written into `run_dirs`. Runs that differ in their directory alone are checked once.
    With `reads` the bytes of checkpoints are compared with their checksums. `show` is given the
    first samples of each run that is checked, as text, and what `schedule=auto` and
    `trainer.activations=auto` are.
    Answers with the configs as the checks have completed them: device, ranks, pools, layouts.
    Raises `ConfigError`.
    """
    seen: list[tuple[Config, Config]] = []
    completed = []
    for config, run_dir in zip(configs, run_dirs, strict=True):
        alike = replace(config, run=RunConfig())
        known = next((whole for other, whole in seen if other == alike), None)
        origin = find_origin(replace(config, run=replace(config.run, dir=str(run_dir))), reads)
        if known is None or origin.point is not None:
            check_followed(config)
            logger.debug("checking the run in %s", run_dir)
            with tempfile.TemporaryDirectory() as folder:
                known = deepcopy(replace(config, run=replace(config.run, dir=folder)))
                rows = known_rows(origin)
                prepared = prepare(known, known=rows)
                check_inputs(known, origin, rows, prepared)
                check_followed_inputs(known, prepared.data)
                show(prepared.first_samples)
                for line in filter(None, (*prepared.notes, prepared.activations)):
                    show(f"{line}\n")
            seen.append((alike, known))
        completed.append(known)
    return completed


def dry_run(configs: Sequence[Config]) -> dict[str, Any]:
    """Check runs whose ranks nothing starts; answers with the line that the command prints.

    First samples and choices go to standard error, which a script that reads the line passes over.
    Raises `ConfigError` as `train` would.
    """
    for config in configs:
        _check_writable(Path(config.run.dir))
    shown: list[str] = []
    run_dirs = [Path(config.run.dir) for config in configs]
    completed = check_runs(configs, run_dirs, reads=True, show=shown.append)
    sys.stderr.write("\n".join(dict.fromkeys(shown)))
    first = completed[0]
    pools = {name: len(ranks) for name, ranks in first.cluster.pool_ranks.items()}
    return {
        "dry_run": True,
        "runs": len(completed),
        "ranks": first.cluster.ranks,
        "pools": pools,
        "device": first.cluster.device.value,
        "schedule": first.schedule.kind.value,
        "fused_updates": first.trainer.fuses,
        "activations": first.trainer.activations.value,
    }


def _check_writable(run_dir: Path) -> None:
    """Raise where the run directory could not be made, without making it."""
    there = next(
        path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists()
    )
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError("run.dir", run_dir, f"a writable directory ({there} is none)")
