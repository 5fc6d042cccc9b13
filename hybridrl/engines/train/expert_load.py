"""How evenly a router loads the experts: counts of tokens over an update."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.models.expert_parallel import experts_of
from hybridrl.models.parallel import num_experts
from hybridrl.models.stages import Chunk


class ExpertLoad:
    """Counts the tokens of every expert of this rank's pipeline `chunks`, while it is asked to.

    Recomputed layers count again, and so does padding. Example: of four experts one computes half
    of the tokens and one none. Then `expert_load` is 2.0 and `dead_experts` 0.25.
    """

    def __init__(self, chunks: Sequence[Chunk], num_layers: int, device: torch.device) -> None:
        number = num_experts(chunks[0].model.config)
        self._counts = torch.zeros(num_layers, number, dtype=torch.long, device=device)
        self._counting = False
        for chunk in chunks:
            for index, layer in enumerate(chunk.model.base_model.layers, chunk.offset):
                for module in experts_of(layer):
                    module.register_forward_pre_hook(self._hook(index))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from zero."""
        if self._counts.numel():  # a dense model launches nothing
            self._counts.zero_()
        self._counting = True
        yield
        self._counting = False

    def metrics(self) -> dict[str, float]:
        """Largest load of an expert over the mean, by layer; and the share without a token.

        Over all ranks, which call it together. Both are means over the layers. Empty for a dense
        model.
        """
        if not self._counts.numel():
            return {}
        counts = self._counts.clone()
        dist.all_reduce(counts)
        counts = counts[counts.sum(1) > 0].double()  # other layers are dense
        load = counts.amax(1) / counts.mean(1)
        values = torch.stack([load.mean(), (counts == 0).double().mean()]).tolist()
        return dict(zip(("expert_load", "dead_experts"), values, strict=True))

    def _hook(self, layer: int) -> Any:
        def count(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if self._counting and torch.is_grad_enabled():  # else the pass is repeated
                chosen = inputs[1].flatten()
                self._counts[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

        return count
