"""Ray on one node of a Slurm job: `srun ... python -m hybridrl.runtime.ray_node OPTIONS`.

States: starting; up, until standard input ends (the driver closes it, or is dead), Ray ends, or a
signal arrives. Then all processes of Ray on this node are killed, in whatever session. Its workers'
logs are copied to the run directory, and its temporary directory is deleted. Exits with 0 after the
end of standard input, 1 after Ray's own end, 143 after a signal. Exits with 3 if the run directory
is not on this node.
"""

import argparse
import contextlib
import getpass
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hybridrl.runtime.ray_cleanup import MARK, keep_logs, kill_marked, no_process_stays
from hybridrl.runtime.slurm import RENDEZVOUS
from hybridrl.system.node_info import object_store_bytes
from hybridrl.system.owned_folder import owned, remove_abandoned

RANK = "hybridrl_rank"  # Ray's custom resource, one unit per rank
HIDDEN = 3
_STDIN = 0
_POLL_S = 0.2
_GRACE_S = 5.0


class _Ended(Exception):
    """A signal has ended this node."""


def no_client_server(params: Any, head: bool) -> None:
    """Ray's start hook: no server for remote clients, whose port (10001) two jobs would share."""
    params.ray_client_server_port = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run Ray on this node until a stop is requested; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", help="of the node; Slurm's, if not given")
    parser.add_argument("--address", help="host:port of the head; this is the head without it")
    parser.add_argument(
        "--scratch", type=Path, help="of this node, for caches and Ray's spilled objects"
    )
    parser.add_argument("--temp", type=Path, help="Ray's directory; made under /tmp, if not given")
    parser.add_argument("--logs", type=Path, required=True, help="the run's directory of logs")
    parser.add_argument("--ranks", type=int, required=True, help="that this node holds")
    parser.add_argument("--gpus", type=int, required=True, help="of this node")
    parser.add_argument("--object-store-mb", type=int, default=0, help="0: what the node affords")
    options = parser.parse_args(argv)
    scratch: Path = options.scratch or _node_scratch()
    scratch.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    # A warning is the driver's; srun passes it on to every process of a step, ranks among them.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    name = options.name or os.environ["SLURMD_NODENAME"]
    if options.address is None and options.temp is None:  # the head is elsewhere, in a container
        with contextlib.suppress(_Ended):
            options.address = _wait_for_head(options.logs)
        if options.address is None:
            return 0
    if not options.logs.is_dir():
        run_dir = options.logs.parent
        print(f"hybridrl: node {name} does not see run.dir={run_dir}", file=sys.stderr, flush=True)
        return HIDDEN
    # Ray's directory is short: its sockets below it have 107 characters.
    remove_abandoned(Path("/tmp"), "hrl", lambda left: kill_marked(str(left)))
    temp = options.temp or Path(tempfile.mkdtemp(prefix="hrl", dir="/tmp"))
    env = (
        os.environ
        | _caches(scratch)
        | {
            MARK: str(temp),
            "RAY_START_HOOK": "hybridrl.runtime.ray_node.no_client_server",
            # Other jobs on a shared node must not make Ray kill a rank: Slurm sets the limits.
            "RAY_memory_monitor_refresh_ms": "0",
            # Idle workers ready beforehand; the ranks, whose environment differs, are others.
            "RAY_prestart_worker_first_driver": "0",
        }
    )
    spill = scratch / f"ray-{temp.name}"
    with contextlib.suppress(_Ended), _cleared(temp, spill, options.logs):
        with (options.logs / f"ray-{name}.log").open("w") as log:
            process = subprocess.Popen(
                _command(options, name, temp, spill),
                env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        stop_requested = _wait(process)
        return 0 if stop_requested else 1
    return 128 + signal.SIGTERM


@contextlib.contextmanager
def _cleared(temp: Path, spill: Path, logs: Path) -> Any:
    try:
        with owned(temp), no_process_stays(str(temp)):
            yield
    finally:
        shutil.rmtree(spill, ignore_errors=True)
        keep_logs(temp, logs)


def _end(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)  # a second one must not interrupt the end
    raise _Ended


def _command(options: argparse.Namespace, name: str, temp: Path, spill: Path) -> list[str]:
    """`ray start` with no port that is not free: 0 lets the system choose each.

    Neither autoscaler nor log monitor: nodes do not come and go, and logs are read from files.
    """
    role = [f"--address={options.address}"]
    if options.address is None:
        role = ["--head", "--port=0", "--include-dashboard=false", "--no-monitor"]
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role,
        f"--node-name={name}", f"--temp-dir={temp}",
        f"--num-cpus={options.ranks + 2}", f"--num-gpus={options.gpus}",
        f'--resources={{"{RANK}": {options.ranks}}}',
        f"--object-store-memory={object_store_bytes(options.object_store_mb)}",
        f"--object-spilling-directory={spill}",
        "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0",
        "--include-log-monitor=false", "--disable-usage-stats",
    ]  # fmt: skip


def _wait_for_head(logs: Path) -> str | None:
    """The head's address, from the rendezvous directory; None if a stop was requested before."""
    file = Path(os.environ[RENDEZVOUS]) / "head"
    while not file.is_file():
        if _stop_requested(_POLL_S):
            return None
    return file.read_text().strip()


def _node_scratch() -> Path:
    """A directory local to this node, if the user names none."""
    named = [Path(os.environ[name]) for name in ("SLURM_TMPDIR", "TMPDIR") if name in os.environ]
    return next((path for path in named if path.is_dir()), Path("/tmp"))  # a container may lack it


def _caches(scratch: Path) -> dict[str, str]:
    """Variables that put compilers' caches on this node; the user's own settings have priority."""
    caches = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
        "TORCH_EXTENSIONS_DIR": "torch_extensions",
        "VLLM_CACHE_ROOT": "vllm",
    }
    folder = f"{scratch}/hybridrl-{getpass.getuser()}"
    return {k: f"{folder}/{v}" for k, v in caches.items() if k not in os.environ}


def _stop_requested(patience: float) -> bool:
    """Whether standard input ends within so many seconds."""
    return bool(select.select([_STDIN], [], [], patience)[0]) and not os.read(_STDIN, 4096)


def _wait(process: "subprocess.Popen[bytes]") -> bool:
    """Wait until standard input ends (True) or the process does (False)."""
    while process.poll() is None:
        if _stop_requested(_POLL_S):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
