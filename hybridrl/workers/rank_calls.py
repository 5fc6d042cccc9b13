"""Calls from the driver to ranks, typed by the worker's own methods."""

import pickle
from collections.abc import Callable
from functools import cached_property
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from hybridrl.flow.sample import SampleId
from hybridrl.workers.base_worker import BaseWorker, Reply
from hybridrl.workers.dispatch import Dispatch, mode_of

Worker = TypeVar("Worker", bound=BaseWorker)
Params = ParamSpec("Params")
First = TypeVar("First")
Second = TypeVar("Second")
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)


class Reference(Generic[Answer_co]):
    """A call that a rank will answer with `Reply[Answer_co]`; its type is the launcher's."""


class SharedIds(tuple[SampleId, ...]):
    """Ids that are an argument of many ranks' calls: they are pickled once, not for every rank.

    A rank gets a plain tuple. To pickle 2,048 ids for each of 256 ranks took 0.7 s.
    """

    def __reduce__(self) -> tuple[Callable[[bytes], tuple[SampleId, ...]], tuple[bytes]]:
        return pickle.loads, (self._pickled,)

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps(tuple(self))


class RankCalls:
    """Calls a launcher's group of ranks. A method of the worker names the call; its signature types
    the arguments and the answer.

    Example: `calls.same(ActorWorker.texts, ids)` gives a `Reference[dict[...]]` for each rank.
    """

    def __init__(self, group: Any) -> None:
        """`group` has the marked methods of a worker; each answers with one reference per rank."""
        self._group = group

    def same(
        self,
        method: Callable[Concatenate[Worker, Params], Reply[Answer]],
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> list[Reference[Answer]]:
        """Start a method of all ranks with the same arguments; one reference per rank."""
        assert mode_of(method) is Dispatch.SAME, f"{method.__qualname__} is called per rank"
        references: list[Reference[Answer]] = getattr(self._group, method.__name__)(*args, **kwargs)
        return references

    def per_rank(
        self,
        method: Callable[[Worker, First, Second], Reply[Answer]],
        first: list[First],
        second: list[Second],
    ) -> list[Reference[Answer]]:
        """Start a method of two arguments on all ranks; each list has one entry per rank."""
        assert mode_of(method) is Dispatch.PER_RANK, f"{method.__qualname__} is called alike"
        references: list[Reference[Answer]] = getattr(self._group, method.__name__)(first, second)
        return references
