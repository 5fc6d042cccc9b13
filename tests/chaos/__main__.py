"""Runs that faults strike at random moments, and what must hold afterwards.

    PYTHONPATH=tests python -m chaos FILE [--seeds FIRST LAST] [--minutes N]

Each case is a line of JSON that is appended to FILE; a later call goes on with the seeds that FILE
lacks. `make test-chaos` calls it. Network namespaces, Ray and vLLM are left out. Needs root.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos.attempts import start_server
from chaos.strikes import own_mounts
from chaos.summary import write

from hybridrl.telemetry.records import read_lines


def main() -> None:
    """Parse and run; exits with 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a line of JSON a case")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 300), metavar=("FIRST", "LAST"))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--keep", type=Path, help="for runs with which something is wrong")
    parser.add_argument("--write", action="store_true", help="the counts into docs/checkpoints.md")
    args = parser.parse_args()
    own_mounts()
    done = {line["seed"] for line in read_lines(args.file)} if args.file.exists() else set()
    end, wrong = time.monotonic() + 60 * args.minutes, False
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        use_temporary(Path(folder) / "t")
        start_server()
        from chaos.runs import Runs  # while the server imports, too

        runs = Runs(Path(folder), args.keep)
        for seed in sorted({*range(*args.seeds)} - done):
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


def shown(line: dict[str, Any]) -> str:
    """A case in a line for people."""
    struck = [
        f"{x['fault']} {x['hit']}, rank {x['rank']} in {x['activity']}" for x in line["struck"]
    ]
    codes = [end["code"] for end in line["ends"]]
    head = f"{line['seed']} {line['setting']} x{line['restarts']} {line['seconds']} s {codes}"
    return "\n   ".join([head, *struck, *line["wrong"]])


def use_temporary(folder: Path) -> None:
    """Have this process and all others leave their temporary files in `folder`, which is made."""
    folder.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


if __name__ == "__main__":
    main()
