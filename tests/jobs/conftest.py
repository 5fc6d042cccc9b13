"""A Slurm of two nodes for the session, and runs of seconds as its jobs."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from script_modules import load_script
from whole_runs import signal_handlers_kept

from hybridrl import cli
from hybridrl.jobs import commands
from hybridrl.runtime import slurm
from hybridrl.system import signals
from hybridrl.telemetry.records import read_lines

ROOT = Path(__file__).parents[2]
TINY = [
    "model.tiny.hidden_size=32", "model.tiny.intermediate_size=64", "model.tiny.num_layers=1",
    "model.tiny.num_heads=2", "model.tiny.num_kv_heads=2", "model.tiny.head_dim=16",
    "data.size=50", "data.eval_size=8", "trainer.prompts_per_step=4", "trainer.steps=2",
    "rollout.max_new_tokens=12", "telemetry.loggers=[]", "telemetry.report=false",
    "warm_start.steps=0",
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
    return load_script("slurm/local_slurm.py")


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
    going_on = ("PENDING", "RUNNING", "COMPLETING")

    def submit(self, *overrides: str) -> dict[str, Any]:
        """The record that `hybridrl submit` prints last."""
        record: dict[str, Any] = json.loads(list(commands.submit(overrides))[-1])
        return record

    def shell(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """`hybridrl ARGS` as a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "hybridrl.cli", *args], cwd=self.folder, text=True,
            capture_output=True, check=False, timeout=200,
        )  # fmt: skip

    def here(self, *args: str) -> "subprocess.CompletedProcess[str]":
        """`hybridrl ARGS` in this process, which has imported what takes seconds."""
        out, err, code = io.StringIO(), io.StringIO(), 0
        streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
        with streams[0], streams[1], signal_handlers_kept():
            try:
                cli.main(args)
            except SystemExit as ended:
                code = int(ended.code or 0)
        return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())

    def state(self, job: str) -> str:
        """Slurm's word for it."""
        return slurm.jobs(job)[0]["JobState"]

    def wait_for(self, condition: Callable[[], bool], job: str = "", timeout: float = 150) -> None:
        """Return when `condition` holds; fails when `job` has ended, or when time is up."""
        end = time.monotonic() + timeout
        while not condition():
            assert not job or self.state(job) in self.going_on, self.printed()
            assert time.monotonic() < end, self.printed()
            time.sleep(0.3)

    def wait(self, job: str, timeout: float = 150) -> str:
        """Wait until the job and its processes have ended; its state."""
        self.wait_for(lambda: self.state(job) not in self.going_on, timeout=timeout)
        return self.state(job)

    def wait_for_restart(self, job: str, number: int) -> None:
        """Wait until Slurm has started the job again for the `number`-th time."""

        def started() -> bool:
            (known,) = slurm.jobs(job)
            return int(known["Restarts"]) >= number and known["JobState"] == "RUNNING"

        self.wait_for(started, timeout=300)  # where a node was dead, Slurm may ping it first

    def wait_for_steps(self, run: str, job: str, more: int = 1) -> None:
        """Wait until the run has made some more steps."""
        number = len(self.steps(run)) + more
        self.wait_for(lambda: len(self.steps(run)) >= number, job)

    def record(self, run: str) -> dict[str, Any]:
        """Its run.json."""
        record: dict[str, Any] = json.loads((self.folder / run / "run.json").read_text())
        return record

    def steps(self, run: str) -> list[int]:
        """The steps that the run has recorded."""
        metrics = self.folder / run / "metrics.jsonl"
        lines = read_lines(metrics) if metrics.is_file() else []
        return [line["step"] for line in lines if "reward_mean" in line]

    def ray_folders(self, run: str) -> list[Path]:
        """Ray's temporary directory on every node, as its log names it."""
        logs = sorted((self.folder / run / "logs").glob("ray-*.log"))
        matches = [re.search(r"/tmp/hrl\w+", log.read_text()) for log in logs]
        return [Path(match[0]) for match in matches if match]

    def left(self) -> list[str]:
        """Processes that are still there of jobs that were submitted here."""
        commands_left = []
        for process in self.slurm.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                env = process.environ()
                if "SLURM_JOB_ID" in env and env["SLURM_SUBMIT_DIR"] == str(self.folder):
                    commands_left.append(" ".join(process.cmdline()))
        return commands_left

    def printed(self) -> str:
        """What all jobs have printed, for a failed assertion."""
        return "\n".join(file.read_text() for file in sorted(self.folder.rglob("*.out")))

    def end(self) -> None:
        """End every job that was submitted here."""
        listed = [line.split() for line in self.slurm.call("squeue", "-h", "-o%i %Z").splitlines()]
        ours = [job for job, folder in listed if folder == str(self.folder)]
        if ours:
            self.slurm.call("scancel", "--signal=KILL", *ours)
            self.slurm.call("scancel", *ours)


@pytest.fixture
def jobs(two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Submits from an empty directory; no job outlives the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "_installed", False)  # see Jobs.here
    ours = Jobs(two_nodes, tmp_path)
    yield ours
    ours.end()


@pytest.fixture(scope="session")
def two(tiny: list[str]) -> list[str]:
    """Overrides of a run of seconds on both nodes."""
    return [*tiny, "cluster.nodes=2", "cluster.ranks=2"]


@pytest.fixture(scope="session")
def exact(two: list[str]) -> list[str]:
    """A run on both nodes that starts again by itself, exact to the last bit."""
    changed = ("trainer.steps", "trainer.save_every")
    kept = [setting for setting in two if not setting.startswith(changed)]
    reward = ["reward=regex", "reward.pattern='(?s)[a-m].*'", "reward.extract=null"]
    settings = [
        "trainer.steps=24",
        "eval.sets.main.every=null",
        "deterministic=strict",
        "cluster.requeue=3",
    ]
    optim = ["trainer.optim.lr=1e-2", "trainer.optim.schedule=linear"]
    return [*kept, *reward, *settings, *optim]


_PATIENT = """\
import time

def score(prompt, response, answer, item):
    time.sleep(0.15)
    return float(response[:1] <= "m")
"""


@pytest.fixture(scope="session")
def pair(
    two_nodes: Any, exact: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Jobs, str, str]]:
    """One run twice, side by side on the same nodes: `whole`, and `short` in jobs of minutes.

    They run while other tests run. Their verifier sleeps for 173 seconds in all. Slurm's
    warning comes in the middle of the run, 150 to 180 seconds after a job's start.
    """
    jobs = Jobs(two_nodes, tmp_path_factory.mktemp("pair"))
    (jobs.folder / "patient.py").write_text(_PATIENT)
    reward = ["reward=function", f"reward.function={jobs.folder}/patient.py:score"]
    limit = ["cluster.time=4", "cluster.warn_s=60", "cluster.requeue=9", "trainer.save_every=20"]
    both = [*(s for s in exact if not s.startswith("reward")), *reward, "trainer.steps=72"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(jobs.folder)
        whole = jobs.submit(*both, "run.dir=whole")["job"]
        short = jobs.submit(*both, *limit, "run.dir=short")["job"]
    yield jobs, whole, short
    jobs.end()
