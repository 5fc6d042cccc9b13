"""The versions that hybridrl was tried with: one range in code, packaging and installed pins."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hybridrl.config.versions import TRIED, installed, release_of, untried

ROOT = Path(__file__).parents[2]
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.mark.parametrize("package", TRIED)
def test_packaging_admits_what_was_tried_and_nothing_else(package: str) -> None:
    (line,) = (line for line in DEPENDENCIES if line.startswith(package))
    admitted, (oldest, newest) = SpecifierSet(line.removeprefix(package)), TRIED[package]
    major, minor = release_of(newest)
    assert oldest in admitted
    assert newest in admitted
    assert f"{major}.{minor + 1}" not in admitted
    major, minor = release_of(oldest)
    assert f"{major}.{minor - 1}.9" not in admitted


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-bare.txt"])
@pytest.mark.parametrize("package", TRIED)
def test_the_pins_are_within(file: str, package: str) -> None:
    """`make test-bare` has the oldest torch and the newest transformers."""
    pins = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "scripts" / file).read_text(), re.MULTILINE))
    oldest, newest = TRIED[package]
    assert Version(oldest) <= Version(pins[package]) <= Version(newest)
    if file == "constraints-bare.txt":
        assert pins[package] == (oldest if package == "torch" else newest)


def test_what_is_installed_here_was_tried() -> None:
    assert installed().keys() == TRIED.keys()
    assert not [*untried(installed())]


@pytest.mark.parametrize(
    ("versions", "lines"),
    [
        ({"torch": "2.10.1"}, ["torch 2.10.1 is older than what was tried: 2.11.0 to 2.14.1"]),
        ({"torch": "2.11.0+cu130"}, []),
        ({"torch": "2.14.9"}, []),
        ({"torch": "2.15.0.dev20261101+cpu", "transformers": "5.9.0"}, [
            "torch 2.15.0.dev20261101+cpu is newer than what was tried: 2.11.0 to 2.14.1",
            "transformers 5.9.0 is older than what was tried: 5.10.4 to 5.24.0",
        ]),
        ({"transformers": "5.25.0"}, [
            "transformers 5.25.0 is newer than what was tried: 5.10.4 to 5.24.0"
        ]),
        ({}, []),
    ],
)  # fmt: skip
def test_versions_outside_are_named(versions: dict[str, str], lines: list[str]) -> None:
    assert [*untried(versions)] == lines
