"""A sharded model with its optimizer: the steps of a schedule, and those that a caller sets."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.config import OptimConfig, OptimName
from hybridrl.engines.train.muon import MatrixOwners
from hybridrl.engines.train.optim import make_optimizer
from hybridrl.engines.train.update_sums import local_gradients, sum_tied
from hybridrl.engines.train.weights import ModelShards


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """What one optimizer step is made with, in place of the schedule's; `clip_grad_norm` 0: none.

    The names are those of `OptimConfig`.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad_norm: float = 0.0


class SteppedShards(ModelShards):
    """This rank's shards of a model, and the optimizer that writes them.

    Invariant: between steps all ranks have the same `version` (optimizer steps done). The learning
    rate is the schedule's but in a `step`, whose settings are its own.
    """

    compute_dtype: torch.dtype
    version = 0

    def reset_optimizer(self, optim: OptimConfig, total_steps: int) -> None:
        """Restart with empty moments and the schedule at its beginning; weights stay."""
        self.optim, self.total_steps = optim, total_steps
        self._make_optimizer()

    def _make_optimizer(self, steps: int = 0) -> None:
        """Make the optimizer of the present phase, after `steps` of its steps."""
        self.memory.drop_moments()
        owners = None
        if self.optim.name is OptimName.muon:
            owners = MatrixOwners(*self.trained_matrices(), self.compute_dtype, self.device)
        self.optimizer, self.lr_scheduler = make_optimizer(
            self.trained_parameters(), self.optim, self.total_steps, steps, owners
        )

    def resume(self, version: int, steps: int, moments: bool) -> None:
        """Set the state after `steps` optimizer steps of the present phase, `version` in all.

        With `moments` the optimizer allocates them, to be filled in place like the weights
        (`hybridrl.checkpoint.distributed`).
        """
        self._make_optimizer(steps)
        self.version = version
        if moments:
            self.memory.allocate_moments(self.optimizer, steps)
        self._written()

    def step(self, settings: AdamWSettings) -> dict[str, float]:
        """One optimizer step of the gradient that is there, which is gone afterwards. Collective.

        Returns the same metrics on all ranks: `grad_norm` (before clipping), `lr`, and `bad_step`,
        1.0 where the gradient is not finite, so that no rank steps.
        """
        if self.dims.config.num_chunks > 1:
            sum_tied(self.chunks, self.dims)
        gradients, square = local_gradients(self.chunks, self.dims)
        dist.all_reduce(square)
        norm = math.sqrt(float(square))
        own: dict[str, Any] = {
            "lr": settings.lr,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
        }
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group |= own
            self._apply(gradients, norm, settings.clip_grad_norm)
        self.optimizer.zero_grad()
        bad = 0.0 if math.isfinite(norm) else 1.0
        return {"grad_norm": norm, "lr": settings.lr, "bad_step": bad}

    def _apply(self, gradients: list[torch.Tensor], norm: float, limit: float | None) -> None:
        """Step with this rank's shards of a gradient of this `norm`, clipped to the `limit`."""
        if limit and norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        if not self.optimizer.state:
            self.memory.allocate_moments(self.optimizer, steps=0)
        self._written()  # once moments that were away have come
        self.optimizer.step()
        self.version += 1
