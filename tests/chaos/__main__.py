"""Runs that faults strike at random moments, and what must hold afterwards.

    PYTHONPATH=tests python -m chaos FILE [--seeds N ...] [--minutes N] [--write]

Each case is a line of JSON that is appended to FILE; a later call goes on with the seeds that FILE
lacks. `make test-chaos` calls it. Seeds from 1000 on have runs on Ray. Network namespaces and vLLM
are left out. Needs root: it goes on as the first process of a namespace, which adopts what runs
leave behind, and a process of Ray ends once the first one is its parent.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

from chaos.attempts import left_behind, start_server
from chaos.cases import CASES, RAY_SEEDS
from chaos.namespace import INSIDE, can_enter, enter
from chaos.summary import write

from hybridrl.telemetry.records import read_lines

ALL = (*range(CASES), *RAY_SEEDS)


def main() -> None:
    """Parse and run; exits with 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a line of JSON a case")
    parser.add_argument("--seeds", type=int, nargs="+", default=ALL, metavar="N")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--keep", type=Path, help="for runs with which something is wrong")
    parser.add_argument("--write", action="store_true", help="the counts into docs/checkpoints.md")
    args = parser.parse_args()
    if INSIDE not in os.environ:
        if not can_enter():
            sys.exit("chaos: needs root, unshare and setpriv, to make namespaces")
        enter([sys.executable, "-m", "chaos", *sys.argv[1:]])
    signal.signal(signal.SIGTERM, terminated)
    done = {line["seed"] for line in read_lines(args.file)} if args.file.exists() else set()
    end, wrong = time.monotonic() + 60 * args.minutes, False
    folder = temporary_folder()
    start_server()
    from chaos.runs import Runs  # while the server imports, too

    runs = Runs(folder, args.keep)
    for seed in [seed for seed in args.seeds if seed not in done]:
        if time.monotonic() > end:
            break
        line = runs.run(seed)
        wrong |= bool(line["wrong"])
        with args.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(shown(line), flush=True)
    if args.write:
        write(read_lines(args.file))
    sys.exit(wrong)


def terminated(*_: object) -> NoReturn:
    """End on SIGTERM: no run is waited for; what is mounted and temporary goes."""
    left_behind(0.0)
    sys.exit(128 + signal.SIGTERM)


def shown(line: dict[str, Any]) -> str:
    """A case in a line for people."""
    struck = [
        f"{x['fault']} {x['hit']}, rank {x['rank']} in {x['activity']}" for x in line["struck"]
    ]
    codes = [end["code"] for end in line["ends"]]
    head = f"{line['seed']} {line['setting']} x{line['restarts']} {line['seconds']} s {codes}"
    return "\n   ".join([head, *struck, *line["wrong"]])


def temporary_folder() -> Path:
    """A folder for all runs, removed when this process ends; below it all temporary files are."""
    folder = Path(tempfile.mkdtemp(prefix="chaos"))
    Finalize(None, shutil.rmtree, [folder], exitpriority=-200)  # multiprocessing's own has -100
    (folder / "t").mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "t")
    return folder


if __name__ == "__main__":
    main()
