"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on the shards of a rank."""

import torch
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw


class ShardedAdamW(AdamW):
    """torch's fused AdamW on this rank's shards alone: a step is by element.

    Equal to torch's on DTensors bit for bit. That one derives a layout for every parameter in its
    first step, which takes seconds, and takes parameters of one mesh alone.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of the parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            adamw(
                [local_shard(parameter) for parameter in parameters],
                [local_shard(parameter.grad) for parameter in parameters],
                [local_shard(state["exp_avg"]) for state in states],
                [local_shard(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state |= moments(parameter, 0, parameter.device)
        return state


def moments(parameter: torch.Tensor, steps: int, device: torch.device) -> dict[str, torch.Tensor]:
    """AdamW's state of a parameter after `steps` steps, both moments zero."""
    return {
        "step": torch.full((), steps, dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor itself."""
    # `to_local` makes a view of it, to keep what a parameter is.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
