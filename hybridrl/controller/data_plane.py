"""Ray's object store as the data plane between ranks."""

from typing import Any


class RayDataPlane:
    """References are wrapped in a list, so that Ray hands them over instead of their values."""

    def put(self, value: Any) -> Any:
        """Write `value` into the node's shared memory, once."""
        import ray

        return [ray.put(value)]

    def get(self, references: list[Any]) -> list[Any]:
        """Values; numpy arrays are read-only views of shared memory when on the same node."""
        import ray

        return ray.get([reference for (reference,) in references])
