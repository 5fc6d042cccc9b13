"""One name for one thing, words that the code has replaced, docstrings with a subject.

Names are read with `ast`: classes, functions, arguments, variables and attributes. The name of a
test is a sentence, and hypothesis has a function `given`.
"""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from statements import statements

ROOT = Path(__file__).parents[1]
PACKAGE = ("hybridrl", "recipes", "kernels")
ALL_CODE = (*PACKAGE, "scripts", "tests")

# Identifiers that other names have replaced; docs/architecture.md has the glossary.
REPLACED = {
    "Knowledge", "Gathering", "EarlyStages", "Overlap", "Dataflow", "Carried", "Placed", "Trained",
    "Holder", "Died", "DEATH_S", "Stopped", "TrainingStopped", "Cluster", "ClusterError",
    "RankWorker", "PoolWorker", "ValueWorker", "place_of", "take_whole", "take_parked",
    "gen_place", "Job", "Span", "State", "Limits", "Memory", "beside", "lend", "_take_up",
    "carried", "leftovers", "normalise", "std_normalise", "centre", "reference_decay", "atom",
    "at_end", "asking", "lends", "go_on_from", "MEETING", "HYBRIDRL_MEETING", "meeting", "machines",
}  # fmt: skip

# Names that say nothing of what they hold.
EMPTY_WORDS = {"found", "made", "given", "part"}

# Beginnings of docstrings that need the line above them to be understood.
STUMPS = re.compile(
    r"(Of|That of|Those|The same|Both|What no|And|But|Also|As above|It waits no more)\b"
)


def modules(folders: tuple[str, ...] = PACKAGE) -> list[Path]:
    """Every module of these folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


# The attribute of a node that has its name. A table, since a million nodes are asked.
NAME_IN: dict[type[ast.AST], str] = {
    ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg",
    ast.FunctionDef: "name", ast.AsyncFunctionDef: "name", ast.ClassDef: "name",
    ast.alias: "name", ast.ExceptHandler: "name", ast.MatchAs: "name", ast.MatchStar: "name",
}  # fmt: skip


@lru_cache(maxsize=1)
def parsed(source: str) -> ast.Module:
    """The syntax tree of the source that was asked for last: many trees take a gigabyte."""
    return ast.parse(source)


@lru_cache(maxsize=1)
def identifiers(source: str) -> frozenset[tuple[int, str]]:
    """Line and name of every identifier that `source` defines or uses, keywords of calls too."""
    return frozenset(_identifiers(source))


def _identifiers(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parsed(source)):
        attribute = NAME_IN.get(type(node))
        name = attribute and getattr(node, attribute)
        if isinstance(node, ast.alias):
            name = node.asname or node.name.rpartition(".")[2]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name.startswith("test_"):
            continue
        if name:
            yield node.lineno, name


def replaced(source: str) -> set[tuple[int, str]]:
    """Identifiers that have another name now."""
    return {(line, name) for line, name in identifiers(source) if name in REPLACED}


def empty_words(source: str) -> set[tuple[int, str]]:
    """Identifiers one of whose words says nothing."""
    allowed = {"given"} if "\nfrom hypothesis import" in source else set()
    return {
        (line, name)
        for line, name in identifiers(source)
        if (EMPTY_WORDS - allowed) & set(name.split("_"))
    }


def public_classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Modules by the name of a public class that they define."""
    classes: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for node in statements(parsed(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(module)
    return classes


def type_aliases(sources: dict[str, str]) -> dict[str, list[str]]:
    """Modules by the name of a public type that they write out: `Rows = list[Row]`."""
    aliases: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for node in parsed(source).body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Subscript() | ast.BinOp() | ast.Name() | ast.Attribute(),
                ) if name[0].isupper() and not name.isupper():
                    aliases[name].append(module)
    return aliases


@pytest.mark.long
def test_public_classes_and_types_have_different_names() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in modules()}
    classes, aliases = public_classes(sources), type_aliases(sources)
    assert len(classes) > 200
    assert len(aliases) > 20
    named = {name: classes.get(name, []) + aliases.get(name, []) for name in classes | aliases}
    assert {name: where for name, where in named.items() if len(where) > 1} == {}


@pytest.fixture(scope="module")
def offenders() -> dict[str, dict[str, object]]:
    """What each rule finds in all code, by file; each file is parsed once."""
    offenders: dict[str, dict[str, object]] = {rule.__name__: {} for rule in RULES}
    for path in modules(ALL_CODE):
        source = path.read_text()
        for rule in RULES:
            if names := rule(source):
                offenders[rule.__name__][str(path.relative_to(ROOT))] = names
    return offenders


@pytest.mark.long
@pytest.mark.parametrize("rule", ["replaced", "empty_words", "stumps"])
def test_all_code_keeps_the_rule(rule: str, offenders: dict[str, dict[str, object]]) -> None:
    """No replaced name returns, names say what they hold, docstrings have a subject."""
    assert offenders[rule] == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("found = 1", "found"),
        ("def f(made): pass", "made"),
        ("self._given = x", "_given"),
        ("def part_of(x): pass", "part_of"),
        ("for part in parts: pass", "part"),
        ("f(given=1)", "given"),
        ("from a import part", "part"),
        ("import a.b as made", "made"),
    ],
)
def test_empty_words_are_caught(source: str, name: str) -> None:
    assert {n for _, n in empty_words(source)} == {name}


@pytest.mark.parametrize(
    "source",
    [
        "parts, partial, NotFoundError, foundation = 1, 2, 3, 4",
        "def test_it_is_found(): pass",
        "\nfrom hypothesis import given\n@given\ndef f(): pass",
    ],
)
def test_other_words_are_not_caught(source: str) -> None:
    assert not empty_words(source)


@pytest.mark.parametrize(
    "source", ["class Holder: pass", "def place_of(): pass", "x.at_end = 1", "f(centre=1)"]
)
def test_replaced_names_are_caught(source: str) -> None:
    assert replaced(source)


def test_equal_classes_are_caught() -> None:
    sources = {"a": "class Span: pass\nclass _Own: pass", "b": "class Span: pass\nclass _Own: pass"}
    assert public_classes(sources) == {"Span": ["a", "b"]}


def test_equal_types_are_caught() -> None:
    sources = {"a": "Rows = list[int]\n_Own = dict[str, int]", "b": "Rows = int | str\nMAX = a.b"}
    assert type_aliases(sources) == {"Rows": ["a", "b"]}


# Docstrings


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below attributes and constants too."""
    for node in statements(parsed(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, inspect.cleandoc(text)


def stumps(source: str) -> list[tuple[int, str]]:
    """Docstrings that a reader who meets them alone does not understand."""
    return [(line, text) for line, text in docstrings(source) if STUMPS.match(text)]


RULES = (replaced, empty_words, stumps)


@pytest.mark.parametrize(
    "text", ["Of a rank: its bytes.", "Those that wait.", "The same of a role.", "Both of them."]
)
def test_stumps_are_caught(text: str) -> None:
    assert stumps(f'def f():\n    """{text}"""\n')
    assert not stumps(f'def f():\n    """Office hours: {text}"""\n')
