"""Packages that are not installed, read from their sources: signatures, fields, single functions.

Nothing is imported: a name is looked up with `ast`, and a function runs with names that the test
gives it.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Sources:
    """The Python files below `root`, by the dotted names of their modules."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = cache(self._tree)

    def path(self, module: str) -> Path:
        """The file of a module or package; AssertionError if there is none."""
        path = self.root.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert path.is_file(), f"no module {module}"
        return path

    def _tree(self, module: str) -> ast.Module:
        return ast.parse(self.path(module).read_text())

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` finds a name, of whatever kind, or a submodule."""
        if name in set(_bound_names(self.tree(module).body)):
            return True
        folder = self.root.joinpath(*module.split("."))
        return (folder / name).is_dir() or (folder / f"{name}.py").is_file()

    def find(self, where: str) -> Definition:
        """The function or class at `module:Class.method`."""
        module, _, path = where.partition(":")
        body: list[ast.stmt] = self.tree(module).body
        for name in path.split("."):
            matches = [
                node
                for node in _statements(body)
                if isinstance(node, Definition) and node.name == name
            ]
            assert matches, f"no {where}"
            body = matches[-1].body
        return matches[-1]

    def signature(self, where: str) -> inspect.Signature:
        """Parameters of a function, or of the class's construction, without `self`."""
        node = self.find(where)
        if isinstance(node, ast.ClassDef):
            inits = [n for n in node.body if isinstance(n, Definition) and n.name == "__init__"]
            if not inits:
                kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
                return inspect.Signature(
                    [inspect.Parameter(name, kind, default=None) for name in self.fields(where)]
                )
            (node,) = inits
        assert not isinstance(node, ast.ClassDef)
        return _signature(node.args)

    def fields(self, where: str) -> list[str]:
        """Annotated names of a class, in its order: those of a dataclass."""
        node = self.find(where)
        return [
            statement.target.id
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        ]

    def attributes(self, where: str) -> set[str]:
        """Names that a class's instances have: methods, fields, and what its methods assign."""
        node = self.find(where)
        names = {n.name for n in node.body if isinstance(n, Definition)} | set(self.fields(where))
        for statement in ast.walk(node):
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            names |= {
                target.attr
                for target in targets
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }
        return names

    def value(self, module: str, name: str) -> ast.expr:
        """What a module assigns to a name."""
        values = [
            node.value
            for node in _statements(self.tree(module).body)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if ast.unparse(target) == name
        ]
        assert values, f"no {module}.{name}"
        return values[-1]

    def literal(self, module: str, name: str) -> set[Any]:
        """The values of a `Literal[...]`."""
        value = self.value(module, name)
        assert isinstance(value, ast.Subscript)
        return set(ast.literal_eval(value.slice))

    def load(self, where: str, **names: Any) -> Any:
        """The function or class itself, in a module that has only `names`."""
        node = self.find(where)
        tree = ast.Module([_FUTURE, node], [])
        namespace = dict(names)
        exec(compile(ast.fix_missing_locations(tree), where, "exec"), namespace)
        return namespace[node.name]


_FUTURE = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, also in `if` and `try`, but not in functions."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handled = [statement for handler in node.handlers for statement in handler.body]
            yield from _statements([*node.body, *handled, *node.orelse])


def _bound_names(body: list[ast.stmt]) -> Iterator[str]:
    for node in _statements(body):
        if isinstance(node, Definition):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _signature(args: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    without = len(positional) - len(args.defaults)
    parameters = [
        inspect.Parameter(
            arg.arg,
            kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if number < without else None,
        )
        for number, arg in enumerate(positional)
        if arg.arg not in ("self", "cls")
    ]
    if args.vararg:
        parameters.append(inspect.Parameter(args.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(
            arg.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None
        )
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        parameters.append(inspect.Parameter(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def calls_of(tree: ast.AST, function: str) -> list[ast.Call]:
    """Calls of `function`, as it is written there (`self._engine.step`)."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]


def bind(signature: inspect.Signature, call: ast.Call) -> None:
    """Raise TypeError if the signature does not take a call's arguments; `*` stands for none."""
    positional = [arg for arg in call.args if not isinstance(arg, ast.Starred)]
    signature.bind(*positional, **{word.arg: word.value for word in call.keywords if word.arg})
