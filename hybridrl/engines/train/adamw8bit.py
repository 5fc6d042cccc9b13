"""AdamW with moments of 8 bits (Dettmers et al., arXiv 2110.02861), by torchao."""

from typing import Any

import torch
from torch import nn
from torchao.optim import AdamW8bit
from torchao.optim.adam import single_param_adam

from hybridrl.engines.train.adamw import local_shard


class ShardedAdamW8bit(AdamW8bit):
    """torchao's optimizer on this rank's shards alone: a step is by element.

    Moments of shards of 4,096 elements or more, in whole blocks of 256, are codes and a float32
    scale a block; others are float32. Blocks are those of the shard, so another layout has others.
    On CUDA a step is compiled, a parameter at a time; on a CPU it is not.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.zeros(parameter, steps=0)
                self._update(parameter, group, self.state[parameter])

    def _update(
        self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        state["step"] += 1
        beta1, beta2 = group["betas"]
        assert parameter.grad is not None
        local = local_shard(parameter.detach())
        if not local.numel():
            return
        # Compiling takes seconds a shape, which a GPU's memory is worth.
        stance = "default" if local.device.type == "cuda" else "force_eager"
        with torch.compiler.set_stance(stance), torch._dynamo.utils.disable_cache_limit():
            torch.compile(single_param_adam, fullgraph=True, dynamic=False)(
                local,
                local_shard(parameter.grad),
                state["step"],
                local_shard(state["exp_avg"]),
                local_shard(state["exp_avg_sq"]),
                None,
                group["lr"],
                beta1,
                beta2,
                group["weight_decay"],
                group["eps"],
                True,
                False,
            )

    def zeros(self, parameter: nn.Parameter, steps: int) -> dict[str, torch.Tensor]:
        """The state of a parameter after `steps` steps, its moments zero."""
        return {
            "step": torch.tensor(float(steps)),
            "exp_avg": self._new_buffer(parameter, True),
            "exp_avg_sq": self._new_buffer(parameter, False),
        }
