"""Batch scripts as text, and settings of cluster=slurm: no Slurm needed."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, Container, SlurmClusterConfig
from hybridrl.config.compose import check, register
from hybridrl.jobs import commands
from hybridrl.jobs.batch import BatchScript
from hybridrl.runtime import ray_node, slurm
from hybridrl.runtime.ray_on_slurm import RayOnSlurm


def make_batch(folder: Path, *options: str, **others: object) -> BatchScript:
    """A batch whose Python is a program that prints its arguments, one a line."""
    cluster = SlurmClusterConfig(**{"ranks": 1, **others})  # type: ignore[arg-type]
    return BatchScript(cluster, folder, folder, tuple(options))


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The arguments that a script gives to Python: what bash makes of its quotes."""
    program = tmp_path / "a python"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))

    def run(batch: BatchScript, **env: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", batch.text()], env=env, check=True, capture_output=True, text=True
        )
        return done.stdout.splitlines()

    return run


def test_options_reach_the_command_as_they_were_given(
    tmp_path: Path, printed: Callable[..., list[str]]
) -> None:
    options = ("recipe=grpo", "data.prompt='a b, $HOME'", 'x="{y: [1,2]}"', "z=*")
    folder = tmp_path / "it's 100% (mine)"
    lines = printed(make_batch(folder, *options))
    assert lines[:4] == ["-P", "-m", "hybridrl.cli", "train"]
    assert lines[4:-1] == list(options)
    escaped = str(folder).replace("'", "\\'")
    assert lines[-1] == f"run.dir='{escaped}'"
    register()
    assert check([lines[-1].replace("run.dir", "data.system_prompt")]).data.system_prompt == str(
        folder
    )


def test_every_task_of_a_sweep_has_its_choice_and_its_directory(
    tmp_path: Path, printed: Callable[..., list[str]]
) -> None:
    cluster = SlurmClusterConfig(ranks=1)
    tasks = (("run.seed=1",), ("run.seed=2",), ("run.seed=a b",))
    batch = BatchScript(cluster, tmp_path / "sweep", tmp_path, ("recipe=grpo",), tasks, sweep=True)
    assert "#SBATCH --array=0-2\n" in batch.text()
    for number, (own,) in enumerate(tasks):
        lines = printed(batch, SLURM_ARRAY_TASK_ID=str(number))
        assert lines[4:] == ["recipe=grpo", own, f"run.dir={tmp_path}/sweep/{number}"]
    assert batch.log("7", 2) == tmp_path / "sweep/2/slurm/7_2.out"


def test_settings_become_directives(tmp_path: Path) -> None:
    folder = tmp_path / "100%"
    text = make_batch(
        folder, nodes=1, gpus_per_node=8, cpus_per_node=32, memory_per_node="200G",
        partition="h100", account="lab", qos="high", time="1-12", sbatch=["--constraint=h100"],
        setup=["module load cuda"],
    ).text()  # fmt: skip
    head, _, body = text.partition("\nset -e\n")
    directives = [line.removeprefix("#SBATCH ") for line in head.splitlines() if "SBATCH" in line]
    assert {
        "--nodes=1", "--gres=gpu:8", "--cpus-per-task=32", "--mem=200G", "--partition=h100",
        "--account=lab", "--qos=high", "--time=1-12", "--constraint=h100", "--no-requeue",
        f"--output={tmp_path}/100%%/slurm/%j.out",
    } <= set(directives)  # fmt: skip
    assert "--exclusive" not in directives
    assert body.startswith("module load cuda\nexec ")
    assert "#SBATCH --exclusive\n" in make_batch(folder).text()
    assert "gres" not in make_batch(folder).text()
    again = make_batch(folder, requeue=3, warn_s=90).text()
    assert "#SBATCH --requeue\n#SBATCH --signal=B:USR1@90\n" in again
    assert "--no-requeue" not in again


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("", "cluster.gpus_per_node=0: wanted the GPUs of each node, or cluster.ranks"),
        ("cluster.gpus_per_node=8 cluster.nodes=2 cluster.ranks=17",
         "cluster.ranks=17: wanted a multiple of cluster.nodes=2"),
        ("cluster.gpus_per_node=8 cluster.ranks=9", "cluster.ranks=9: wanted at most the 8 GPUs"),
        ("cluster.gpus_per_node=8 cluster.address=auto", "cluster.address=auto: wanted null"),
        ("cluster.gpus_per_node=8 cluster.nodes=0", "cluster.nodes=0: wanted 1 or more"),
        ("cluster.gpus_per_node=8 cluster.cpus_per_node=0", "cluster.cpus_per_node=0: wanted 1"),
        ("cluster.gpus_per_node=8 cluster.sbatch=[x]",
         "cluster.sbatch=x: wanted options of sbatch: \"cluster.sbatch=['--constraint=h100']\""),
        ("cluster.gpus_per_node=8 cluster.container=pyxis", "cluster.image=None: wanted an image"),
        ("cluster.gpus_per_node=8 cluster.container=docker",
         "cluster.container=docker: wanted one of none, pyxis, apptainer"),
        ("cluster.gpus_per_node=8 cluster.image=a.sif",
         "cluster.image=a.sif: wanted cluster.container=pyxis or apptainer with it"),
        ("cluster.gpus_per_node=8 cluster.container=apptainer cluster.image=a.sif"
         " cluster.mounts=[data]", "cluster.mounts=data: wanted SOURCE:TARGET or"),
        ("cluster=local cluster.modules=[cuda]", "cluster.modules=[cuda]: wanted cluster=slurm"),
        ("cluster=local cluster.container=pyxis", "cluster.container=pyxis: wanted cluster=slurm"),
        ("cluster=local cluster.partition=h100", "cluster.partition=h100: wanted cluster=slurm"),
        ("cluster=local cluster.requeue=2", "cluster.requeue=2: wanted cluster=slurm"),
        ("cluster=local cluster.nodes=2", "cluster.nodes=2: wanted cluster=slurm"),
    ],
)  # fmt: skip
def test_wrong_settings(overrides: str, line: str) -> None:
    register()
    with pytest.raises(ConfigError) as raised:
        check(["cluster=slurm", *overrides.split()])
    assert str(raised.value).startswith(line)


