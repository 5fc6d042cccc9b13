"""The floor plan: who may import whom, and how long files and functions may be.

Imports are read with `ast`, those inside functions too: a lazy import is still an import. The
exceptions are listed, so that a new one is a decision.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from statements import statements

ROOT = Path(__file__).parents[1]
MAX_FILE, MAX_FUNCTION, MAX_RECIPE = 600, 100, 150

# Each room with the rooms that it imports: the floor plan in AGENTS.md, from the top down.
# An arrow that no import uses fails, and so does one that points up.
FLOOR_PLAN = """
__init__      notebook
recipes       flow algorithms config
notebook      serving driver preflight telemetry config
cli           serving jobs doctor plan replay driver preflight runtime telemetry system config
serving       driver preflight runtime workers checkpoint engines algorithms flow models
              pipelines telemetry system config
jobs          driver runtime telemetry system config
doctor        runtime compat sandbox costs models telemetry system config
plan          preflight schedule flow costs models layout telemetry system config
replay        driver preflight checkpoint data schedule telemetry config
driver        preflight runtime workers checkpoint data environments rewards sandbox
              schedule flow costs models layout pipelines telemetry system config
preflight     runtime workers checkpoint data environments rewards engines
              schedule flow costs models layout pipelines system config
runtime       compat workers telemetry system config
compat        workers telemetry system config
workers       checkpoint data rewards engines flow costs models layout telemetry
              system config
