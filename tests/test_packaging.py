"""What pyproject.toml says is what the tree holds, and the wheel alone runs the main job."""

import ast
import fnmatch
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from hybridrl.engines.rollout.available import SUPPORTED

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
# Import name -> folder; their subpackages lie below.
FOLDERS = {
    "hybridrl": "hybridrl",
    "hybridrl.recipes": "recipes",
    "hybridrl.conf": "conf",
    "hybridrl.kernels": "kernels",
}
TOP_LEVEL = {
    *("pyproject.toml", "hybridrl", "recipes", "conf", "kernels", "tests", "scripts", "Makefile"),
    *("README.md", "AGENTS.md", "docs", "LICENSE"),
}


def package_of(folder: Path) -> str | None:
    """Import name of a folder of the tree, None outside of the packages."""
    for name, top in FOLDERS.items():
        if folder.parts[:1] == (top,):
            return ".".join((name, *folder.parts[1:]))
    return None


def requirements() -> list[Requirement]:
    """What hybridrl depends on, extras included."""
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(text) for text in sum(extras, project["dependencies"])]


def test_top_level_holds_only_what_the_plan_lists(tracked_files: list[Path]) -> None:
    names = {file.parts[0] for file in tracked_files}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_packages_equal_the_tree(tracked_files: list[Path]) -> None:
    folders = {file.parent for file in tracked_files if file.suffix == ".py"}
    in_tree = {package_of(folder) for folder in folders} - {None}
    assert SETUPTOOLS["package-dir"] == FOLDERS  # setuptools finds the packages below each
    distribution = Distribution()
    apply_configuration(distribution, ROOT / "pyproject.toml")
    distribution.set_defaults()
    assert in_tree <= set(distribution.packages)


def test_every_file_that_is_no_module_is_package_data(tracked_files: list[Path]) -> None:
    """A page, a config or a mark that no pattern names is missing from the wheel."""
    missing = []
    for file in tracked_files:
        package = package_of(file.parent)
        if package is None or file.suffix == ".py":
            continue
        names = package.split(".")
        owners = [".".join(names[:length]) for length in range(1, len(names) + 1)]
        if not any(
            fnmatch.fnmatch("/".join((*names[owner.count(".") + 1 :], file.name)), pattern)
            for owner in owners
            for pattern in SETUPTOOLS["package-data"].get(owner, ())
        ):
            missing.append(str(file))
    assert not missing


@pytest.mark.long
def test_what_is_imported_is_a_dependency(tracked_files: list[Path]) -> None:
    distributions = importlib.metadata.packages_distributions()
    declared = {requirement.name.lower().replace("_", "-") for requirement in requirements()}
    inside = {"hybridrl", *sys.stdlib_module_names}
    comes_with = {"triton": "torch", "mlflow": "mlflow-skinny"}
    by_make = {"vllm"}  # an extra can neither detect CUDA nor leave dependencies out
    missing = set()
    for file in tracked_files:
        if file.suffix != ".py" or package_of(file.parent) is None:
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - inside - by_make:
                providers = distributions.get(top, [comes_with.get(top, top)])
                if not {name.lower().replace("_", "-") for name in providers} & declared:
                    missing.add(f"{file}: {top}")
    assert not missing


def pinned(file: str) -> dict[str, str]:
    """The versions that a file of requirements names, by normalized name."""
    lines = (ROOT / "scripts" / file).read_text().lower().replace("_", "-").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and line[0] != "#")


def test_constraints_lie_in_the_ranges() -> None:
    pins = pinned("constraints.txt")
    assert {"torch", "transformers", "ray", "verl", "tensordict", "hydra-core"} <= pins.keys()
    for requirement in requirements():
        pin = pins.get(requirement.name.lower().replace("_", "-"))
        assert pin is None or requirement.specifier.contains(pin), requirement


def test_vllm_is_pinned_where_it_is_installed_and_checked() -> None:
    install = (ROOT / "scripts/install_vllm.sh").read_text()
    version = re.search(r"^version=([\d.]+)$", install, re.MULTILINE)
    assert version
    assert version[1].startswith(f"{SUPPORTED}.")


def test_requirements_of_vllm_have_one_version_each() -> None:
    base, vllm = pinned("constraints.txt"), pinned("constraints-vllm.txt")
    assert not base.keys() & vllm.keys()
    for line in (ROOT / "scripts/vllm-cpu.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        pin = {**base, **vllm}.get(requirement.name.lower().replace("_", "-"))
        assert pin is None or requirement.specifier.contains(pin), requirement


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_runs_the_main_job_from_an_empty_directory(
    tmp_path: Path, copy_tree: Callable[[Path], Path], install_into: Callable[..., None]
) -> None:
    """In an environment of its own, which sees the libraries here but not this tree."""
    source = copy_tree(tmp_path / "source")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    subprocess.run([*build, source], check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for name in ("py.typed", "telemetry/page/page.js", "recipes/grpo/config.yaml",
                 "recipes/README.md", "conf/experiment/spell_tiny.yaml",
                 "conf/eval/sets/math500.yaml"):  # fmt: skip
        assert f"hybridrl/{name}" in held
    assert not [name for name in held if name.startswith("tests")]

    install_into(tmp_path / "venv", wheel)

    empty, home = tmp_path / "empty", tmp_path / "home"
    empty.mkdir()
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    small = ["warm_start.steps=2", "trainer.steps=1", "trainer.prompts_per_step=4", "data.size=64",
             "eval.sets.main.num_prompts=8", "data.eval_size=8"]  # fmt: skip
    done = subprocess.run(
        [tmp_path / "venv/bin/hybridrl", "train", "experiment=spell_tiny", *small],
        cwd=empty, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert {"accuracy_before", "accuracy_after", "seconds", "run"} <= last.keys()
    assert (empty / last["run"] / "final/model.safetensors").is_file()
    assert (empty / last["run"] / "report.html").is_file()
