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
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hybridrl.cluster import commands, slurm
from hybridrl.cluster.slurm import SlurmError
from hybridrl.config import ConfigError
from hybridrl.telemetry.records import read_lines

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def two(tiny: list[str]) -> list[str]:
    return [*tiny, "cluster.nodes=2", "cluster.ranks=2"]


def run_json(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return found


def ray_folders(run_dir: Path) -> list[Path]:
    """Ray's temporary directory on every node, as its log names it."""
    logs = sorted((run_dir / "logs").glob("ray-*.log"))
    found = [re.search(r"/tmp/hrl\w+", log.read_text()) for log in logs]
    return [Path(match[0]) for match in found if match]


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
            done = jobs.shell(*args)
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
        assert run_json(Path(f"runs/seeds/{task}"))["state"] == "finished"
    starts = [Path(f"runs/seeds/{task}/start/model.safetensors") for task in range(4)]
    assert len({start.read_bytes() for start in starts}) == 4
    listed = [f"{job}_{task}  COMPLETED (exit 0)  runs/seeds/{task}" for task in range(4)]
    assert list(commands.status(["runs/seeds"])) == listed
    assert jobs.left() == []


def test_the_doctor_looks_at_both_nodes(jobs: Any, two: list[str]) -> None:
    """From a login node: a job of its own, whose report comes back; nothing stays."""
    done = jobs.shell("doctor", "--json", *two)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["works"], found["findings"]
    assert sorted(machine["node"] for machine in found["machines"]) == ["n1", "n2"]
    assert (sorted(found["node_of"]), found["hidden"]) == (["n1", "n2"], [])
    assert {link["kind"] for link in found["links"]} == {"all_reduce", "send"}
    assert {(disk["node"], disk["role"]) for disk in found["disks"]} == {
        (node, role) for node in ("n1", "n2") for role in ("run.dir", "scratch")
    }
    assert all(abs(offset) < 1 for offset, _ in found["clocks"].values())  # it is one machine
    assert jobs.left() == []
    assert not list(jobs.folder.rglob("*"))


def test_hydras_submitit_launcher(jobs: Any, small: list[str]) -> None:
    """The page's command; submitit warns where Slurm has no accounting, as here."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra submitit")
    page = (ROOT / "docs/clusters.md").read_text()
    found = re.search(r"^hybridrl (train -m .*submitit.*)$", page, re.MULTILINE)
    assert found
    done = jobs.shell(*shlex.split(found[1]), *small, "cluster.ranks=1")
    assert done.returncode == 0, done.stderr
    for task in range(2):
        assert run_json(Path(f"runs/submitit/{task}"))["state"] == "finished"
    jobs.wait_for(lambda: jobs.left() == [], timeout=30)  # it returns when they have answered


def test_two_jobs_side_by_side_on_two_nodes(jobs: Any, two: list[str]) -> None:
    """A submitted script given to sbatch again, and a plain template; on both nodes at once."""
    text = "\n".join(commands.submit(["--dry-run", *two, "run.dir=first"]))
    script = Path("first/slurm/job.sh")
    script.parent.mkdir(parents=True)
    script.write_text(f"{text}\n")
    sbatch = ["sbatch", "--parsable"]
    first = jobs.slurm.call(*sbatch, str(script)).strip()
    options = ["--gres=none", "--cpus-per-task=2", "--output=second.out"]
    template = str(ROOT / "scripts/slurm/train.sbatch")
    second = jobs.slurm.call(*sbatch, *options, template, *two, "run.dir=second").strip()

    assert jobs.wait(first) == jobs.wait(second) == "COMPLETED", jobs.printed()
    runs = [Path("first"), Path("second")]
    starts, ends = ([run_json(run)[key] for run in runs] for key in ("started", "ended"))
    assert max(starts) < min(ends), "they were not side by side"
    folders = [folder for run in runs for folder in ray_folders(run)]
    assert len(set(folders)) == 4
    assert not [folder for folder in folders if folder.exists()]
    assert jobs.left() == []


@pytest.mark.parametrize("kind", ["apptainer", "pyxis"])
def test_both_nodes_in_containers(
    jobs: Any, two: list[str], kind: str, stub_containers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose driver and ranks are where there is no Slurm, and /tmp is another one."""
    monkeypatch.setenv("PATH", f"{stub_containers}{os.pathsep}{os.environ['PATH']}")
    image = stub_containers / "train.sif"
    job = jobs.submit(
        *two, f"cluster.container={kind}", f"cluster.image={image}",
        f"cluster.python={sys.executable}", "run.dir=run",
    )["job"]  # fmt: skip
    assert jobs.wait(job) == "COMPLETED", jobs.printed()
    assert run_json(Path("run"))["state"] == "finished"
    record = json.loads(Path("run/environment.json").read_text())
    assert record["container"] == str(image)
    assert sorted(node["node"] for node in record["nodes"]) == ["n1", "n2"]
    jobs.wait_for(lambda: jobs.left() == [], timeout=30)


@pytest.mark.parametrize(
    ("overrides", "error", "line"),
    [
        ("cluster.partition=gpu", ConfigError, "cluster.partition=gpu: wanted one of main"),
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
    before = jobs.slurm.call("squeue", "-h", "-o%i")
    with pytest.raises(error) as raised:
        list(commands.submit([*two, *overrides.split()]))
    assert str(raised.value) == line
    assert jobs.slurm.call("squeue", "-h", "-o%i") == before
    assert [path.name for path in jobs.folder.rglob("*")] == ["full", "notes"]


def test_the_command_line_refuses_with_one_line(jobs: Any, two: list[str]) -> None:
    done = jobs.shell("submit", *two, "cluster.partition=gpu")
    line = "hybridrl: cluster.partition=gpu: wanted one of main\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    done = jobs.shell("cancel", "4000000")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hybridrl: job=4000000: wanted a job that Slurm knows\n"


def test_cancel_leaves_no_process(jobs: Any, two: list[str]) -> None:
    job = jobs.submit(*two, "trainer.steps=100000", "eval.every=0", "run.dir=run")["job"]
    metrics = Path("run/metrics.jsonl")
    jobs.wait_for(lambda: metrics.is_file() and len(read_lines(metrics)) > 2, job)
    assert re.match(rf"{job}  RUNNING .* on n\[1-2\]  run", next(commands.status(["run"])))
    folders = ray_folders(Path("run"))
    begun = time.monotonic()

    assert list(commands.cancel(["run"])) == [f"cancelled job {job}"]

    assert jobs.wait(job) == "CANCELLED"
    assert time.monotonic() - begun < 25  # at 30 s Slurm kills
    assert jobs.left() == []
    assert len(folders) == 2
    assert not [folder for folder in folders if folder.exists()]
    assert run_json(Path("run"))["state"] == "interrupted", jobs.printed()
    assert list(commands.cancel([job])) == [f"job {job} has ended before"]


def test_a_killed_node_is_named(jobs: Any, two: list[str]) -> None:
    submitted = jobs.submit(*two, "trainer.steps=100000", "eval.every=0", "run.dir=run")
    job = submitted["job"]
    metrics = Path("run/metrics.jsonl")
    jobs.wait_for(lambda: metrics.is_file() and len(read_lines(metrics)) > 2, job)

    jobs.slurm.kill_node("n2")
    try:
        jobs.wait_for(lambda: jobs.state(job) != "RUNNING")
    finally:
        jobs.slurm.start_node("n2")

    assert jobs.wait(job) == "FAILED"
    assert run_json(Path("run"))["state"] == "failed"
    lines = Path(submitted["logs"][0]).read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("hybridrl: ")]
    assert re.match(
        r"hybridrl: rank [01] of 2 \(.*\) on node n2 \(pid \d+\) failed: its proc", line
    )
    assert jobs.left() == []


def tensors(run_dir: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and moments of the actor at the end of a run."""
    dcp_to_torch_save(run_dir / "final" / "resume" / "actor", folder / "whole.pt")
    found: dict[str, torch.Tensor] = torch.load(folder / "whole.pt")
    return found


def steps(run_dir: Path) -> list[int]:
    lines = read_lines(run_dir / "metrics.jsonl")
    return [line["step"] for line in lines if "reward_mean" in line]


@pytest.fixture
def long(two: list[str]) -> list[str]:
    """A run of some seconds on two nodes that starts again by itself, exact to the last bit."""
    changed = ("trainer.steps", "trainer.save_every")
    kept = [setting for setting in two if not setting.startswith(changed)]
    reward = ["reward=regex", "reward.pattern='(?s)[a-m].*'", "reward.extract=null"]
    settings = ["trainer.steps=24", "eval.every=0", "deterministic=strict", "cluster.requeue=3"]
    optim = ["trainer.optim.lr=1e-2", "trainer.optim.schedule=linear"]
    return [*kept, *reward, *settings, *optim]


def again(jobs: Any, job: str, count: int) -> None:
    """Wait until Slurm has started the job again so many times; it may want to wait before."""

    def started() -> bool:
        (known,) = slurm.jobs(job)
        if known["JobState"] == "PENDING" and known["Reason"] == "BeginTime":
            jobs.slurm.call("scontrol", "update", f"jobid={job}", "starttime=now")
        return int(known["Restarts"]) >= count and known["JobState"] == "RUNNING"

    jobs.wait_for(started, timeout=200)


def test_short_jobs_end_as_one_long_job_does(jobs: Any, long: list[str], tmp_path: Path) -> None:
    """Warned twice in the middle of the run, as before a time limit; then the same tensors."""
    whole = jobs.submit(*long, "run.dir=whole")["job"]
    assert jobs.wait(whole, timeout=300) == "COMPLETED", jobs.printed()
    job = jobs.submit(*long, "run.dir=chain")["job"]
    for count in (1, 2):
        done = len(steps(Path("chain")))
        jobs.wait_for(lambda n=done: len(steps(Path("chain"))) > n + 3, job)
        jobs.slurm.call("scancel", "--batch", "--signal=USR1", job)
        again(jobs, job, count)
        assert f"the job starts again ({count} of 3)" in jobs.printed()
    assert jobs.wait(job, timeout=300) == "COMPLETED", jobs.printed()
    assert steps(Path("whole")) == steps(Path("chain")) == list(range(1, 25))
    a, b = tensors(Path("whole"), tmp_path), tensors(Path("chain"), tmp_path)
    assert any(name.startswith("exp_avg/") for name in a)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert jobs.left() == []


def test_a_run_whose_node_was_killed_finishes(jobs: Any, long: list[str]) -> None:
    """Named first; the job starts again at once, perhaps more than once before the node is back."""
    submitted = jobs.submit(*long, "trainer.save_every=5", "run.dir=run")
    job = submitted["job"]
    jobs.wait_for(lambda: (Path("run") / "checkpoints" / "step_000005").is_dir(), job)

    jobs.slurm.kill_node("n2")
    try:
        jobs.wait_for(lambda: "the job starts again (1 of 3)" in jobs.printed())
    finally:
        jobs.slurm.start_node("n2")
    again(jobs, job, 1)

    assert jobs.wait(job, timeout=300) == "COMPLETED", jobs.printed()
    lines = Path(submitted["logs"][0]).read_text().splitlines()
    line = next(line for line in lines if line.startswith("hybridrl: "))
    assert re.match(r"hybridrl: rank [01] of 2 \(.*\) on node n2 \(pid \d+\) failed", line)
    assert line.endswith("; the job starts again (1 of 3)")
    assert steps(Path("run")) == list(range(1, 25))
    assert jobs.left() == []


def test_a_run_that_always_dies_ends(jobs: Any, long: list[str]) -> None:
    job = jobs.submit(*long, "cluster.requeue=1", "run.dir=run")["job"]
    for count in (1, 2):
        done = len(steps(Path("run")))
        jobs.wait_for(lambda n=done: len(steps(Path("run"))) > n, job)
        name = "ray::RankWorker"
        next(p for p in jobs.slurm.processes() if p.name().startswith(name)).kill()
        if count == 1:
            again(jobs, job, count)
    assert jobs.wait(job) == "FAILED"
    lines = [line for line in jobs.printed().splitlines() if line.startswith("hybridrl: ")]
    assert lines[0].endswith("; the job starts again (1 of 1)")
    assert lines[1].endswith("; all 1 restarts of cluster.requeue are used up")


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
