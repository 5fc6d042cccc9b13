"""A moving average of the actor's weights, in the layout of training."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from hybridrl.engines.train.engine import TrainEngine


class MovingAverage:
    """decay average + (1 - decay) weights after every optimizer step of `engine`, in float32.

    It begins as the weights are. Each rank holds the average of its shards, on the host.
    `moved` says whether it has changed since the flag was last cleared.
    """

    def __init__(self, engine: TrainEngine, decay: float) -> None:
        self.engine, self.decay = engine, decay
        self.shards = {name: t.to("cpu", copy=True) for name, t in _local(engine).items()}
        self.version = engine.version
        self.moved = False

    @torch.no_grad()
    def follow(self) -> None:
        """Average the weights in, if they have made a step since the last call."""
        if self.engine.version == self.version:
            return
        for name, weights in _local(self.engine).items():
            self.shards[name].lerp_(weights.cpu(), 1 - self.decay)
        self.version, self.moved = self.engine.version, True

    def as_tensors(self) -> dict[str, DTensor]:
        """The average in the engine's layout.

        It shares the memory of `shards`, on the host: `DTensor.from_local` would copy it to the
        mesh's device, all at once.
        """
        layout = self.engine.named_shards()
        return {
            name: DTensor(shard, layout[name]._spec, requires_grad=False)
            for name, shard in self.shards.items()
        }

    def restore(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Resume from the `shards` of an earlier run, whose weights the engine has already."""
        for name, tensor in shards.items():
            self.shards[name].copy_(tensor)
        self.version, self.moved = self.engine.version, True


def _local(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in engine.named_shards().items()
    }
