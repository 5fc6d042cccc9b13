"""Muon: momentum made orthogonal, for matrices of decoder layers, on shards of any layout.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon). Step size and weight decay are Moonlight's
(Liu et al., arXiv 2502.16982, section 2.2): 0.2 sqrt(max(rows, columns)) lr. So a step is as large
as AdamW's, and both take one learning rate (`match_rms_adamw` in torch).

Orthogonalization needs the whole matrix. Each goes to one rank and back, as a plan between two
layouts; momentum and weights stay in shards.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hybridrl.engines.train.adamw import ShardedAdamW, local_shard
from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.owners import owner_layouts, restricted
from hybridrl.layout.plan import plan
from hybridrl.layout.process_groups import warm_up
from hybridrl.layout.weight_switch import WeightSwitch, gather_groups

MOMENTUM = 0.95
STEPS = 5
"""Newton-Schulz iterations."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Coefficients of Jordan's quintic: singular values end between 0.7 and 1.2, fast."""


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """U V^T of each matrix U S V^T [..., rows, columns], roughly, in the dtype that it has."""
    a, b, c = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x if wide else x.mT


class MatrixOwners:
    """The trip of the matrices `parameters`, by name, from this rank's shards to owners and back.

    All ranks of the world call its methods together. Matrices are sent in `dtype`, and computed in
    it. Memory: what the rank owns, and its shards, once each in `dtype`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layout` is that of training; it has all names of the model, of all pipeline stages."""
        self.parameters = dict(parameters)
        self._dtype, self._device = dtype, device
        rank, trips = dist.get_rank(), []
        for owners in owner_layouts(layout, layout.rules):
            shards = restricted(layout, owners.rules)
            trips.append((plan(shards, owners), plan(owners, shards)))
        # Before the first exchange: see WeightSwitch.
        groups = [group for trip in trips for way in trip for group in gather_groups(way, rank)]
        warm_up([*groups, dist.group.WORLD], device)
        self._trips = [tuple(WeightSwitch(way, rank, dtype) for way in trip) for trip in trips]

    def orthogonal(self, shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's shards of the orthogonalized matrices, from its `shards` of the matrices.

        The host does not wait for a GPU: the stream orders messages and products.
        """
        results: dict[str, torch.Tensor] = {}
        for there, back in self._trips:
            whole = self._empty(there.destination)
            own_shards = {name: shards[name] for name in there.source if name in shards}
            there.switch(own_shards, whole, waits=False)
            for matrices in whole.values():
                matrices.copy_(orthogonal(matrices))
            own = self._empty(back.destination)
            back.switch(whole, own, waits=False)
            results |= own
        return results

    def _empty(self, local: Mapping[str, LocalTensor]) -> dict[str, torch.Tensor]:
        """Memory for a rank's tensors."""
        return {
            name: torch.empty(tensor.shape, dtype=self._dtype, device=self._device)
            for name, tensor in local.items()
            if tensor.shape is not None
        }


class Muon(Optimizer):
    """Muon on the matrices of `owners`, AdamW on the other `parameters`.

    Both have one learning rate and weight decay. State by parameter: `momentum_buffer` of a matrix,
    AdamW's of others, in the parameter's own layout. Gradients of matrices are overwritten.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        owners: MatrixOwners,
        **adamw: Any,
    ) -> None:
        """`adamw` are AdamW's settings; `lr` and `weight_decay` apply to matrices as well."""
        self.owners = owners
        matrices = list(owners.parameters.values())
        ids = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in parameters if id(parameter) not in ids]
        settings = {name: adamw[name] for name in ("lr", "weight_decay")}
        super().__init__([{"params": matrices, "momentum": MOMENTUM}], settings)
        # One optimizer to callers: they read and change its groups and its state.
        self._adamw = ShardedAdamW([{"params": others}], **adamw)
        self._adamw.state = self.state
        self.param_groups += self._adamw.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; every rank of the world calls it."""
        self._adamw.step()
        group, names = self.param_groups[0], list(self.owners.parameters)
        weights, gradients, momenta = [], [], []
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            weights.append(local_shard(parameter))
            gradients.append(local_shard(parameter.grad))
            momenta.append(local_shard(state["momentum_buffer"]))
        # Nesterov's momentum, in the place of the gradients.
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, momenta, group["momentum"])
        updates = self.owners.orthogonal(dict(zip(names, gradients, strict=True)))
        for name, parameter, weight in zip(names, group["params"], weights, strict=True):
            if name in updates:  # else its shard here is empty
                lr, (*_, rows, columns) = group["lr"], parameter.shape
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(updates[name], alpha=-0.2 * math.sqrt(max(rows, columns)) * lr)
