"""Settings whose package a bare machine lacks: one line says what to install."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hybridrl.config import Config, ConfigError, SourceConfig, SourceKind, compose
from hybridrl.data.files import read_files
from hybridrl.preflight.packages import check_packages, check_ray
from hybridrl.preflight.prepare import build_recipe

ABSENT = {
    "aiohttp", "datasets", "math_verify", "peft", "psutil", "pyarrow", "ray", "reasoning_gym",
    "tensordict", "triton", "verl",
}  # fmt: skip
"""What `make test-bare` has not, and a run may want."""
BARE = ("cluster=processes", "cluster.ranks=1", "data=jsonl", "data.sources.main.name=a.jsonl")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which none of `ABSENT` is found."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ABSENT else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def checked(overrides: Sequence[str]) -> Config:
    compose.register()
    config = compose.check([*BARE, "cluster.device=cpu", *overrides])
    check_ray(config)
    check_packages(config)
    return config


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("cluster.ranks=2", "cluster.ranks=2: wanted 1, or first: pip install psutil ray"),
        ("cluster.rank_in_driver=false", "cluster.rank_in_driver=false: wanted true, or first: "
                                         "pip install psutil ray"),
        ("cluster=local", "cluster=local: wanted processes, or first: "
                          "pip install ray verl tensordict psutil"),
        ("actor.lora.rank=4", "actor.lora.rank=4: wanted 0, or first: pip install peft"),
        (
            "roles.critic.lora.rank=4",
            "roles.critic.lora.rank=4: wanted 0, or first: pip install peft",
        ),
        ("data.sources.main.kind=parquet", "data.sources.main.kind=parquet: wanted jsonl, csv or "
                                           "function, or first: pip install pyarrow"),
        ("data.sources.main.kind=huggingface", "or first: pip install datasets"),
        ("data.sources.main.kind=reasoning_gym", "or first: pip install reasoning-gym"),
        ("reward=math", "reward.kind=math: wanted another, or first: pip install math-verify"),
        ("telemetry.samples=all", "telemetry.samples=all: wanted first, or first: "
                                  "pip install pyarrow"),
    ],
)  # fmt: skip
def test_what_to_install_is_one_line(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked([override])
    assert str(refused.value).endswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("bare")
def test_compiled_layers_on_gpus_need_triton() -> None:
    compiled = ["trainer.compile=true", "cluster.device=cuda"]
    with pytest.raises(ConfigError) as refused:
        checked(compiled)
    assert str(refused.value) == (
        "trainer.compile=true: wanted false, or first: pip install triton"
    )
    checked(["trainer.compile=true"])


@pytest.mark.usefixtures("bare")
def test_layers_that_must_be_fused_on_gpus_need_triton() -> None:
    fused = ["trainer.fuse_layers=always", "cluster.device=cuda"]
    with pytest.raises(ConfigError) as refused:
        checked(fused)
    assert str(refused.value) == (
        "trainer.fuse_layers=always: wanted auto or never, or first: pip install triton"
    )
    checked(["trainer.fuse_layers=always"])
    checked(["cluster.device=cuda"])


@pytest.mark.usefixtures("bare")
def test_a_run_in_the_driver_needs_none() -> None:
    checked([])


def test_here_all_are_installed() -> None:
    checked(["cluster.ranks=2", "actor.lora.rank=4", "reward=math", "telemetry.samples=all"])


def test_a_compressed_file_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl.zst"
    file.touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="or first: pip install pyarrow"):
        [*read_files("data.sources.main", SourceConfig(kind=SourceKind.jsonl, name=str(file)))]


def test_a_recipe_of_a_file_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver alone computes, so nothing is pickled."""
    file = tmp_path / "own.py"
    file.write_text("from hybridrl.recipes.grpo import grpo\n")
    monkeypatch.setitem(sys.modules, "ray", None)
    settings = dict(checked([]).recipe) | {"target": f"{file}:grpo"}
    assert build_recipe(settings).stages
