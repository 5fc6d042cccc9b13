"""Dispatch of a worker's methods over the ranks: plain marks that the driver translates."""

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

_MARK, _CONCURRENT = "hybridrl_dispatch", "hybridrl_concurrent"
F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """The arguments that each rank gets. Every method answers once per rank that it ran on."""

    SAME = "same"  # all ranks, the same arguments
    PER_RANK = "per_rank"  # all ranks; each argument is a list with one entry per rank


def dispatch(mode: Dispatch, concurrent: bool = False) -> Callable[[F], F]:
    """Mark a worker's method as callable from the driver.

    A rank runs one method at a time; those marked `concurrent` run in another thread meanwhile, one
    after the other.
    """

    def mark(method: F) -> F:
        setattr(method, _MARK, mode)
        setattr(method, _CONCURRENT, concurrent)
        return method

    return mark


def mode_of(method: Callable[..., Any]) -> Dispatch | None:
    """The dispatch of a worker's method over the ranks; None for one that is not marked."""
    return getattr(method, _MARK, None)


def runs_concurrently(cls: type, name: str) -> bool:
    """Whether a marked method runs in a separate thread."""
    return bool(getattr(getattr(cls, name), _CONCURRENT))


def dispatched_methods(cls: type) -> dict[str, Dispatch]:
    """Names and modes of the marked methods of a worker class."""
    return {
        name: getattr(method, _MARK)
        for name in dir(cls)
        if hasattr(method := getattr(cls, name), _MARK)
    }
