"""Jobs on a real Slurm of two nodes, started for the session: how they run and how they end."""

import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.jobs import commands
from hybridrl.runtime import slurm
from hybridrl.runtime.slurm import SlurmError

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def starting_weights(sweep: Path) -> set[bytes]:
    """What the runs of a sweep began with: one for each seed."""
    return {file.read_bytes() for file in sweep.glob("*/start/model.safetensors")}


@pytest.mark.wide
def test_two_jobs_run_side_by_side(pair: Any) -> None:
    """On the same two nodes at once; nothing that one has is the other's."""
    jobs, *both = pair
    for run, job in zip(("whole", "short"), both, strict=True):
        jobs.wait_for_steps(run, job)
    running = jobs.slurm.call("squeue", "-h", "-tRUNNING", "-o%i %N").splitlines()
    assert sorted(running) == [f"{job} n[1-2]" for job in both]
    folders = [folder for run in ("whole", "short") for folder in jobs.ray_folders(run)]
    assert len(set(folders)) == 4
    assert all(folder.exists() for folder in folders)


@pytest.mark.slow  # half of the time of all tests on Slurm
def test_the_page_does_what_it_says(jobs: Any, tiny: list[str]) -> None:
    """Every command of docs/clusters.md, its runs made small: followed, listed, swept."""
    page = (ROOT / "docs/clusters.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        if "submitit" in block:
            continue  # a test of its own, below
        for line in block.splitlines():
            small = tiny if line.startswith(("hybridrl submit", "hybridrl doctor")) else []
            ranks = ["cluster.ranks=2"] if "nodes=2" in line else ["cluster.ranks=1"]
            args = [*shlex.split(line)[1:], *small, *(ranks if small else [])]
            done = jobs.here(*args)
            assert (done.returncode, done.stderr) == (0, ""), (line, jobs.printed())
            printed = done.stdout.splitlines()
            if "logs -f" in line:
                assert json.loads(printed[-1])["run"] == str(jobs.folder / line.split()[-1])
                assert "rl 2/2" in done.stdout
            elif "status runs/first" in line:
                assert re.fullmatch(r"\d+  COMPLETED \(exit 0\)  runs/first\n", done.stdout)
    job = Path("runs/seeds/slurm/job").read_text().strip()
    for task in range(4):
        assert jobs.wait(f"{job}_{task}") == "COMPLETED", jobs.printed()
        assert jobs.record(f"runs/seeds/{task}")["state"] == "finished"
    assert len(starting_weights(Path("runs/seeds"))) == 4
    assert slurm.jobs(f"{job}_9") == []
    listed = [f"{job}_{task}  COMPLETED (exit 0)  runs/seeds/{task}" for task in range(4)]
    assert list(commands.status(["runs/seeds"])) == listed
    assert jobs.left() == []


@pytest.mark.slow
def test_the_doctor_looks_at_both_nodes(jobs: Any, two: list[str]) -> None:
    """From a login node: a job of its own, whose report comes back; nothing stays."""
    done = jobs.shell("doctor", "--json", *two)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["works"], report["findings"]
    assert sorted(info["node"] for info in report["nodes"]) == ["n1", "n2"]
    assert (sorted(report["node_of"]), report["hidden"]) == (["n1", "n2"], [])
    assert {link["kind"] for link in report["links"]} == {"all_reduce", "send"}
    assert {(disk["node"], disk["role"]) for disk in report["disks"]} == {
        (node, role) for node in ("n1", "n2") for role in ("run.dir", "scratch")
    }
    assert all(abs(offset) < 1 for offset, _ in report["clocks"].values())  # it is one machine
    assert jobs.left() == []
    assert not list(jobs.folder.rglob("*"))


@pytest.mark.slow
def test_hydras_submitit_launcher(jobs: Any, small: list[str]) -> None:
    """The page's command; submitit warns where Slurm has no accounting, as here."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra submitit")
    page = (ROOT / "docs/clusters.md").read_text()
    command = re.search(r"^hybridrl (train -m .*submitit.*)$", page, re.MULTILINE)
    assert command
    done = jobs.shell(*shlex.split(command[1]), *small, "cluster.ranks=1")
    assert done.returncode == 0, done.stderr
    for task in range(2):
        assert jobs.record(f"runs/submitit/{task}")["state"] == "finished"
    jobs.wait_for(lambda: jobs.left() == [], timeout=30)  # it returns when they have answered


@pytest.mark.slow
def test_scripts_given_to_sbatch_by_hand(jobs: Any, tiny: list[str], two: list[str]) -> None:
    """The script of a run, and the template of an array: five jobs on two nodes at once."""
    text = "\n".join(commands.submit(["--dry-run", *two, "run.dir=run"]))
    script = Path("run/slurm/job.sh")
    script.parent.mkdir(parents=True)
    script.write_text(f"{text}\n")
    sbatch = ["sbatch", "--parsable"]
    run = jobs.slurm.call(*sbatch, str(script)).strip()
    options = ["--gres=none", "--cpus-per-task=2", "--output=%A_%a.out"]
    template = str(ROOT / "scripts/slurm/seeds.sbatch")
    seeds = jobs.slurm.call(*sbatch, *options, template, *tiny, "cluster.ranks=1").strip()

    for job in (run, *(f"{seeds}_{task}" for task in range(4))):
        assert jobs.wait(job, timeout=400) == "COMPLETED", jobs.printed()
    assert jobs.record("run")["state"] == "finished"
    assert len(starting_weights(Path("runs") / seeds)) == 4
    assert jobs.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["apptainer", "pyxis"])
def test_both_nodes_in_containers(
    jobs: Any, exact: list[str], kind: str, stub_containers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose driver and ranks are where there is no Slurm, and /tmp is another one.

    Slurm's warning reaches the driver, and its job starts again.
    """
    monkeypatch.setenv("PATH", f"{stub_containers}{os.pathsep}{os.environ['PATH']}")
    image = stub_containers / "train.sif"
    job = jobs.submit(
        *exact, f"cluster.container={kind}", f"cluster.image={image}",
        f"cluster.python={sys.executable}", "run.dir=run",
    )["job"]  # fmt: skip
    jobs.wait_for_steps("run", job)
    jobs.slurm.call("scancel", "--batch", "--signal=USR1", job)
    jobs.wait_for_restart(job, 1)
    assert jobs.wait(job, timeout=300) == "COMPLETED", jobs.printed()
    assert re.search(r"stopped after step \d+.*the job starts again \(1 of 3\)", jobs.printed())
    assert jobs.steps("run") == list(range(1, 25))
    assert jobs.record("run")["state"] == "finished"
    record = json.loads(Path("run/environment.json").read_text())
    assert record["container"] == str(image)
    assert sorted(node["node"] for node in record["nodes"]) == ["n1", "n2"]
    jobs.wait_for(lambda: jobs.left() == [], timeout=30)


@pytest.mark.parametrize(
    ("overrides", "error", "line"),
    [
        ("cluster.partition=gpu", ConfigError, "cluster.partition=gpu: wanted one of main, urgent"),
        ("cluster.nodes=4 cluster.ranks=4", ConfigError,
         "cluster.nodes=4: wanted at most the 2 of partition main"),
        ("cluster.cpus_per_node=99", ConfigError,
         "cluster.nodes=2: wanted at most the 0 of partition main with 99 CPUs or more"),
        ("cluster.memory_per_node=9T", SlurmError,
         "sbatch: Memory specification can not be satisfied; Batch job submission failed:"
         " Requested node configuration is not available"),
        ("cluster.time=soon", SlurmError, "sbatch: Invalid --time specification"),
        ("model=pretrained model.path=/nope", ConfigError,
         "model.path=/nope: wanted a directory that exists, or a hub name"),
        ("cluster.container=apptainer cluster.image=./nope.sif", ConfigError,
         "cluster.image=./nope.sif: wanted a file that exists, or docker://..."),
        ("run.dir=full", ConfigError,
         "run.dir=full: wanted a directory that is not there yet, or empty"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_nothing_is_submitted(
    jobs: Any, two: list[str], overrides: str, error: type[Exception], line: str
) -> None:
    Path("full").mkdir()
    Path("full/notes").touch()
    before = jobs.slurm.call("squeue", "-h", "-o%i").split()
    with pytest.raises(error) as raised:
        list(commands.submit([*two, *overrides.split()]))
    assert str(raised.value) == line
    # Some jobs of earlier tests may have left the queue meanwhile.
    assert set(jobs.slurm.call("squeue", "-h", "-o%i").split()) <= set(before)
    assert [path.name for path in jobs.folder.rglob("*")] == ["full", "notes"]


def test_the_command_line_refuses_with_one_line(jobs: Any, two: list[str]) -> None:
    done = jobs.shell("submit", *two, "cluster.partition=gpu")
    line = "hybridrl: cluster.partition=gpu: wanted one of main, urgent\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    done = jobs.here("cancel", "4000000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hybridrl: job=4000000: wanted a job that Slurm knows\n"


def test_cancel_leaves_no_process(jobs: Any, two: list[str]) -> None:
    """Nor does a run that may start again: its ranks die as those of a dead node do."""
    run = "100% y=1"  # what scontrol shows of it is of Slurm's own making
    long = [
        *two,
        "trainer.steps=100000",
        "eval.sets.main.every=null",
        "cluster.requeue=3",
        f"run.dir='{run}'",
    ]
    job = jobs.submit(*long)["job"]
    jobs.wait_for_steps(run, job, 2)
    for name in (run, job):  # at two times, so they may differ in a second
        line, *ranks = commands.status([name])
        assert re.match(rf"{job}  RUNNING .* on n\[1-2\]  {run}", line)
        assert [rank.partition(",")[0] for rank in ranks] == ["rank 0", "rank 1"]
    folders = jobs.ray_folders(run)
    with pytest.raises(ConfigError, match=rf"^run.dir={run}: wanted .* job has ended; {job} has"):
        list(commands.submit([*long, "trainer.resume=auto"]))
    begun = time.monotonic()

    assert list(commands.cancel([run])) == [f"cancelled job {job}"]

    assert jobs.wait(job) == "CANCELLED", jobs.printed()
    assert time.monotonic() - begun < 25  # at 30 s Slurm kills
    assert jobs.left() == []
    assert len(folders) == 2
    assert not [folder for folder in folders if folder.exists()]
    assert jobs.record(run)["state"] in ("interrupted", "failed"), jobs.printed()
    assert "starts again" not in jobs.printed()
    assert list(commands.cancel([job])) == [f"job {job} has ended before"]


@pytest.mark.slow
def test_a_node_that_does_not_join_is_named(jobs: Any, two: list[str]) -> None:
    with jobs.slurm.held("n2"):
        submitted = jobs.submit(*two, "cluster.start_timeout_s=30", "run.dir=run")
        jobs.wait_for(lambda: "did not join" in jobs.printed())
    assert jobs.wait(submitted["job"]) == "FAILED"
    (line,) = [x for x in jobs.printed().splitlines() if x.startswith("hybridrl: ")]
    assert line.startswith(
        f"hybridrl: 1 of the 2 nodes of Slurm job {submitted['job']} did not join Ray within"
        f" cluster.start_timeout_s=30: n2; see {jobs.folder}/run/logs/ray-n2.log"
    )
    assert jobs.left() == []


@pytest.mark.slow
def test_what_runs_without_a_wrapper(jobs: Any) -> None:
    """Outside of a job there is no allocation to run on."""
    done = jobs.shell("train", "cluster=slurm", "cluster.gpus_per_node=0", "cluster.ranks=1")
    assert done.returncode == 2
    line = "hybridrl: cluster=slurm: wanted a node of a Slurm job; hybridrl submit makes one\n"
    assert done.stderr == line


def test_no_slurm_here(jobs: Any, two: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent))
        with pytest.raises(ConfigError, match=r"^cluster=slurm: wanted a machine with Slurm \(sin"):
            list(commands.submit(two))
    assert not list(jobs.folder.rglob("*"))
