"""Products of two numbers, and a tool that has them: the demo of environment=tools."""

from collections.abc import Iterator
from random import Random
from typing import Any


def times(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a * b


TOOLS = [times]


def tasks(seed: int, calls: float = 0.5) -> Iterator[dict[str, Any]]:
    """Rows of kind=function sources: `34*56=`, with the product as the answer.

    `shown` is a response to warm up on. A share `calls` of them has `[times(34,56)]`, what the tool
    says, and `#1904`; the others have `#1904` alone, which a small model can only guess. Products
    have four digits: it would see too few of three to learn to copy them.
    """
    draw = Random(seed)
    while True:
        a, b = draw.randint(32, 99), draw.randint(32, 99)
        shown = f"#{a * b}"
        if draw.random() < calls:
            shown = f"[times({a},{b})]{a * b}{shown}"
        yield {"question": f"{a}*{b}=", "answer": str(a * b), "shown": shown}
