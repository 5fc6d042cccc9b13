"""The program of a verifier process: `python -m hybridrl.rewards.worker FD PARENT`.

It reads pickles from its parent, which it trusts. It answers in JSON, since the parent must not
trust a process that judges a model's output. It imports neither torch nor ray.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from hybridrl.config import ConfigError, JailKind, RewardKind
from hybridrl.rewards import jail
from hybridrl.rewards.verifiers import RewardInput, make_verifier

MEMORY_LIMIT = 4 << 30
"""Bytes of data (heap, anonymous maps) of one verifier process."""

PR_SET_PDEATHSIG = 1


def limit_process(parent: int) -> None:
    """Bound this process's memory, write no core dumps, and die when `parent` does (Linux).

    So do the jails that it starts, of which the kernel ends one before a rank.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):  # what the kernel ends first where memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)


def judge(verify: Callable[[RewardInput], tuple[float, str]], item: RewardInput) -> list[object]:
    """`[reward, None, text]`, or `[0.0, message, ""]` if the verifier raises."""
    try:
        reward, text = verify(item)
        return [reward, None, text]
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the user's as well
        return [0.0, f"{type(error).__name__}: {error}"[:500], ""]


def main(descriptor: int, parent: int) -> None:
    """Build the verifier, report ready, then judge chunk after chunk, with one answer a sample.

    The parent closes the connection to end the process.
    """
    limit_process(parent)
    connection = Connection(descriptor)

    def answer(value: object) -> None:
        connection.send_bytes(json.dumps(value).encode())

    config, sources, paths = connection.recv()
    sys.path[:] = paths  # a user's module is found as in the parent
    jail.configure(config.jail, config.limits)
    try:
        verify = make_verifier(config, sources)
        runs_programs = config.kind is RewardKind.code or config.jail is not JailKind.auto
        mechanism = str(jail.choose(config.jail)) if runs_programs else ""
    except ConfigError as error:
        answer(["ConfigError", error.key, str(error.value), error.allowed])
        return
    except BaseException as error:
        answer(["Error", f"{type(error).__name__}: {error}"])
        return
    answer(["ready", mechanism])
    with contextlib.suppress(EOFError):
        while True:
            for item in connection.recv():
                answer(judge(verify, RewardInput(*item)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
