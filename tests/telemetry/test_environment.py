"""environment.json: what a run was made from, and never a secret."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest

from hybridrl.config.run import TelemetryConfig
from hybridrl.system.node_info import read_node_info
from hybridrl.system.nvidia_smi import Gpu
from hybridrl.telemetry.environment import capture, essentials, kept
from hybridrl.telemetry.run import Telemetry

QUIET = TelemetryConfig(progress=False, loggers=[])


def git(place: Path, *command: str) -> str:
    user = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(place), *user, *command], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a commit, a change and a new file."""
    place = tmp_path / "repository"
    place.mkdir()
    git(place, "init", "-q")
    (place / "recipe.py").write_text("lr = 1\n")
    git(place, "add", ".")
    git(place, "commit", "-qm", "one")
    (place / "recipe.py").write_text("lr = 2\n")
    (place / "new.py").write_text("")
    monkeypatch.chdir(place)
    return place


def test_a_run_can_be_made_again_from_what_is_recorded(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hybridrl train", "recipe=grpo", "data.prompt=a b"])
    run_dir = tmp_path / "run"
    with Telemetry(run_dir, QUIET, 1) as telemetry:
        telemetry.nodes([asdict(read_node_info())])
    record = json.loads((run_dir / "environment.json").read_text())
    assert record["command"] == "hybridrl train recipe=grpo 'data.prompt=a b'"
    assert record["directory"] == str(repository)
    assert record["packages"]["torch"] == version("torch")
    assert len(record["packages"]) > 50
    assert record["nodes"][0]["cpus"] > 0
    source = record["repositories"][0]
    assert (source["root"], source["commit"]) == (
        str(repository),
        git(repository, "rev-parse", "HEAD"),
    )
    assert source["untracked"] == ["new.py"]
    git(repository, "checkout", "-q", ".")
    git(repository, "apply", str(run_dir / source["patch"]))
    assert (repository / "recipe.py").read_text() == "lr = 2\n"


def test_the_index_of_git_is_left_alone(repository: Path, tmp_path: Path) -> None:
    """A lock of it fails a commit of the user's at that moment, and stays where git is killed."""
    git(repository, "checkout", "-q", ".")
    os.utime(repository / "recipe.py", (0, 0))  # git would note that its bytes are the same
    index = (repository / ".git" / "index").read_bytes()
    with Telemetry(tmp_path / "run", QUIET, 1):
        pass
    assert (repository / ".git" / "index").read_bytes() == index
    record = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert record["repositories"][0]["patch"] is None


def test_a_run_that_goes_on_keeps_what_it_began_with(repository: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with Telemetry(tmp_path / "run", QUIET, 1):
            pass
        git(repository, "commit", "-qam", "two")
        (repository / "recipe.py").write_text("lr = 3\n")
    (old,) = (tmp_path / "run").glob("earlier-*-environment.json")
    commits = [json.loads(file.read_text())["repositories"][0]["commit"]
               for file in (old, tmp_path / "run/environment.json")]  # fmt: skip
    assert commits == git(repository, "rev-list", "--reverse", "HEAD").split()[:2]
    assert len(list((tmp_path / "run").glob("*environment.patch"))) == 2


def test_secrets_stay_out() -> None:
    secret = ("WANDB_API_KEY", "HF_TOKEN", "SLURM_JWT", "RAY_AUTH_TOKEN", "HYDRA_PASSWORD",
              "AWS_SECRET_ACCESS_KEY", "HOME", "NCCL_KEY")  # fmt: skip
    plain = ("SLURM_JOB_ID", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PATH",
             "TOKENIZERS_PARALLELISM", "TORCH_NCCL_BLOCKING_WAIT", "LOADEDMODULES")  # fmt: skip
    assert kept(dict.fromkeys((*secret, *plain), "x")) == dict.fromkeys(sorted(plain), "x")


def test_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("APPTAINER_CONTAINER", "/images/train.sif")
    record, patches = capture()
    assert (record["repositories"], patches) == ([], {})
    assert record["container"] == "/images/train.sif"


def test_what_the_report_shows() -> None:
    node = asdict(read_node_info()) | {"cpus": 64, "cpu": "EPYC", "memory": 2**40}
    node["gpus"] = [asdict(Gpu("H100", 80, 0, "550", "9.0"))] * 8
    record = {
        "command": "hybridrl train", "python": "3.11.7", "packages": {"torch": "2.13", "zlib": "1"},
        "repositories": [{"root": "/src", "commit": "0123456789abcdef", "patch": "x.patch"}],
        "nodes": [{**node, "node": "n1"}, {**node, "node": "n2"}],
    }  # fmt: skip
    assert essentials(record) == [
        ("command", "hybridrl train"),
        ("commit", "0123456789ab of /src, changed: x.patch"),
        ("n1, n2", "64 CPUs (EPYC), 1,024 GiB, 8 x H100 (driver 550)"),
        ("python", "3.11.7"),
        ("torch", "2.13"),
    ]
    assert essentials({}) == []
