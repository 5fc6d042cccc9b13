"""Ray over the nodes of a Slurm job: one step for the head, one for the other nodes."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.config import SlurmClusterConfig
from hybridrl.runtime import slurm
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.ray_node import HIDDEN
from hybridrl.runtime.slurm import RENDEZVOUS
from hybridrl.telemetry.records import write_atomic

_POLL_S = 0.1
_END_S = 15.0  # a node takes a few seconds to end Ray; Slurm's KillWait is 30


class RayOnSlurm:
    """The start of Ray on a job's nodes; `address` is its head's, `nodes` the names of all."""

    def __init__(
        self, config: SlurmClusterConfig, logs: Path, allocation: slurm.Allocation
    ) -> None:
        self.config, self.logs, self.allocation = config, logs, allocation
        self.address = ""
        rendezvous = os.environ.get(RENDEZVOUS)
        self.rendezvous = Path(rendezvous) if rendezvous else None
        self._deadline = time.monotonic() + config.start_timeout_s
        self._steps: list[subprocess.Popen[bytes]] = []

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the job's nodes, this one first."""
        first = self.allocation.this_node
        return (first, *(node for node in self.allocation.nodes if node != first))

    def wait_for_nodes(self, ray: Any) -> None:
        """Wait until every node has joined; raises RayStartError with the missing ones."""

        def missing() -> list[str]:
            alive = {node["NodeName"] for node in ray.nodes() if node["Alive"]}
            return [node for node in self.nodes if node not in alive]

        self._wait(lambda: not missing(), missing)

    def wait_for_head(self, file: Path) -> None:
        """Read the head's address from the file that Ray writes at the end of its start."""
        self._wait(lambda: file.is_file() and bool(file.read_text()), lambda: self.nodes[:1])
        self.address = file.read_text().strip()

    @contextmanager
    def step(self, nodes: Sequence[str], *options: str) -> Iterator[None]:
        """Run Ray on `nodes` as a step of the job; on exit, ask it to end and wait."""
        program = [sys.executable, "-P", "-m", "hybridrl.runtime.ray_node", f"--logs={self.logs}"]
        program += [f"--ranks={self.config.ranks_per_node}", f"--gpus={self.config.gpus_per_node}"]
        if self.config.object_store_mb:
            program.append(f"--object-store-mb={self.config.object_store_mb}")
        if self.config.local_scratch is not None:
            program.append(f"--scratch={self.config.local_scratch}")
        command = [*program, *options]
        if self.rendezvous is None:
            command = slurm.srun(self.allocation, nodes, *command)
        # Its standard input is the link: it ends with this process, however that ends.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert process.stdin is not None
        self._steps.append(process)
        patience = _END_S
        try:
            yield
        except RayStartError:
            patience = 1.0  # a node that has not started does not read its input
            raise
        finally:
            process.stdin.close()
            for stop in (process.terminate, process.kill):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
                    break
                stop()
            process.wait()

    def _wait(self, ready: Callable[[], bool], missing: Callable[[], Sequence[str]]) -> None:
        while not ready():
            ended = [step.returncode for step in self._steps if step.poll() is not None]
            if ended or time.monotonic() > self._deadline:
                raise RayStartError(self._describe(missing(), ended))
            time.sleep(_POLL_S)

    def _describe(self, missing: Sequence[str], ended: Sequence[int]) -> str:
        """One line: the missing nodes, the number of nodes, and the logs."""
        limit = f"within cluster.start_timeout_s={self.config.start_timeout_s:g}"
        if HIDDEN in ended:
            limit = f"where run.dir={self.logs.parent} is not there: it must be on all nodes"
        elif ended:
            limit = f"and the step that starts it has ended with {ended[0]}"
        names = ", ".join(missing)
        logs = ", ".join(str(self.logs / f"ray-{node}.log") for node in missing[:3])
        return (
            f"{len(missing)} of the {len(self.nodes)} nodes of Slurm job {self.allocation.job} did"
            f" not join Ray {limit}: {names}; see {logs}"
        )


@contextmanager
def ray_on_slurm(config: SlurmClusterConfig, logs: Path) -> Iterator[RayOnSlurm]:
    """Start Ray on every node of this process's Slurm job, and end it on exit.

    Nothing is shared with another job on the same nodes. The system chooses every port, the
    temporary directories are new, and processes of another job lack the token. Yields when the head
    is up; see `wait_for_nodes`. Raises ConfigError outside of a job, RayStartError if the head does
    not start.
    """
    allocation = slurm.allocation(config)
    logs.mkdir(parents=True, exist_ok=True)
    starting = RayOnSlurm(config, logs.resolve(), allocation)
    if starting.rendezvous is None:  # else the batch script has set the token on all nodes
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    with (
        contextlib.ExitStack() as steps,
        tempfile.TemporaryDirectory(prefix="hrl", dir="/tmp", ignore_cleanup_errors=True) as temp,
    ):
        steps.enter_context(starting.step(starting.nodes[:1], f"--temp={temp}"))
        starting.wait_for_head(Path(temp) / "ray_current_cluster")
        if starting.rendezvous is not None:
            write_atomic(starting.rendezvous / "head", starting.address)
        elif starting.nodes[1:]:
            address = f"--address={starting.address}"
            steps.enter_context(starting.step(starting.nodes[1:], address))
        yield starting
