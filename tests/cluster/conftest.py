"""A Slurm of two nodes for the session, and runs of seconds as its jobs."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybridrl.cluster import commands, slurm

ROOT = Path(__file__).parents[2]
TINY = [
    "model.tiny.hidden_size=32", "model.tiny.intermediate_size=64", "model.tiny.num_layers=1",
    "model.tiny.num_heads=2", "model.tiny.num_kv_heads=2", "model.tiny.head_dim=16",
    "data.size=50", "data.eval_size=8", "trainer.prompts_per_step=4", "trainer.steps=2",
    "rollout.max_new_tokens=12", "telemetry.tensorboard=false", "telemetry.report=false",
]  # fmt: skip
ON_CPUS = ["cluster=slurm", "cluster.gpus_per_node=0", "cluster.cpus_per_node=2"]


@pytest.fixture(scope="session")
def small() -> list[str]:
    """Overrides of a run of seconds."""
    return TINY


@pytest.fixture(scope="session")
def tiny() -> list[str]:
    """Overrides of a run of seconds as a job without GPUs, on one node unless another is said."""
    return [*ON_CPUS, *TINY]


@pytest.fixture(scope="session")
def local_slurm() -> Any:
    """The module scripts/slurm/local_slurm.py, which is in no package."""
    file = ROOT / "scripts/slurm/local_slurm.py"
    spec = importlib.util.spec_from_file_location("local_slurm", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def two_nodes(local_slurm: Any) -> Iterator[Any]:
    """A running `LocalSlurm`; the commands of this process reach it."""
    if reason := local_slurm.missing():
        pytest.skip(reason)
    with local_slurm.LocalSlurm() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", running.env["SLURM_CONF"])
        patch.setenv("OMP_NUM_THREADS", "1")
        programs = Path(sys.executable).parent  # where hybridrl is
        patch.setenv("PATH", os.pathsep.join((str(programs), running.env["PATH"])))
        yield running


_APPTAINER = r"""#!/bin/bash
# apptainer exec [--nv] --bind A:B,... IMAGE COMMAND, without the image: in a mount namespace with
# a /tmp of its own, in which lies what is bound, and without Slurm's commands.
shift
[ "$1" = --nv ] && shift
bind=$2 image=$3
shift 3
[ -f "$image" ] || exit 255
export APPTAINER_CONTAINER=$image
exec unshare --mount --propagation private bash -c '
    stage=/run/stub-$$ bind=$0
    mkdir -p $stage && mount -t tmpfs tmpfs $stage
    for pair in ${bind//,/ }; do
        mkdir -p "$stage${pair%%:*}" && mount --bind "${pair%%:*}" "$stage${pair%%:*}"
    done
    for file in $(type -ap srun scontrol sbatch); do mount --bind /dev/null "$file"; done
    mount --rbind $stage/tmp /tmp && cd "$PWD" && exec "$@"' "$bind" "$@"
"""
_SRUN = r"""#!/bin/bash
# srun with the options of Pyxis, by the apptainer beside it.
options=()
while [[ $1 == -* ]]; do
    case $1 in
        --container-image=*) image=${1#*=} ;;
        --container-mounts=*) mounts=${1#*=} ;;
        --container-workdir=*) ;;
        *) options+=("$1") ;;
    esac
    shift
done
[ "$image" ] && set -- "$(dirname "$0")/apptainer" exec --bind "$mounts" "$image" "$@"
exec /usr/bin/srun "${options[@]}" "$@"
"""


@pytest.fixture
def stub_containers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an image, and the named seam: programs with the options of containers."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this user may not make a mount namespace (unshare --mount)")
    folder = tmp_path_factory.mktemp("programs")
    for name, text in {"apptainer": _APPTAINER, "srun": _SRUN, "train.sif": ""}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@dataclass
class Jobs:
    """Submits in a working directory of its own, as the command line does, and waits."""

    slurm: Any
    folder: Path

    def submit(self, *overrides: str) -> dict[str, Any]:
        """The record that `hybridrl submit` prints last."""
        found: dict[str, Any] = json.loads(list(commands.submit(overrides))[-1])
        return found

    def shell(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """`hybridrl ARGS` as a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "hybridrl.cli", *args], cwd=self.folder, text=True,
            capture_output=True, check=False, timeout=200,
        )  # fmt: skip

    def state(self, job: str) -> str:
        """Slurm's word for it."""
        return slurm.jobs(job)[0]["JobState"]

    def wait_for(self, condition: Callable[[], bool], job: str = "", timeout: float = 150) -> None:
        """Return when `condition` holds; fails when `job` has ended, or when time is up."""
        end = time.monotonic() + timeout
        while not condition():
            assert not job or self.state(job) in ("PENDING", "RUNNING"), self.printed()
            assert time.monotonic() < end, self.printed()
            time.sleep(0.1)

    def wait(self, job: str, timeout: float = 150) -> str:
        """Wait until the job and its processes have ended; its state."""
        ended = ("PENDING", "RUNNING", "COMPLETING")
        self.wait_for(lambda: self.state(job) not in ended, timeout=timeout)
        return self.state(job)

    def left(self) -> list[str]:
        """Processes of jobs that are still there: all but the daemons, which the fixture has."""
        return [
            " ".join(process.cmdline())
            for process in self.slurm.processes()
            if "SLURM_JOB_ID" in process.environ()
        ]

    def printed(self) -> str:
        """What all jobs have printed, for a failed assertion."""
        return "\n".join(file.read_text() for file in sorted(self.folder.rglob("*.out")))


@pytest.fixture
def jobs(two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Submits from an empty directory; no job outlives the test."""
    monkeypatch.chdir(tmp_path)
    yield Jobs(two_nodes, tmp_path)
    two_nodes.call("scancel", "--signal=KILL", "--state=RUNNING", "--user=root")
    two_nodes.call("scancel", "--user=root")
