"""The batch script of a run, or of a sweep as one job array: plain text that runs by hand, too."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config import Container, RayClusterConfig, SlurmClusterConfig
from hybridrl.jobs import containers

_PLAIN = re.compile(r"[\w/.+@%-]+")  # characters that Hydra reads as they stand


@dataclass(frozen=True)
class BatchScript:
    """The contents of a batch script.

    `directory` is the run's, or a sweep's, whose task number k has the directory `k` in it. `tasks`
    are each task's own overrides: one task, without any, is a single run. `options` follow
    `hybridrl train` (or another `command`) in all of them.
    """

    cluster: SlurmClusterConfig | RayClusterConfig
    directory: Path
    work_dir: Path
    options: tuple[str, ...]
    tasks: tuple[tuple[str, ...], ...] = ((),)
    sweep: bool = False
    command: str = "train"

    @property
    def slurm(self) -> SlurmClusterConfig:
        """The request of the job, of Slurm."""
        assert isinstance(self.cluster, SlurmClusterConfig), self.cluster.kind
        return self.cluster

    @property
    def script(self) -> Path:
        """The path of the script."""
        return self.directory / "slurm" / "job.sh"

    @property
    def run_dirs(self) -> list[Path]:
        """The directory of every run."""
        if not self.sweep:
            return [self.directory]
        return [self.directory / str(task) for task in range(len(self.tasks))]

    def targets(self) -> list[str]:
        """The override of every run that names its directory."""
        return [f"run.dir={_hydra_value(str(path))}" for path in self.run_dirs]

    def log(self, job: str, task: int = 0) -> Path:
        """The path of the output of task number `task` of `job`."""
        name = f"{job}_{task}.out" if self.sweep else f"{job}.out"
        return self.run_dirs[task] / "slurm" / name

    def text(self) -> str:
        """The script."""
        cluster = self.slurm
        # header and environment
        lines = ["#!/bin/bash", f"# By hand: sbatch {shlex.quote(str(self.script))}"]
        lines += [f"#SBATCH {option}" for option in self._directives()]
        lines += ["", "set -e", *containers.load_modules(cluster), *cluster.setup]
        # nodes in containers, which the script starts itself
        python = shlex.quote(cluster.python or sys.executable)
        if cluster.container is not Container.none:
            mounts = [self.work_dir, self.directory]
            directory = shlex.quote(str(self.directory))
            directory += "/$SLURM_ARRAY_TASK_ID" if self.sweep else ""
            lines += containers.meet_and_start_nodes(cluster, directory, mounts)
            python = containers.driver(cluster, mounts)
        # the driver, with each task's own overrides
        command = [f"{python} -P -m hybridrl.cli {self.command}"]
        command += [shlex.quote(option) for option in self.options]
        targets = self.targets()
        if self.sweep:
            lines += ["case $SLURM_ARRAY_TASK_ID in"]
            for number, (overrides, target) in enumerate(zip(self.tasks, targets, strict=True)):
                lines += [f"    {number}) task=({shlex.join((*overrides, target))}) ;;"]
            lines += ["esac"]
            command += ['"${task[@]}"']
        else:
            command += [shlex.quote(targets[0])]
        run = " \\\n    ".join(command)
        inside = cluster.container is not Container.none
        lines.append(containers.stay_around(run) if inside and cluster.requeue else f"exec {run}")
        return "\n".join(lines) + "\n"

    def _restarts(self) -> list[str]:
        """Options of restarts; Slurm warns the script, which is or contains the driver."""
        if not self.slurm.requeue:
            return ["--no-requeue"]
        return ["--requeue", f"--signal=B:USR1@{self.slurm.warn_s}"]

    def _directives(self) -> list[str]:
        cluster = self.slurm
        log = str(self.directory).replace("%", "%%")
        log += "/%a/slurm/%A_%a.out" if self.sweep else "/slurm/%j.out"
        directives = [
            f"--job-name={shlex.quote(self.directory.name)}",
            f"--chdir={shlex.quote(str(self.work_dir))}",
            f"--output={shlex.quote(log)}",
            "--open-mode=append",
            *self._restarts(),
            f"--nodes={cluster.nodes}",
            "--ntasks-per-node=1",
        ]
        if cluster.cpus_per_node is None:
            directives.append("--exclusive")
        for option, value in (
            ("cpus-per-task", cluster.cpus_per_node),
            ("gres", f"gpu:{cluster.gpus_per_node}" if cluster.gpus_per_node else None),
            ("mem", cluster.memory_per_node),
            ("partition", cluster.partition),
            ("account", cluster.account),
            ("qos", cluster.qos),
            ("time", cluster.time),
            ("array", f"0-{len(self.tasks) - 1}" if self.sweep else None),
        ):
            if value is not None:
                directives.append(f"--{option}={value}")
        return [*directives, *cluster.sbatch]


def _hydra_value(text: str) -> str:
    """`text` as the value of an override."""
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"
