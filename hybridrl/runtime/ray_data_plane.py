"""Ray's object store as the data plane between ranks."""

from typing import Any


class SamplesLost(RuntimeError):
    """Values of a rank are no longer in the store: the rank has ended."""


class RayDataPlane:
    """References are wrapped in a list, so that Ray hands them over instead of their values."""

    def put(self, value: Any) -> Any:
        """Write `value` into the node's shared memory, once."""
        import ray

        return [ray.put(value)]

    def get(self, references: list[Any]) -> list[Any]:
        """Values; numpy arrays are read-only views of shared memory when on the same node.

        Raises `SamplesLost` if the rank that put a value has ended, since values die with it.
        """
        import ray

        try:
            return ray.get([reference for (reference,) in references])
        except ray.exceptions.ObjectLostError as error:
            raise SamplesLost(
                "samples that another rank had put into the object store are gone, because that"
                f" rank's process has ended ({type(error).__name__})"
            ) from error
