"""How a worker's method spreads over the ranks: plain marks that the controller translates."""

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

_MARK = "hybridrl_dispatch"
F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """Who gets which arguments. Every method answers once per rank that it ran on."""

    SAME = "same"  # all ranks, the same arguments
    PER_RANK = "per_rank"  # all ranks; each argument is a list with one entry per rank


def dispatch(mode: Dispatch) -> Callable[[F], F]:
    """Mark a worker's method as callable from the controller."""

    def mark(method: F) -> F:
        setattr(method, _MARK, mode)
        return method

    return mark


def dispatched_methods(cls: type) -> dict[str, Dispatch]:
    """Names and modes of the marked methods of a worker class."""
    return {
        name: getattr(method, _MARK)
        for name in dir(cls)
        if hasattr(method := getattr(cls, name), _MARK)
    }
