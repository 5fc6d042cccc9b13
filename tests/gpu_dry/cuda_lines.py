"""Lines of the package that run only where there is a GPU, and which of them a dry run has run.

A line counts if it calls `torch.cuda`, or stands under a test of a device's type. Such tests are
`device.type == "cuda"`, `cluster.device is Device.cuda` and `is_cuda`. So is a name that was set
from one: a local one, or a field or parameter that a call sets. What follows where the device is
not the CPU counts, too. Lines are named by file, function and text, so that they survive edits
above them.
"""

import ast
import builtins
from collections.abc import Container, Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROOMS = ("hybridrl", "kernels")
_OTHER = {"cuda": "cpu", "cpu": "cuda"}
_MARKS = ("cuda", '"cpu"', "Device.cpu")
"""A module without them tests no device by itself."""


def cuda_lines(source: str, fields: Iterable[str] = ()) -> dict[int, str]:
    """The lines of a module that need a GPU, by number, with their functions.

    `fields` are names of fields and parameters that say whether there is one.
    """
    functions: dict[int, str] = {}
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            names = set(fields) | {
                target.id
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and _side(node.value, set()) == "cuda"
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for number in _in_block(function.body, names):
                functions[number] = function.name
    return functions


def device_fields(source: str) -> set[str]:
    """Fields and parameters that calls of a module set from a test of a device."""
    return {
        keyword.arg
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg and _side(keyword.value, set()) == "cuda"
    }


def _in_block(block: list[ast.stmt], names: set[str]) -> Iterator[int]:
    for index, node in enumerate(block):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.If) and (side := _side(node.test, names)):
            there, elsewhere = (
                (node.body, node.orelse) if side == "cuda" else (node.orelse, node.body)
            )
            yield from _statements(there)
            yield from _in_block(elsewhere, names)
            if side == "cpu" and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue):
                yield from _statements(block[index + 1 :])
            continue
        inner = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        inner += [handler.body for handler in getattr(node, "handlers", [])]
        for statements in inner:
            yield from _in_block(statements, names)
        own: list[ast.AST] = [] if any(inner) else [node]
        if isinstance(node, ast.With):
            own = [item.context_expr for item in node.items]
        if any(_asks_cuda(code, names) for code in own):
            yield node.lineno


def _statements(block: list[ast.stmt]) -> Iterator[int]:
    """The first line of every statement of a block."""
    for statement in block:
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt):
                yield node.lineno


def _side(test: ast.expr, names: set[str]) -> str | None:
    """The device that a test asks for, `cuda` or `cpu`; None for another test."""
    if isinstance(test, ast.BoolOp):
        sides = [_side(value, names) for value in test.values]
        return next((side for side in sides if side), None)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        side = _side(test.operand, names)
        return _OTHER[side] if side else None
    if isinstance(test, ast.Name | ast.Attribute):
        name = test.id if isinstance(test, ast.Name) else test.attr
        if name in names:
            return "cuda"
    text = ast.unparse(test)
    if "is_cuda" in text or "cuda.is_available" in text:
        return "cuda"
    if isinstance(test, ast.Compare) and (device := _named_device(test.comparators[0])):
        same = isinstance(test.ops[0], ast.Eq | ast.Is)
        return device if same else _OTHER[device]
    return None


def _named_device(node: ast.expr) -> str | None:
    """`cuda` or `cpu`, as a text or a member of `Device`."""
    if isinstance(node, ast.Constant):
        return node.value if node.value in ("cuda", "cpu") else None
    text = ast.unparse(node)
    return text.removeprefix("Device.") if text in ("Device.cuda", "Device.cpu") else None


def _asks_cuda(node: ast.AST, names: set[str]) -> bool:
    """Whether a statement calls `torch.cuda`, or chooses a value by the device."""
    return any(
        ast.unparse(x) == "torch.cuda"
        if isinstance(x, ast.Attribute)
        else isinstance(x, ast.IfExp) and _side(x.test, names) is not None
        for x in ast.walk(node)
    )


def package_lines() -> dict[str, dict[int, str]]:
    """`cuda_lines` of every module of the package that has some, by path."""
    files = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    texts = {str(path): path.read_text() for path in files}

    def texts_with(words: Iterable[str]) -> dict[str, str]:  # parsing all takes seconds
        return {path: text for path, text in texts.items() if any(word in text for word in words)}

    fields = set[str]().union(*map(device_fields, texts_with(_MARKS).values()))
    chosen = texts_with([*_MARKS, *fields])
    lines = {path: cuda_lines(text, fields) for path, text in chosen.items()}
    return {path: functions for path, functions in lines.items() if functions}


class LineProbes:
    """Notes the lines that need a GPU as they are reached, in modules that are imported later.

    A call stands before each such statement, so other lines cost nothing.
    """

    def __init__(self, lines: dict[str, dict[int, str]] | None = None) -> None:
        """`lines` by path and number, with their functions: by default those of the package."""
        self._lines = package_lines() if lines is None else lines
        self._reached: set[tuple[str, int]] = set()

    def install(self) -> None:
        """Compile the modules with such lines anew, here and now; no module is in use yet."""
        get_code = SourceFileLoader.get_code

        def probed(loader: SourceFileLoader, name: str) -> Any:
            lines = self._lines.get(loader.path)
            if lines is None:
                return get_code(loader, name)
            tree = _Probes(loader.path, lines).visit(ast.parse(loader.get_data(loader.path)))
            return compile(ast.fix_missing_locations(tree), loader.path, "exec")

        setattr(builtins, _PROBE, lambda path, line: self._reached.add((path, line)))
        SourceFileLoader.get_code = probed  # type: ignore[method-assign]

    def take_reached(self) -> set[tuple[str, int]]:
        """The lines that were run since the last call, by path and number; they are forgotten."""
        reached = set(self._reached)
        self._reached.clear()
        return reached

    def missed(self, reached: set[tuple[str, int]] | None = None) -> list[str]:
        """The lines that are not `reached`, as `file function: text`; by default so far."""
        reached = self._reached if reached is None else reached
        missed = []
        for path, functions in self._lines.items():
            text = Path(path).read_text().splitlines()
            for number in sorted(functions):
                if (path, number) not in reached:
                    name = Path(path).relative_to(ROOT)
                    missed.append(f"{name} {functions[number]}: {text[number - 1].strip()}")
        return missed


_PROBE = "reached_cuda_line"


class _Probes(ast.NodeTransformer):
    """Puts a call before each statement of `lines`."""

    def __init__(self, path: str, lines: Container[int]) -> None:
        self._path, self._lines = path, lines

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if not isinstance(node, ast.stmt) or node.lineno not in self._lines:
            return node
        probe = ast.parse(f"{_PROBE}({self._path!r}, {node.lineno})").body[0]
        for inner in ast.walk(probe):
            ast.copy_location(inner, node)
        return [probe, node]
