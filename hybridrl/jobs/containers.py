"""Lines of a batch script for modules and containers.

In a container the driver has none of Slurm's commands. So the script writes the names of the nodes
(`nodes`) to a directory of the run, `$HYBRIDRL_RENDEZVOUS`. It starts the other nodes itself, and
runs the driver. These nodes read the head's address there (`head`). They end with their standard
input, which only the driver's process holds open.

In a job that may restart, the script stays as the driver's parent. It forwards Slurm's warning, and
requests the restart that the driver wants (`again`).
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hybridrl.config import ConfigError, Container, SlurmClusterConfig
from hybridrl.runtime.slurm import RENDEZVOUS

_MODULES = """\
for init in "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash" \\
    "${MODULESHOME:-/usr/share/modules}/init/bash" \\
    /etc/profile.d/lmod.sh /etc/profile.d/modules.sh; do
    type module >/dev/null 2>&1 && break
    if [ -r "$init" ]; then . "$init"; fi
done"""
_MEET = """\
# Slurm's commands are outside of the container; what they would say is left for it here.
export {variable}={directory}/slurm/rendezvous-$SLURM_JOB_ID
rm -rf "${variable}"  # of the job before it started again
mkdir -p "${variable}" {directory}/logs
scontrol show hostnames "$SLURM_JOB_NODELIST" > "${variable}/nodes"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')
step="--overlap --ntasks-per-node=1 --cpus-per-task=${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}"
step="$step --kill-on-bad-exit=1 --wait=0 --mpi=none --input=all\""""
_OTHERS = """\
others=$(grep -vx "$SLURMD_NODENAME" "${variable}/nodes" | paste -sd,)
# They end with the run, whose process holds their standard input open.
exec {{link}}> >(exec srun $step --nodes={number} --ntasks={number} \\
    --nodelist="$others"{command})"""
_AROUND = """\
# Slurm's warning comes to this script alone, what ends the job to the run as well.
trap 'kill -USR1 "$run"' USR1
trap : TERM
{command} &
run=$!
while kill -0 "$run" 2>/dev/null; do wait "$run" || true; done
wait "$run" || code=$?
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}  # an array's number is that of all its tasks
if [ -e "${variable}/again" ] &&
    ! scontrol show job "$job" | grep -qE 'State=(CANCELLED|COMPLETING)'; then
    scontrol requeue "$job" || true
fi
exit "${{code:-0}}\""""
_FIRST = 'srun $step --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME"'
_MORE = " \\\n    "


def check_image(cluster: SlurmClusterConfig) -> None:
    """Raise ConfigError for an image path that does not exist."""
    image = cluster.image
    if image and image.startswith(("/", ".")) and not Path(image).exists():
        raise ConfigError("cluster.image", image, "a file that exists, or docker://...")


def load_modules(cluster: SlurmClusterConfig) -> list[str]:
    """Lines that load `cluster.modules`, also in a batch shell without `module`."""
    if not cluster.modules:
        return []
    return [_MODULES, f"module load {shlex.join(cluster.modules)}"]


def meet_and_start_nodes(
    cluster: SlurmClusterConfig, directory: str, mounts: Sequence[Path]
) -> list[str]:
    """Lines before the driver; `directory` is the run's, as a word of the shell."""
    lines = [_MEET.format(variable=RENDEZVOUS, directory=directory)]
    if cluster.nodes > 1:
        options, words = _run_in(cluster, mounts)
        program = ["-m", "hybridrl.runtime.ray_node", f"--ranks={cluster.ranks_per_node}"]
        program += [f"--gpus={cluster.gpus_per_node}", f"--logs={directory}/logs"]
        if cluster.object_store_mb:
            program.append(f"--object-store-mb={cluster.object_store_mb}")
        if cluster.local_scratch is not None:
            program.append(f"--scratch={shlex.quote(cluster.local_scratch)}")
        arguments = [*options, " ".join([*words, "-P", *program])]
        command = "".join(f"{_MORE}{line}" for line in arguments)
        lines.append(_OTHERS.format(variable=RENDEZVOUS, number=cluster.nodes - 1, command=command))
    return lines


def stay_around(command: str) -> str:
    """The driver's `command`, and the restart after it, for a job that may restart."""
    return _AROUND.format(command=command, variable=RENDEZVOUS)


def driver(cluster: SlurmClusterConfig, mounts: Sequence[Path]) -> str:
    """The words before `-P -m hybridrl.cli ...`, the driver on the job's first node."""
    options, words = _run_in(cluster, mounts)
    if cluster.container is Container.pyxis:
        return _MORE.join([_FIRST, *options, " ".join(words)])
    return " ".join(words)


def _run_in(cluster: SlurmClusterConfig, mounts: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Options of srun, and the words that run Python in the container."""
    python, image = shlex.quote(cluster.python or "python3"), shlex.quote(str(cluster.image))
    binds = [f"{path}:{path}" for path in mounts] + cluster.mounts
    bound = shlex.quote(",".join(binds))
    if cluster.container is Container.pyxis:
        workdir = f"--container-workdir={shlex.quote(str(mounts[0]))}"
        return [f"--container-image={image}", f"--container-mounts={bound}", workdir], [python]
    nvidia = ["--nv"] if cluster.gpus_per_node else []
    return [], ["apptainer", "exec", *nvidia, "--bind", bound, image, python]
