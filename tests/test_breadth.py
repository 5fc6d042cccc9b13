"""Which tests `.ci/run` has, and which it leaves to `.ci/run all`."""

from types import SimpleNamespace
from typing import Any

from breadth import breadth


class Item(SimpleNamespace):
    """A collected test: its name and marks."""

    __hash__ = object.__hash__

    def __init__(self, name: str, *marks: str) -> None:
        super().__init__(nodeid=f"tests/test_it.py::{name}", marks=marks)

    def iter_markers(self) -> Any:
        return [SimpleNamespace(name=mark) for mark in self.marks]


def cases(name: str, *marks: str) -> list[Any]:
    return [Item(f"{name}[{case}]", *marks) for case in "abcd"]


def test_a_long_test_keeps_its_first_case_and_its_last() -> None:
    long = cases("test_a", "layouts")
    assert breadth([*long, Item("test_b", "long")]) == {*long[1:-1]}
    assert not breadth(long[:3])


def test_a_short_one_and_one_of_different_cases_keep_all() -> None:
    assert not breadth([*cases("test_short"), *cases("test_each", "layouts", "each")])


def test_what_is_wide_is_left_out_whatever_else_it_is() -> None:
    wide: Any = Item("test_a", "wide", "vllm")
    assert breadth([wide, Item("test_b", "vllm")]) == {wide}
