"""Values that come to a rank's node while its call goes on, on two Ray nodes of this machine."""

import time
from typing import Any

import numpy as np
import pytest
from ray_pair import pair_of

from hybridrl.runtime.ray_data_plane import RayDataPlane

pytestmark = pytest.mark.ray

SIZE = 20_000_000  # bytes: of Ray's shared memory, not within a message


class Rank:
    """A process on a node of its own."""

    def put(self) -> Any:
        return RayDataPlane().put(np.zeros(SIZE, np.uint8))

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def decode(self, references: list[Any], fetches: bool) -> list[str]:
        """The nodes that have the values at the end of a call which does not read them."""
        import ray
        from ray.experimental import get_object_locations

        plane = RayDataPlane()
        if fetches:
            plane.prefetch(references)
        nodes = set[str]()
        until = time.monotonic() + (20 if fetches else 2)
        while time.monotonic() < until and len(nodes) < 2:
            time.sleep(0.1)
            (where,) = get_object_locations([references[0][0]]).values()
            nodes = set(where["node_ids"])
        if fetches:
            begin = time.monotonic()
            (value,) = plane.get(references)
            assert value.nbytes == SIZE
            assert time.monotonic() - begin < 10
        assert ray.is_initialized()
        return sorted(nodes)


def test_values_come_while_a_call_goes_on() -> None:
    import ray

    with pair_of(Rank) as (sender, receiver, here, there):
        left, fetched = ray.get([sender.put.remote() for _ in range(2)])
        assert ray.get(receiver.decode.remote([left], False)) == [here]
        assert ray.get(receiver.decode.remote([fetched], True)) == sorted([here, there])
