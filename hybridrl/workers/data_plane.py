"""The object store through which tensors go from rank to rank; the controller hands it in."""

from typing import Any, Protocol


class DataPlane(Protocol):
    """An object store: any rank gets an object that one rank puts, by its reference."""

    def put(self, value: Any) -> Any:
        """Store `value`; the reference is valid while this rank lives."""
        ...

    def get(self, references: list[Any]) -> list[Any]:
        """The values behind `references`, arrays without a copy where the store allows."""
        ...


class LocalDataPlane:
    """The store of a single process: the reference is the value."""

    def put(self, value: Any) -> Any:
        """`value` itself."""
        return value

    def get(self, references: list[Any]) -> list[Any]:
        """The values themselves."""
        return references
