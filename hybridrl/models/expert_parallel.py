"""Experts over several ranks in training: each rank holds some, and tokens go to them and back.

As in torchtitan, experts have separate axes (`layout.grouping.TrainAxes`). There ep splits the
experts, and FSDP shards those of a rank over the ranks that are left. No expert is cut by tp: its
ranks, which have the same tokens, each send a share of them instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers.integrations.moe import grouped_mm_experts_forward

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs [rows, features] of a rank's experts, from rows and the number of each row's expert."""


TokenDispatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Compute], torch.Tensor]
"""Brings tokens to the ranks of their experts, and sums what the experts make of them.

From this rank's tokens [tokens, features], their experts and weights [tokens, k], and `Compute` on
a rank's experts, numbered from 0: the weighted sum of each token's experts [tokens, features],
differentiable. Ranks may have different numbers of tokens, or none. All ranks of an ep group call
it together.
"""


class AllToAll:
    """A row for each token and expert goes to the expert's rank, and its output comes back."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group, self.num_experts = group, num_experts

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """See `TokenDispatch`."""
        ranks, (tokens, k) = self.group.size(), chosen.shape
        # Rows by expert, so by rank. The host needs both sides' numbers of rows: one sync.
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(self.num_experts + 1, device=chosen.device)
        sent = torch.searchsorted(experts, numbers).diff()
        received = funcol.all_to_all_single(sent, None, None, self.group)
        to, of = torch.stack([sent, received]).view(2, ranks, -1).sum(-1).tolist()
        rows = funcol.all_to_all_single_autograd(hidden[order // k], of, to, self.group)

        local = numbers[: self.num_experts // ranks].repeat(ranks)
        outputs = compute(rows, local.repeat_interleave(received, output_size=sum(of)))

        outputs = funcol.all_to_all_single_autograd(outputs, to, of, self.group)
        outputs = outputs * weights.flatten()[order, None]
        return outputs[order.argsort()].view(tokens, k, hidden.shape[1]).sum(1)


def stay(
    hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, compute: Compute
) -> torch.Tensor:
    """The `TokenDispatch` of ranks that hold every expert."""
    outputs = compute(hidden.repeat_interleave(chosen.shape[1], 0), chosen.flatten())
    return (outputs.view(*chosen.shape, hidden.shape[1]) * weights[..., None]).sum(1)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])])


def apply_expert_parallel(
    modules: Sequence[nn.Module], ep: DeviceMesh | None, tp: DeviceMesh | None
) -> None:
    """Split transformers' experts `modules` over the ranks of `ep`; ranks of `tp` share tokens.

    Parameters [experts, ...] become DTensors on `ep`'s axis. Without `ep` every rank holds them.
    """
    for module in modules:
        number: Any = module.num_experts
        dispatch: TokenDispatch = stay
        if ep is not None:
            dispatch = AllToAll(ep.get_group(), number)
            for name, parameter in list(module.named_parameters(recurse=False)):
                # src_data_rank None: every rank has loaded the same weights, nothing is sent.
                tensor = distribute_tensor(parameter.data, ep, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(tensor, parameter.requires_grad))
        module.forward = _Forward(module, dispatch, tp)


def experts_of(model: nn.Module) -> list[nn.Module]:
    """transformers' modules of a layer's experts, whose parameters are [experts, ...]."""
    named = model.named_modules()
    return [m for name, m in named if name.endswith(".experts") and list(m.parameters(False))]


class _Forward:
    """The forward pass of a module of experts."""

    def __init__(self, module: nn.Module, dispatch: TokenDispatch, tp: DeviceMesh | None) -> None:
        self._module, self._dispatch, self._tp = module, dispatch, tp

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As transformers': tokens [tokens, features], their experts and weights [tokens, k]."""
        if self._tp is None:
            return self._dispatch(hidden, chosen, weights, self._compute)
        of_rank = [_own_share(x, self._tp) for x in (hidden, chosen, weights)]
        outputs = self._dispatch(of_rank[0], of_rank[1], of_rank[2], self._compute)
        return _joined(outputs, hidden, self._tp)

    def _compute(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """`Compute` by transformers' own products."""
        number = len(rows)
        if not number:  # so that experts get a gradient on all ranks: zeros
            rows, experts = _padded(rows, 1), _padded(experts, 1)
        ones = torch.ones_like(rows[:, :1])
        return LocalExperts(self._module)(rows, experts[:, None], ones)[:number]


class LocalExperts:
    """A rank's experts as transformers' functions read them: plain tensors, fewer experts.

    `elsewhere`: a choice of `num_experts` is an expert of another rank, and adds nothing.
    """

    def __init__(self, module: nn.Module, elsewhere: bool = False) -> None:
        self._module = module
        self._is_expert_parallel = elsewhere  # transformers from 5.20 on asks for it
        named = module.named_parameters(recurse=False)
        self._weights = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in named}
        self.num_experts = len(next(iter(self._weights.values())))

    def __getattr__(self, name: str) -> Any:
        weights = self.__dict__["_weights"]
        return weights[name] if name in weights else getattr(self._module, name)

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """transformers' forward pass."""
        if self.takes_grouped_products():
            return grouped_mm_experts_forward(self, hidden, chosen, weights)
        elsewhere = chosen == self.num_experts
        loop: Any = type(self._module).forward
        chosen, weights = chosen.masked_fill(elsewhere, 0), weights.masked_fill(elsewhere, 0)
        return loop.__wrapped__(self, hidden, chosen, weights)

    def takes_grouped_products(self) -> bool:
        """Whether torch's `grouped_mm` takes the weights: rows of 16 bytes each, no float64."""
        weights = [w for w in self._weights.values() if w.ndim > 2]
        widths = {size * w.itemsize for w in weights for size in w.shape[1:]}
        return all(w.dtype != torch.float64 for w in weights) and not any(w % 16 for w in widths)


def _own_share(x: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """This rank's tokens of `x`, the same on all ranks; so is the gradient, which is gathered."""
    whole = DTensor.from_local(x, tp, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def _joined(x: torch.Tensor, like: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """The tokens of all ranks, of the shape of `like`; the inverse of `_own_share`."""
    share = DTensor.from_local(
        x.contiguous(), tp, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
    )
    return share.redistribute(placements=[Replicate()]).to_local()
