"""Dispatches against a loop over all experts in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from hybridrl.models.expert_parallel import AllToAll, Compute, TokenDispatch, stay

EXPERTS, FEATURES, K = 6, 5, 2
CASES = {
    "uneven": ([3, 4, 9], [0.3, 0.3, 0.1, 0.1, 0.1, 0.1]),
    "one expert has all": ([3, 4, 9], [1e6, 1, 0, 0, 0, 0]),
    "experts without tokens": ([5, 1, 2], [0.5, 0, 0.3, 0, 0, 0.2]),
    "ranks without tokens": ([0, 7, 0], [1 / 6] * 6),
    "no tokens": ([0, 0, 0], [1 / 6] * 6),
}


class GatherAll:
    """The reference: every rank gets the tokens of all ranks, and returns its experts' part."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group, self.num_experts = group, num_experts

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        tokens, local = len(hidden), self.num_experts // self.group.size()
        most = torch.tensor(tokens, device=hidden.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        missing = int(most) - tokens
        hidden, weights = (
            funcol.all_gather_tensor_autograd(padded(x, missing), 0, self.group)
            for x in (hidden, weights)
        )
        chosen = funcol.all_gather_tensor(padded(chosen, missing), 0, self.group)
        chosen = chosen - self.group.rank() * local
        token, choice = ((chosen >= 0) & (chosen < local)).nonzero(as_tuple=True)
        outputs = compute(hidden[token], chosen[token, choice]) * weights[token, choice, None]
        total = torch.zeros_like(hidden).index_add(0, token, outputs)
        total = funcol.reduce_scatter_tensor_autograd(total, "sum", 0, self.group)
        return total[:tokens]


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])])


def inputs(counts: list[int], shares: list[float]) -> tuple[torch.Tensor, ...]:
    """Hidden states, experts and their weights of all ranks' tokens, and a matrix an expert."""
    random = torch.Generator().manual_seed(1)
    tokens = sum(counts)
    hidden = torch.randn(tokens, FEATURES, generator=random)
    chosen = torch.zeros(0, K, dtype=torch.long)
    if tokens:
        chosen = torch.tensor(shares).expand(tokens, -1).multinomial(K, generator=random)
    weights = torch.rand(tokens, K, generator=random)
    matrices = torch.randn(EXPERTS, FEATURES, FEATURES, generator=random)
    return hidden, chosen, weights, matrices


def run(
    dispatch: TokenDispatch,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    matrices: torch.Tensor,
) -> list[torch.Tensor]:
    """The output, and the gradients of hidden states, weights and matrices."""
    leaves = [x.clone().requires_grad_() for x in (hidden, weights, matrices)]

    def compute(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ri,rij->rj", rows, leaves[2][experts]).tanh()

    outputs = dispatch(leaves[0], chosen, leaves[1], compute)
    (outputs * torch.arange(1.0, FEATURES + 1)).sum().backward()
    return [outputs.detach(), *(x.grad for x in leaves)]


def of_rank(counts: list[int], shares: list[float]) -> list[list[torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, chosen, weights, matrices = inputs(counts, shares)
    start, local = sum(counts[:rank]), EXPERTS // size
    own = slice(start, start + counts[rank])
    experts = matrices[rank * local : (rank + 1) * local]
    return [
        run(kind(dist.group.WORLD, EXPERTS), hidden[own], chosen[own], weights[own], experts)
        for kind in (AllToAll, GatherAll)
    ]


@pytest.mark.parametrize("case", CASES)
def test_dispatch_equals_one_process(ranks: Callable[..., list[Any]], case: str) -> None:
    counts, shares = CASES[case]
    wanted = run(stay, *inputs(counts, shares))
    for of_kind in zip(*ranks(3, of_rank, counts, shares), strict=True):
        for pieces, whole in zip(zip(*of_kind, strict=True), wanted, strict=True):
            torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-5, atol=1e-6)
