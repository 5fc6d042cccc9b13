"""How evenly routers load the experts over an update, and the two ways to even it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from hybridrl.config import TrainerConfig
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.buffers import ROUTING_BIAS
from hybridrl.models.parallel import num_experts
from hybridrl.models.router_balance import RouterLoss, WatchedLayer
from hybridrl.models.router_replay import ExpertShape
from hybridrl.models.stages import Chunk


class ExpertLoad:
    """Counts the tokens of every expert of this rank's pipeline `chunks`, and evens the load.

    It counts the rows that have `token_sequences`, which are those of updates, without what fills
    them up. Recomputation counts all tokens of a layer again.

    Example: of four experts one computes half of the tokens and one none. Then `expert_load` is 2.0
    and `dead_experts` 0.25.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        config: PretrainedConfig,
        trainer: TrainerConfig,
        tp: int,
        device: torch.device,
    ) -> None:
        """`config` is that of the whole model. `tp` ranks have the same tokens."""
        layers = ExpertShape.of(config).layers if num_experts(config) else ()
        # Experts under other names than those of most families are not counted (GraniteMoE's).
        self.experts = num_experts(config) if layers else 0
        # Of the whole model's layers with experts.
        self._counts = torch.zeros(len(layers), self.experts, dtype=torch.long, device=device)
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._coef, self._tp = trainer.router_aux_loss_coef, tp
        self._rate = trainer.router_bias_update_rate
        # Each with its place in the counts. Offloading replaces biases, so they are looked up.
        self._routers: list[tuple[int, nn.Module]] = []
        self._loss = RouterLoss(device) if self.experts and self._coef else None
        if self.experts:
            for chunk in chunks:
                own = [*enumerate(decoder_layers(chunk.model), chunk.offset)]
                for number, layer in own:
                    WatchedLayer(number, layer, self.experts, self._observe, self._loss)
                self._routers += [
                    (self._index[number], module)
                    for number, layer in own
                    for module in layer.modules()
                    if ROUTING_BIAS in module._buffers
                ]

    def start(self, sequences: int) -> None:
        """Count an update of so many `sequences`, over all ranks, from zero."""
        if self.experts:  # a dense model launches nothing
            self._counts.zero_()
        if self._loss is not None:
            self._loss.start(self._coef / sequences / len(self._index))

    def metrics(self) -> dict[str, float]:
        """Largest load of an expert over the mean, by layer; and the share without a token.

        Over all ranks, which call it together. Both are means over the layers. With an auxiliary
        loss also its mean over layers and sequences. Empty for a dense model.
        """
        if not self.experts:
            return {}
        dist.all_reduce(self._counts)
        counts = self._counts.double()
        load = counts.amax(1) / counts.mean(1)
        values = torch.stack([load.mean(), (counts == 0).double().mean()]).tolist()
        metrics = dict(zip(("expert_load", "dead_experts"), values, strict=True))
        if self._loss is not None:
            dist.all_reduce(self._loss.value)
            metrics["router_aux_loss"] = self._loss.value.item() / self._tp / self._coef
        return metrics

    @torch.no_grad()
    def move_biases(self) -> None:
        """Raise the biases of experts below the mean load, lower those above, all by the rate.

        By the loads over all ranks, which `metrics` has summed up (arXiv 2408.15664). An expert
        with the mean load keeps its bias.
        """
        if not self._rate:
            return
        missing = self._counts.sum(1, keepdim=True) - self.experts * self._counts
        for index, router in self._routers:
            getattr(router, ROUTING_BIAS).add_(missing[index].sign(), alpha=self._rate)

    def _observe(self, layer: int, counts: torch.Tensor) -> None:
        self._counts[self._index[layer]] += counts.sum(0)
