"""A Slurm of several nodes on this one machine, for tests and to try things; nothing of it stays.

    python scripts/slurm/local_slurm.py [--nodes=2] COMMAND ...

runs COMMAND with it (`bash` for a shell). Needs Debian's packages: scripts/slurm/install.sh. The
nodes are n1, n2, ...: a slurmd each, on separate ports, with 16 CPUs that are only numbers. Two
partitions have them all: main, and urgent, whose jobs take the nodes from those of main.
"""

import argparse
import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
GRACE_S = 60  # that a preempted job of main has to end in
_START_S = 30.0
_CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=3600
MessageTimeout=60
Prolog={folder}/prolog
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
# A node that is to be held up does not start a job's first step.
_PROLOG = """\
#!/bin/sh
while [ -e "{folder}/hold-$SLURMD_NODENAME" ]; do sleep 0.1; done
"""


def missing() -> str | None:
    """Why there can be no Slurm here, in one line; None if there can."""
    lacking = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if lacking:
        return f"no {', '.join(lacking)} on this machine: scripts/slurm/install.sh installs Slurm"
    return None


def _path() -> str:
    """Daemons are outside of a user's PATH."""
    return os.pathsep.join((os.environ["PATH"], "/usr/sbin"))


class LocalSlurm:
    """Slurm's daemons as children of this process, in a separate directory.

    Use it as a context manager. On the way out every daemon, and what is left of their jobs, has
    ended, and the directory is gone.
    """

    def __init__(self, nodes: int = 2) -> None:
        # Short, since munge's socket is in it.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm"))
        self.folder.chmod(0o755)
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, in which Slurm's commands find this Slurm."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def __enter__(self) -> "LocalSlurm":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("scancel", "--signal=KILL", f"--user={getpass.getuser()}")
            time.sleep(0.5)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command: str) -> str:
        """Standard output of a command of Slurm."""
        done = subprocess.run(
            command, env=self.env, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Every living process of this Slurm and of its jobs, or those of one node."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                process_node = self._node_of(process)
                if process_node is None or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if node in (None, process_node) and process.pid != os.getpid():
                    processes.append(process)
        return processes

    def _node_of(self, process: psutil.Process) -> str | None:
        """The node of a process of this Slurm, empty if it is on none; None for any other."""
        env = process.environ()
        if env.get("SLURM_CONF") == self.env["SLURM_CONF"]:
            return env.get("SLURMD_NODENAME") or env.get("LOCAL_SLURM_NODE") or ""
        if process.name() == "slurmstepd":  # its title overwrites its environment
            for link in process.net_connections("unix"):
                socket_file = Path(str(link.laddr))
                if socket_file.is_relative_to(self.folder):
                    return socket_file.parent.name.removeprefix("spool-")
        return None

    def kill_node(self, node: str, steps: bool = True) -> None:
        """End a node as a power cut does: its slurmd and all that runs on it, at once.

        Without `steps` the daemons of its jobs' steps live long enough to tell Slurm of their end.
        Otherwise Slurm ends steps on the node once more when it is back.
        """
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                if steps or process.name() != "slurmstepd":
                    process.send_signal(signal.SIGKILL)
        self._daemons.pop(node).wait()

    def start_node(self, node: str) -> None:
        """Start a node, and wait until Slurm has it."""
        before = self._started_at(node)
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        env = {"LOCAL_SLURM_NODE": node}
        self._daemons[node] = self._daemon("slurmd", "-D", "-N", node, env=env)
        self._wait(lambda: self._started_at(node) not in ("None", before), node)

    def _started_at(self, node: str) -> str:
        """When the node's daemon has started, by the controller's knowledge."""
        match = re.search(r"SlurmdStartTime=(\S+)", self.call("scontrol", "show", "node", node))
        return match[1] if match else "None"

    @contextlib.contextmanager
    def held(self, node: str) -> Iterator[None]:
        """Meanwhile, `node` starts no job's first step."""
        file = self.folder / f"hold-{node}"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    @contextlib.contextmanager
    def settings(self, *lines: str) -> Iterator[None]:
        """Meanwhile, slurm.conf has these lines, too."""
        file = self.folder / "slurm.conf"
        kept = file.read_text()
        try:
            file.write_text("\n".join([kept, *lines, ""]))
            self.call("scontrol", "reconfigure")
            yield
        finally:
            file.write_text(kept)
            self.call("scontrol", "reconfigure")

    def _start(self) -> None:
        ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        where = {"folder": self.folder, "host": host, "ports": ports, "user": getpass.getuser()}
        conf = _CONF.format(**where)
        for node, port in zip(self.nodes, ports[1:], strict=True):
            conf += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            conf += " CPUs=16 RealMemory=16000\n"
        conf += f"PartitionName=main Nodes=ALL Default=YES GraceTime={GRACE_S}\n"
        conf += "PartitionName=urgent Nodes=ALL PriorityTier=2\n"
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "prolog").write_text(_PROLOG.format(**where))
        (self.folder / "prolog").chmod(0o755)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        socket_file = self.folder / "munge.socket"
        self._daemons["munged"] = self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_file}",
            f"--pid-file={self.folder}/munge.pid", f"--seed-file={self.folder}/munge.seed",
        )  # fmt: skip
        self._wait(socket_file.exists, "munged")
        self._daemons["slurmctld"] = self._daemon("slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)

    def _daemon(
        self, program: str, *options: str, env: dict[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        executable = shutil.which(program, path=_path())
        assert executable is not None, f"{program}: see missing()"
        with (self.folder / f"{program}.log").open("a") as log:
            return subprocess.Popen(
                [executable, *options], env=self.env | (env or {}), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _wait(self, ready: Callable[[], bool], name: str) -> None:
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(subprocess.CalledProcessError):
                if ready():
                    return
            if time.monotonic() > end:
                logs = "".join(file.read_text() for file in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"{name} did not come up within {_START_S:g} s:\n{logs}")
            time.sleep(0.1)


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]


def main() -> int:
    """Run a command with a private Slurm; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if reason := missing():
        print(f"local_slurm: {reason}", file=sys.stderr)
        return 2
    with LocalSlurm(options.nodes) as slurm:
        return subprocess.run(options.command or ["bash"], env=slurm.env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
