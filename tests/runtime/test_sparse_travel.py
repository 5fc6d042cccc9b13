"""Sparse pushes on two Ray nodes of this machine: an array that nobody needs whole stays there."""

import numpy as np
import pytest
import torch
from ray_pair import pair_of

from hybridrl.flow.executor import LoadWeights
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layout import stages_of_layers
from hybridrl.layout.parameters import Parameter, train_layout
from hybridrl.layout.push import PushPlan, PushSource, PushTarget
from hybridrl.runtime.ray_data_plane import RayDataPlane
from hybridrl.workers.sparse_pushes import DeltaSource, DeltaTarget

pytestmark = pytest.mark.ray

SHAPE = 2000, 1000  # 4 MB: Ray's shared memory, not within a message
NAME, DTYPE = "model.embed_tokens.weight", torch.bfloat16


def push_plan() -> PushPlan:
    parameters = [Parameter(NAME, SHAPE, 0, 0)]
    src = train_layout(parameters, TrainAxes(), stages_of_layers(1, 1), 1)
    return PushPlan.make(src, parameters, 1, 1, 1)


def weights(version: int) -> torch.Tensor:
    """Bits of which a thousandth differ from version to version."""
    random = np.random.default_rng(0)
    values = random.integers(0, 2**15, SHAPE, np.int16)
    for _ in range(version):
        values += random.random(SHAPE) < 1e-3
    return torch.from_numpy(values).view(DTYPE)


class Rank:
    """A process on a node of its own, which pushes or loads."""

    def __init__(self) -> None:
        plan, self.plane = push_plan(), RayDataPlane()
        self.source, self.deltas = PushSource(plan, 0, DTYPE), DeltaSource(self.plane)
        self.target = DeltaTarget(PushTarget(plan, 0, DTYPE), self.plane)
        self.loaded = torch.zeros(SHAPE, dtype=DTYPE)

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def push(self, version: int) -> LoadWeights:
        (array,) = self.source.pack({NAME: weights(version)}, version)
        whole = self.plane.put(array)
        delta = self.deltas.deltas({0: whole}).get(0)
        change = None if delta is None else self.plane.put(delta)
        return LoadWeights(version, arrays=(whole,), deltas=(change,))

    def load(self, command: LoadWeights) -> int:
        """Bytes that came."""
        stats = self.target.load(command, lambda fill: fill({NAME: self.loaded}))
        wanted = weights(command.version).view(torch.int16)
        assert torch.equal(self.loaded.view(torch.int16), wanted)
        return stats.bytes_received


def test_an_array_travels_whole_only_where_it_is_needed() -> None:
    import ray
    from ray.experimental import get_object_locations

    def nodes_with_all(command: LoadWeights) -> list[str]:
        (where,) = get_object_locations([command.arrays[0][0]]).values()
        return sorted(where["node_ids"])

    with pair_of(Rank) as (sender, receiver, here, there):
        first, second, third, fourth = (ray.get(sender.push.remote(v)) for v in range(4))
        whole = 2 * SHAPE[0] * SHAPE[1]
        assert ray.get(receiver.load.remote(first)) == whole
        assert nodes_with_all(first) == sorted([here, there])
        for command in (second, third):
            assert ray.get(receiver.load.remote(command)) < whole / 100
            assert nodes_with_all(command) == [here]
        assert ray.get(receiver.load.remote(second)) > whole  # it has the third
        assert ray.get(receiver.load.remote(fourth)) > whole
        assert nodes_with_all(fourth) == sorted([here, there])