checkpoint    engines models layout telemetry config
data          environments models config
environments  rewards sandbox config
rewards       sandbox engines models config
sandbox       config
schedule      flow costs config
engines       algorithms models layout kernels pipelines system config
flow          costs config
costs         layout pipelines config
algorithms    config
models        layout kernels config
layout        config
kernels
pipelines
telemetry     config
system        config
config
conf
"""


def arrows(plan: str) -> dict[str, list[str]]:
    """The rooms that each room may import, from the floor plan; a row may be several lines."""
    table: dict[str, list[str]] = {}
    for line in plan.strip().splitlines():
        names = line.split()
        room = next(reversed(table)) if line.startswith(" ") else names.pop(0)
        table.setdefault(room, []).extend(names)
    return table


ALLOWED = arrows(FLOOR_PLAN)
TORCH_FREE = (
    "config", "costs", "environments", "flow", "pipelines", "plan", "sandbox", "schedule",
    "telemetry", "jobs",
)  # fmt: skip
# Only these touch Ray; `compat` is verl's door, and verl's workers are Ray's.
RAY_ROOMS = {"preflight", "runtime", "jobs", "doctor", "compat"}
# Starting fast: these import the heavy libraries inside functions.
LAZY = {
    "torch": {"driver", "preflight", "replay", "runtime", "doctor", "cli", "system"},
    "ray": {"jobs"},
}


def python_files() -> list[tuple[str, Path]]:
    """Every module of the package with its room; recipes, conf and kernels are next to hybridrl."""
    files = []
    for path in sorted((ROOT / "hybridrl").rglob("*.py")):
        parts = path.relative_to(ROOT / "hybridrl").parts
        files.append((parts[0].removesuffix(".py"), path))
    for room in ("recipes", "conf", "kernels"):
        files += [(room, path) for path in sorted((ROOT / room).rglob("*.py"))]
    return files


FILES = python_files()


def at_import(source: str) -> set[str]:
    """Top-level packages that a module imports as soon as it is imported itself."""
    return {name.split(".")[0] for _, name in imported(ast.parse(source).body)}


@cache
def imports(source: str) -> list[tuple[int, str]]:
    """(line, full dotted name) of every import, wherever it stands."""
    return [*imported(statements(ast.parse(source)))]


def imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of the imports among these statements."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def violations(room: str, source: str, *, pure: bool = False) -> list[str]:
    """What a module of `room` imports and may not; `pure` forbids torch in a room that has it."""
    wrong = []
    for line, name in imports(source):
        parts = name.split(".")
        if parts[0] == "hybridrl" and len(parts) > 1:
            target = parts[1]
            rooms = {r for r, _ in FILES} - {"__init__"}
            if target == "recipes" and room != "recipes":
                wrong.append(f"{line}: {name}: recipes are found by dotted string")
            elif target in rooms and target != room and target not in ALLOWED[room]:
                wrong.append(f"{line}: {name}: {room} may import {sorted(ALLOWED[room])}")
        elif parts[0] in ("torch", "transformers") and (room in TORCH_FREE or pure):
            wrong.append(f"{line}: {name}: {room} is torch-free")
        elif parts[0] == "ray" and room not in RAY_ROOMS:
            wrong.append(f"{line}: {name}: only {sorted(RAY_ROOMS)} touch ray")
        elif parts[0] == "verl" and room != "compat":
            wrong.append(f"{line}: {name}: only compat imports verl")
    for library in at_import(source):
        if room in LAZY.get(library, ()):
            wrong.append(f"{library}: {room} imports it lazily, inside functions")
    return wrong


def module_name(room: str, path: Path) -> str:
    """Dotted name of a module of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "hybridrl" else ("hybridrl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def reaches(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each imports, directly or through others; `sources` by dotted name."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        graph[name] = set()
        for _, target in imports(source):
            while target and target not in sources:
                target = target.rpartition(".")[0]
            graph[name] |= {target} - {"", name}
    return {name: _reached(graph, name) for name in graph}


@cache
def of_package() -> dict[str, set[str]]:
    """The modules that each of the package's imports, directly or through others."""
    return reaches({module_name(room, path): path.read_text() for room, path in FILES})


def circles(reached: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Sets of modules that import each other, lazy imports counted; by what each `reached`."""
    return sorted(
        {
            tuple(sorted(other for other in reached[name] if name in reached[other]))
            for name in reached
            if name in reached[name]
        }
    )


def _reached(graph: Mapping[str, Iterable[str]], name: str) -> set[str]:
    reached: set[str] = set()
    todo = [name]
    while todo:
        new = set(graph[todo.pop()]) - reached
        reached |= new
        todo += new
    return reached


def is_pure_layout(path: Path) -> bool:
    """The planning half of layout: pure data, without torch."""
    return path.parent.name == "layout" and path.name not in (
        "weight_switch.py",
        "box_copies.py",
        "process_groups.py",
        "layerwise.py",
        "adapters.py",
        "push.py",
        "proof.py",
        "copies.py",
    )


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_keep_to_the_floor_plan(room: str) -> None:
    paths = [path for own, path in FILES if own == room]
    assert paths
    wrong = [
        f"{path.relative_to(ROOT)}:{violation}"
        for path in paths
        for violation in violations(room, path.read_text(), pure=is_pure_layout(path))
    ]
    assert wrong == []


def test_the_floor_plan_has_no_more_arrows_than_there_are() -> None:
    rooms = {room for room, _ in FILES}
    used = {
        (room, name.split(".")[1])
        for room, path in FILES
        for _, name in imports(path.read_text())
        if name.startswith("hybridrl.")
    }
    unused = [f"{x} {y}" for x in ALLOWED for y in ALLOWED[x] if (x, y) not in used]
    assert not unused
    assert ALLOWED.keys() == rooms


def test_every_arrow_of_the_floor_plan_points_down() -> None:
    rooms = list(ALLOWED)
    up = [f"{x} {y}" for x in rooms for y in ALLOWED[x] if rooms.index(y) <= rooms.index(x)]
    assert not up


def test_there_is_no_circle() -> None:
    assert not circles(of_package())


@pytest.mark.parametrize(
    ("module", "unknown"),
    [
        ("hybridrl.workers.trainer", ("workers.generator", "workers.colocated", "engines.rollout")),
        ("hybridrl.workers.generator", ("workers.trainer", "workers.colocated", "engines.train")),
    ],
)
def test_trainer_and_generator_do_not_know_each_other(
    module: str, unknown: tuple[str, ...]
) -> None:
    """So each can be alone on a rank: no import leads from one to the other, or its engine."""
    reached = of_package()[module]
    assert "hybridrl.workers.store" in reached
    assert not [
        name for name in reached if name.startswith(tuple(f"hybridrl.{x}" for x in unknown))
    ]


def test_a_circle_is_found_through_a_lazy_import() -> None:
    sources = {
        "p.a": "from p import b",
        "p.b": "def f():\n    from p.c import g",
        "p.c": "import p.a",
        "p.d": "import p.a",
    }
    assert circles(reaches(sources)) == [("p.a", "p.b", "p.c")]


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("flow", "import torch"),
        ("flow", "def f():\n    from torch import nn"),
        ("flow", "from hybridrl.engines.train import interface"),
        ("flow", "from hybridrl import driver"),
        ("engines", "import ray"),
        ("models", "import hybridrl.engines"),
        ("workers", "from hybridrl.driver import x"),
        ("workers", "from verl import DataProto"),
        ("driver", "import verl.single_controller"),
        ("cli", "from hybridrl.recipes.grpo import grpo"),
        ("cli", "import ray"),
        ("preflight", "from torch import nn"),
        ("runtime", "from hybridrl.preflight import prepare"),
        ("preflight", "def f():\n    from hybridrl.driver import run"),
        ("driver", "from hybridrl.plan import mapping_command"),
        ("driver", "def f():\n    from hybridrl.jobs import commands"),
        ("driver", "import ray"),
        ("recipes", "from hybridrl.workers import trainer"),
    ],
)
def test_the_rule_catches(room: str, source: str) -> None:
    assert violations(room, source)


@pytest.mark.long
def test_torch_free_rooms_bring_neither_torch_nor_ray() -> None:
    modules = []
    for room, path in FILES:
        if room in TORCH_FREE:
            modules.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert len(modules) > 10
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        "print(sorted({'torch', 'ray', 'verl', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# What a bare GPU machine lacks, of hybridrl's dependencies.
NOT_BARE = (
    "datasets", "hydra", "math_verify", "mlflow", "omegaconf", "peft", "psutil", "pyarrow", "ray",
    "reasoning_gym", "scipy", "starlette", "tensorboard", "tensordict", "torchao", "trackio",
    "triton", "uvicorn", "verl", "vllm", "wandb",
)  # fmt: skip
# Hydra's part of config, what runs inside vLLM, an optimizer of an extra, a web page, and kernels.
NEEDS_MORE = {
    "hybridrl.config.compose",
    "hybridrl.config.composition",
    "hybridrl.config.recipe_folder",
    "hybridrl.config.recipe_source",
    "hybridrl.config.stored_run",
    "hybridrl.engines.rollout.vllm.images",
    "hybridrl.engines.rollout.vllm.names",
    "hybridrl.engines.rollout.vllm.sampling",
    "hybridrl.engines.rollout.vllm.weights",
    "hybridrl.engines.train.adamw8bit",
    "hybridrl.kernels.decode_triton",
    "hybridrl.kernels.experts_triton",
    "hybridrl.kernels.layer_triton",
    "hybridrl.kernels.linear_log_probs_triton",
    "hybridrl.kernels.paged_attention_triton",
    "hybridrl.kernels.sample_triton",
    "hybridrl.kernels.train_layer_triton",
    "hybridrl.telemetry.watch_app",
}


@pytest.mark.long
def test_rooms_below_runtime_need_torch_and_transformers_alone() -> None:
    names = {
        module_name(room, path)
        for room, path in FILES
        if room in _reached(ALLOWED, "workers") | {"workers"}
    }
    assert names >= NEEDS_MORE
    code = (
        "import gc, importlib, sys\n"
        "gc.disable()\n"  # what is imported stays
        f"for name in {NOT_BARE!r}: sys.modules[name] = None\n"
        f"for name in {sorted(names - NEEDS_MORE)!r}: importlib.import_module(name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def too_long(source: str, max_function: int) -> list[str]:
    """Functions longer than so many lines."""
    return [
        f"{node.name} at line {node.lineno}"
        for node in statements(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno
        and node.end_lineno - node.lineno + 1 > max_function
    ]


@pytest.mark.parametrize("room", ALLOWED)
def test_sizes(room: str) -> None:
    most = MAX_RECIPE if room == "recipes" else MAX_FILE
    sources = {path.relative_to(ROOT): path.read_text() for own, path in FILES if own == room}
    assert sources
    long_files = [str(file) for file in sources if len(sources[file].splitlines()) > most]
    assert long_files == []
    long_functions = [
        f"{file}: {name}"
        for file, source in sources.items()
        for name in too_long(source, MAX_FUNCTION)
    ]
    assert long_functions == []


def test_the_size_rule_catches() -> None:
    assert too_long("def f():\n" + "    pass\n" * MAX_FUNCTION, MAX_FUNCTION)


def test_lazy_imports_are_let_through() -> None:
    assert not violations("doctor", "def main():\n    import ray\n    import torch")
