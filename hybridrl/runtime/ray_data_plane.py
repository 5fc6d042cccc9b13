"""Ray's object store as the data plane between ranks."""

from typing import Any

from hybridrl.workers.data_plane import SamplesLost


class RayDataPlane:
    """References are wrapped in a list, so that Ray hands them over instead of their values."""

    has_transfers = True

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

    def prefetch(self, references: list[Any]) -> None:
        """Begin to bring values into this node's shared memory, until the rank's call ends.

        A wait that gives up leaves its requests to Ray (ray-project/ray, pull request 5234).
        """
        import ray

        wanted = [reference for (reference,) in references]
        ray.wait(wanted, num_returns=len(wanted), timeout=0, fetch_local=True)
