"""A namespace of mounts and processes, all of which end with its first process."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

import psutil

INSIDE = "CHAOS_INSIDE"
"""A variable that processes inside have."""
_UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]


@cache
def can_enter() -> bool:
    """Whether this process may make one, which takes root and util-linux."""
    if not all(shutil.which(command) for command in ("unshare", "setpriv")):
        return False
    return not subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode


def enter(command: Sequence[str]) -> NoReturn:
    """Run a command as the first process inside, which gets SIGTERM too; exit as it does.

    `unshare` holds SIGTERM back, and the kernel keeps it from a first process without a handler.
    A terminal sends SIGINT to all.
    """
    words, env = [*_WITH_PARENT, *_UNSHARE, *command], {**os.environ, INSIDE: "1"}
    process = subprocess.Popen(words, env=env)

    def forward(*_: object) -> None:
        for child in psutil.Process(process.pid).children():
            child.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, lambda *_: None)
    sys.exit(process.wait())