IN_CONTAINER = {"gpus_per_node": 8, "image": "/images/a b.sif", "mounts": ["/data:/data:ro"]}


def test_modules_are_loaded_where_a_shell_does_not_know_them(tmp_path: Path) -> None:
    """The named seam: an `init` of Lmod that says what it is asked for."""
    init = tmp_path / "lmod/init/bash"
    init.parent.mkdir(parents=True)
    init.write_text('module() { echo "module $*"; }\n')
    text = make_batch(tmp_path, modules=["cuda/12.4", "a b"]).text().partition("exec ")[0]
    env = {"LMOD_PKG": str(tmp_path / "lmod")}
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "module load cuda/12.4 a b\n"
    done = subprocess.run(["bash", "-c", text + "echo on"], capture_output=True, text=True)
    assert done.returncode != 0, "without modules here the job must not go on"
    assert "on" not in done.stdout


def test_apptainer_runs_the_driver_and_the_other_nodes(tmp_path: Path) -> None:
    text = make_batch(
        tmp_path, nodes=2, ranks=2, container=Container.apptainer, **IN_CONTAINER
    ).text()
    bind = f"--bind {tmp_path}:{tmp_path},{tmp_path}:{tmp_path},/data:/data:ro"
    inside = f"apptainer exec --nv {bind} '/images/a b.sif' python3 -P -m hybridrl"
    assert f"\nexec {inside}.cli train \\\n" in text
    assert f"    {inside}.runtime.ray_node --ranks=1 --gpus=8 --logs={tmp_path}/logs)\n" in text
    assert "exec srun $step --nodes=1 --ntasks=1" in text
    alone = make_batch(
        tmp_path, container=Container.apptainer, **IN_CONTAINER | {"gpus_per_node": 0}
    )
    assert "--nv" not in alone.text()
    assert "ray_node" not in alone.text()
    assert "scontrol requeue" not in text
    again = make_batch(tmp_path, requeue=3, container=Container.apptainer, **IN_CONTAINER).text()
    assert f"\n{inside}.cli train \\\n" in again
    assert 'scontrol requeue "$job"' in again


def test_pyxis_gives_both_to_srun(tmp_path: Path) -> None:
    text = make_batch(tmp_path, nodes=2, ranks=2, container=Container.pyxis, **IN_CONTAINER).text()
    options = [
        "--container-image='/images/a b.sif'",
        f"--container-mounts={tmp_path}:{tmp_path},{tmp_path}:{tmp_path},/data:/data:ro",
        f"--container-workdir={tmp_path}",
    ]
    for option in options:
        assert text.count(f"{option} \\\n") == 2
    first = 'exec srun $step --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \\\n'
    assert first in text
    assert "    python3 -P -m hybridrl.cli train \\\n" in text


