"""How sample tensors go from rank to rank. The store is handed in by the controller."""

from typing import Any, Protocol


class DataPlane(Protocol):
    """An object store: what one rank puts, any rank gets. References pass through the driver."""

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
