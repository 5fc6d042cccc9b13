"""The inner side of a `SandboxedProcess`: its limits, and its first answer."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from hybridrl.config import ConfigError

MEMORY_LIMIT = 4 << 30
"""Bytes of data (heap, anonymous maps) of one verifier process."""

PR_SET_PDEATHSIG = 1


def limit_process(parent: int, memory: int = MEMORY_LIMIT) -> None:
    """Bound this process's memory in bytes, write no core dumps, die when `parent` does (Linux).

    So do the jails that it starts, of which the kernel ends one before a rank.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):  # what the kernel ends first where memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)


def keep_from_children(connection: Connection) -> None:
    """Children do not have the connection to the parent, and die with this process (Linux).

    The latter are those that the main thread forks. Its death is this process's; that of another
    thread would kill its children early. The parent kills the others, while it lives.
    """
    os.set_inheritable(connection.fileno(), False)
    owner, forks_main = os.getpid(), False

    def before() -> None:
        nonlocal forks_main
        forks_main = threading.get_native_id() == owner

    def in_child() -> None:
        connection.close()
        if sys.platform == "linux" and forks_main and os.getppid() == owner:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != owner:  # it died before the call above
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)


def start_failure(error: BaseException) -> list[str]:
    """The first answer of a process that cannot be built; see `SandboxedProcess.set_ready`."""
    if isinstance(error, ConfigError):
        return ["ConfigError", error.key, str(error.value), error.allowed]
    return ["Error", f"{type(error).__name__}: {error}"]