def test_a_run_directory_that_a_node_does_not_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = tmp_path / "run/logs"
    options = ["--name=n2", "--address=x:1", f"--logs={hidden}", "--ranks=1", "--gpus=0"]
    assert ray_node.main(options) == ray_node.HIDDEN
    assert capsys.readouterr().err == f"hybridrl: node n2 does not see run.dir={hidden.parent}\n"
    job = slurm.Allocation("7", ("n1", "n2"), "n1", 1)
    starting = RayOnSlurm(SlurmClusterConfig(ranks=1), hidden, job)
    said = starting._describe(["n2"], [ray_node.HIDDEN])
    assert f"where run.dir={hidden.parent} is not there: it must be on all nodes: n2;" in said


def test_scratch_is_of_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first directory that is there, with the caches whose variables the user has not set."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.setenv("SLURM_TMPDIR", f"{tmp_path}/not-in-this-container")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert ray_node._node_scratch() == tmp_path
    caches = ray_node._caches(tmp_path)
    assert caches["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{tmp_path}/hybridrl-")
    assert "TRITON_CACHE_DIR" not in caches


def test_one_rank_for_every_gpu() -> None:
    register()
    config = check(["cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=8"])
    assert (config.cluster.ranks, config.cluster.ranks_per_node) == (16, 8)
    assert config.trainer.layout.fsdp == 16


@pytest.mark.long
@pytest.mark.parametrize("level", ["debug", "info"])
def test_a_dry_run_needs_no_slurm_and_leaves_nothing(
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [*tiny, "cluster.ranks=1", "run.seed=3,4", f"log.level={level}"]
    lines = list(commands.submit(["--dry-run", "-m", *settings]))
    checks = " DEBUG hybridrl.driver.dry_run: checking the run in "
    assert (checks in capsys.readouterr().err) == (level == "debug")
    text = "\n".join(lines)
    assert "#SBATCH --array=0-1" in text
    assert "\n    0) task=(run.seed=3 run.dir=" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["recipe=grpo"], "cluster=local: wanted slurm or ray, to submit a run"),
        (["cluster=ray"], "cluster.address=None: wanted the address of a Ray cluster's dashboard"),
        (
            ["cluster=ray", "cluster.address=head:6379"],
            "cluster.address=head:6379: wanted the address of a Ray cluster's dashboard",
        ),
        (
            ["-m", "cluster=ray", "cluster.address=http://head:8265", "run.seed=1,2"],
            "option=-m: wanted a single run with cluster=ray",
        ),
        (["--cfg", "job", "cluster=slurm"], "option=--cfg job cluster=slurm: wanted -m,"),
        (["cluster=slurm", "cluster.gpus_per_node=8", "trainer.stepz=1"], "trainer.stepz=1: "),
        (
            ["-m", "cluster=slurm", "cluster.gpus_per_node=1,8"],
            "cluster.gpus_per_node=1,8: wanted one value: the runs of a sweep are tasks of one job",
        ),
        (["-m", "cluster=slurm", "cluster.gpus_per_node=8", "run.dir=a,b"], "run.dir=a,b: wanted"),
        (
            ["cluster=slurm", "cluster.gpus_per_node=8", "run.dir=/etc/hostname"],
            "run.dir=/etc/hostname: wanted a directory, or nothing that is there",
        ),
        (
            ["cluster=slurm", "cluster.gpus_per_node=8", "cluster.start_timeout_s=-3"],
            "cluster.start_timeout_s=-3.0: wanted above 0",
        ),
        (
            ["cluster=slurm", "cluster.gpus_per_node=8", "trainer.resume=/nope"],
            "trainer.resume=/nope: wanted never, auto, a checkpoint with resume/",
        ),
    ],
)
def test_what_cannot_be_submitted(args: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        list(commands.submit(args))
    assert str(raised.value).startswith(line)


def test_a_task_of_an_array_starts_itself_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the last task is that of the array, by which Slurm would start them all."""
    monkeypatch.setenv("SLURM_JOB_ID", "21")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    assert slurm._current_job() == "21"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "21")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert slurm._current_job() == "21_3"


def test_slurms_numbers() -> None:
    assert slurm._least("72(x2),36") == 36
    assert slurm._seconds("1-02:03:04") == 93_784
    assert slurm._is_over_time({"RunTime": "00:04:02", "TimeLimit": "00:04:00"})
    assert not slurm._is_over_time({"RunTime": "00:03:59", "TimeLimit": "00:04:00"})
    assert not slurm._is_over_time({"RunTime": "1-00:00:00", "TimeLimit": "UNLIMITED"})
