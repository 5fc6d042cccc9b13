"""Slurm's commands, and their errors as one line."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config import ClusterConfig, ConfigError, SlurmClusterConfig
from hybridrl.config.errors import names
from hybridrl.runtime.errors import JobError

RENDEZVOUS = "HYBRIDRL_RENDEZVOUS"  # names the directory that a container's driver and nodes share
_FIELD = re.compile(r"(\w+)=(.*?)(?= [\w:/]+=|$)")
_PATH = re.compile(r"(Command|WorkDir|StdErr|StdIn|StdOut)=(.*)")  # a line each, with any character


class SlurmError(JobError):
    """A command of Slurm failed; the message is Slurm's own."""


@dataclass(frozen=True)
class Allocation:
    """The job that this process runs in: its id, and its nodes by Slurm's names.

    `cpus` is the smallest number of CPUs that the job has on a node.
    """

    job: str
    nodes: tuple[str, ...]
    this_node: str
    cpus: int


def call(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Standard output of a command of Slurm; raises `SlurmError` with its error messages.

    Raises ConfigError if there is no such command: this machine has no Slurm.
    """
    if shutil.which(command[0]) is None:
        allowed = f"a machine with Slurm ({command[0]} is not on the PATH here)"
        raise ConfigError("cluster", "slurm", allowed)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        reasons = [
            line.removeprefix(f"{command[0]}: ").removeprefix("error: ").strip()
            for line in (done.stderr or done.stdout).splitlines()
            if line.strip()
        ]
        raise SlurmError(f"{command[0]}: {'; '.join(reasons) or f'exit code {done.returncode}'}")
    return done.stdout


def check_partition(config: SlurmClusterConfig) -> None:
    """Raise ConfigError for a partition that does not exist, or has fewer nodes than requested.

    Slurm would let some such jobs wait indefinitely.
    """
    cpus: dict[str, list[int]] = {}
    default = ""
    for line in call("sinfo", "--noheader", "--Node", "--format=%P %c").splitlines():
        name, number = line.split()
        default = name.rstrip("*") if name.endswith("*") else default
        cpus.setdefault(name.rstrip("*"), []).append(int(number))
    partition = config.partition or default
    for one in partition.split(","):  # Slurm takes the first that can
        if one not in cpus:
            raise ConfigError("cluster.partition", partition, names(one, list(cpus)))
    nodes_of = [cpus[one] for one in partition.split(",")]
    wanted = config.cpus_per_node or 1
    num_large, num_nodes = max((sum(n >= wanted for n in nodes), len(nodes)) for nodes in nodes_of)
    if config.nodes > num_large:
        which = f" with {wanted} CPUs or more" if num_large < num_nodes else ""
        allowed = f"at most the {num_large} of partition {partition}{which}"
        raise ConfigError("cluster.nodes", config.nodes, allowed)


def jobs(job: str) -> list[dict[str, str]]:
    """Slurm's entries of a job, one a task of an array, with `id` as users write it.

    Waiting tasks share one entry. Empty for a job that Slurm has forgotten, some minutes after its
    end.
    """
    try:
        records = call("scontrol", "show", "job", job).split("\n\n")
    except SlurmError as error:
        if "Invalid job id" in str(error) or "not found" in str(error):
            return []
        raise
    entries = [_fields(record) for record in records if "JobId=" in record]
    for fields in entries:
        fields["id"] = fields["JobId"]
        if "ArrayJobId" in fields:
            fields["id"] = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
    return sorted(entries, key=lambda fields: [int(n) for n in re.findall(r"\d+", fields["id"])])


def _fields(record: str) -> dict[str, str]:
    """The fields of scontrol's record of a job."""
    fields: dict[str, str] = {}
    for line in record.splitlines():
        if path := _PATH.match(line.strip()):
            fields[path[1]] = path[2]
        else:
            fields |= dict(_FIELD.findall(line))
    return fields


def allocation(config: ClusterConfig) -> Allocation:
    """The job of this process; raises ConfigError outside of a job, or in one of another size."""
    env = os.environ
    if "SLURM_JOB_ID" not in env or "SLURMD_NODENAME" not in env:
        raise ConfigError("cluster", "slurm", "a node of a Slurm job; hybridrl submit makes one")
    if rendezvous := env.get(RENDEZVOUS):
        nodes = tuple((Path(rendezvous) / "nodes").read_text().split())
    else:
        nodes = tuple(call("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split())
    if len(nodes) != config.nodes:
        raise ConfigError("cluster.nodes", config.nodes, f"the {len(nodes)} of this Slurm job")
    this_node = env["SLURMD_NODENAME"]
    assert this_node in nodes, f"{this_node} is not of {nodes}"
    return Allocation(env["SLURM_JOB_ID"], nodes, this_node, _least(env["SLURM_JOB_CPUS_PER_NODE"]))


def restarts_left(config: ClusterConfig) -> int | None:
    """The number of restarts that this process's job has left; None if it must not restart.

    That is outside of a job, without `cluster.requeue`, and after a cancellation, which also
    appears as the death of ranks or nodes.
    """
    if "SLURM_JOB_ID" not in os.environ or not config.requeue or _is_cancelled(_current_job()):
        return None
    return max(0, config.requeue - int(os.environ.get("SLURM_RESTART_COUNT", "0")))


def _current_job() -> str:
    """The job of this process; SLURM_JOB_ID alone is ambiguous for an array's last task."""
    env = os.environ
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env["SLURM_JOB_ID"]


def _is_cancelled(job: str) -> bool:
    """Whether Slurm is ending the job for another reason than its time limit.

    Then it was cancelled, or Slurm restarts it itself: for a dead node, say. In a container the
    script around the driver checks this.
    """
    if RENDEZVOUS in os.environ:
        return False
    return any(
        entry["JobState"] in ("CANCELLED", "COMPLETING") and not _is_over_time(entry)
        for entry in jobs(job)
    )


def _is_over_time(job: Mapping[str, str]) -> bool:
    limit = job["TimeLimit"]
    return ":" in limit and _seconds(job["RunTime"]) >= _seconds(limit)


def _seconds(duration: str) -> int:
    """Seconds of Slurm's `1-02:03:04`."""
    days, _, time = duration.rpartition("-")
    hours, minutes, seconds = map(int, time.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def start_again() -> None:
    """Let Slurm end this process's job, and restart it when it can.

    It may have decided so itself: for a dead node, or a job that preempts this one.
    """
    if rendezvous := os.environ.get(RENDEZVOUS):
        (Path(rendezvous) / "again").touch()  # for the script, which has Slurm's commands
        return
    try:
        call("scontrol", "requeue", _current_job())
    except SlurmError as error:
        if "is pending execution" not in str(error):
            raise


def _least(cpus_per_node: str) -> int:
    """The smallest of Slurm's `72(x2),36`."""
    return min(int(count.partition("(")[0]) for count in cpus_per_node.split(","))


def srun(allocation: Allocation, nodes: Sequence[str], *program: str) -> list[str]:
    """The command that runs `program` once on each of `nodes`, with all the job's CPUs there.

    Without `--cpus-per-task` a step gets one CPU, without `--overlap` it waits for others to end.
    """
    return [
        "srun", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}",
        f"--cpus-per-task={allocation.cpus}",
        "--kill-on-bad-exit=1", "--wait=0", "--mpi=none", "--input=all", *program,
    ]  # fmt: skip
