"""The versions of torch and transformers that hybridrl was tried with, and what is installed.

`pyproject.toml` has the same ranges, which a test compares.
"""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

Release = tuple[int, ...]

TRIED = {"torch": ("2.11.0", "2.14.1"), "transformers": ("5.10.4", "5.24.0")}
"""The oldest and the newest version that the tests of each package have run with."""


def release_of(version: str) -> Release:
    """Return major and minor number: patches of a release count as that release."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def untried(versions: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each of these packages whose version is outside what was tried."""
    for package, (oldest, newest) in TRIED.items():
        version = versions.get(package)
        if version is None or release_of(oldest) <= release_of(version) <= release_of(newest):
            continue
        side = "older" if release_of(version) < release_of(oldest) else "newer"
        yield f"{package} {version} is {side} than what was tried: {oldest} to {newest}"


def installed() -> dict[str, str]:
    """Return the installed versions of the packages of `TRIED`."""
    versions = {}
    for package in TRIED:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def is_installed(module: str) -> bool:
    """Whether a module of this name can be imported, without importing it."""
    spec = importlib.util.find_spec(module)
    # A folder of that name in the working directory, as wandb makes one, has no origin.
    return spec is not None and spec.origin is not None
