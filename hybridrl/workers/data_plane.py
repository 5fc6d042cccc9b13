"""The object store through which tensors go from rank to rank; the driver hands it in."""

from dataclasses import replace
from typing import Any, Protocol

from hybridrl.flow.executor import Resume


class SamplesLost(RuntimeError):
    """Values of a rank are no longer in the store: the rank has ended."""


class DataPlane(Protocol):
    """An object store: any rank gets an object that one rank puts, by its reference."""

    has_transfers: bool
    """Whether values travel apart from references, so that they may travel early."""

    def put(self, value: Any) -> Any:
        """Store `value`; the reference is valid while this rank lives."""
        ...

    def get(self, references: list[Any]) -> list[Any]:
        """The values behind `references`, arrays without a copy where the store allows."""
        ...

    def prefetch(self, references: list[Any]) -> None:
        """Begin to bring values to this node, until the present call of the rank ends."""
        ...


class LocalDataPlane:
    """The store of a single process: the reference is the value."""

    has_transfers = False

    def put(self, value: Any) -> Any:
        """`value` itself."""
        return value

    def get(self, references: list[Any]) -> list[Any]:
        """The values themselves."""
        return references

    def prefetch(self, references: list[Any]) -> None:
        """They are here."""


def with_parked(command: Resume, instance_rank: int, data_plane: DataPlane) -> Resume:
    """The command with the parked samples themselves in place of their references.

    They are the share of the rank that is `instance_rank` in its instance. Samples that were put
    together are fetched once.
    """
    share = command.parked.state[instance_rank]
    references = [share[sample] for sample in command.ids]
    distinct = {id(reference): reference for reference in references}
    exports = data_plane.get(list(distinct.values()))
    state = {key: sample for samples in exports for key, sample in samples.items()}
    return replace(command, parked=replace(command.parked, state=state))
