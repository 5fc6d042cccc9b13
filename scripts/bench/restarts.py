"""Seconds from a killed rank to the next finished step, against the command given again.

`make bench-restarts`. Runs of `experiment=spell_tiny` on two ranks, which save after every step.
Once a run has finished a few, SIGKILL ends rank 1. `ours` goes on by itself (`cluster.restarts=1`);
the baseline ends with its line, and the same command is given again, which resumes it.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from lines import line, show, take_turns

from hybridrl.system.activity import file_of, read
from hybridrl.telemetry.records import read_lines

BEFORE = 3
"""Steps before the kill."""
WAIT_S = 300


def last_step(run: Path) -> int:
    """The newest step of the recipe in the records of `run`."""
    file = run / "metrics.jsonl"
    rows = read_lines(file) if file.exists() else []
    return max((row["step"] for row in rows if row["phase"] == "rl"), default=0)


def after(run: Path, step: int) -> None:
    """Wait until a step later than `step` has ended."""
    until = time.monotonic() + WAIT_S
    while last_step(run) <= step:
        if time.monotonic() > until:  # or the run has ended with an error
            sys.exit(f"{run}: no step after {step} has ended within {WAIT_S} s")
        time.sleep(0.02)


def seconds(cluster: str, restarts: int) -> float:
    """From the kill to the end of the next step."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            str(Path(sys.executable).with_name("hybridrl")), "train", "experiment=spell_tiny",
            f"cluster={cluster}", "cluster.ranks=2", f"cluster.restarts={restarts}",
            "trainer.resume=auto", "trainer.save_every=1", "warm_start.steps=2",
            "telemetry.report=false", f"run.dir={run}",
        ]  # fmt: skip
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
        try:
            after(run, last_step(run) + BEFORE)
            rank = read(file_of(run, 1))
            assert rank is not None, "rank 1 has ended"
            start = time.monotonic()
            os.kill(rank.pid, signal.SIGKILL)
            if not restarts:
                process.wait(WAIT_S)
                process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
            after(run, last_step(run))
            return time.monotonic() - start
        finally:
            process.terminate()
            process.wait(WAIT_S)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for cluster in ("processes", "local"):
        sides = {restarts: partial(seconds, cluster, restarts) for restarts in (1, 0)}
        measured = take_turns(sides, args.rounds)
        name = f"restart_to_the_next_step_{cluster}"
        show(line(name, "s", "lower", measured[1], measured[0], ranks=2))


if __name__ == "__main__":
    main()
