"""The kernels of a step's experts: in torch against transformers, interpreted against float64."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from triton_interpreter import interpret, needs_triton

from hybridrl.kernels import decode_torch

# Float32 sums in another order; a result in bfloat16 is off by its last bit, or by two where the
# interpreter cuts bits off.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
SHAPE = {"hidden_size": 40, "num_experts_per_tok": 3}
BLOCKS = {
    "mixtral": lambda: MixtralSparseMoeBlock(
        MixtralConfig(**SHAPE, intermediate_size=24, num_local_experts=7)
    ),
    "qwen3_moe": lambda: Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(**SHAPE, moe_intermediate_size=24, num_experts=7, norm_topk_prob=False)
    ),
}


def by_kernels(kernels, block: nn.Module, x: torch.Tensor, positions: torch.Tensor, shares: int):
    """A block's output by a module's kernels, as the sum of what `shares` ranks have."""
    router, weights = block.gate, (block.experts.gate_up_proj, block.experts.down_proj)
    normalizes = getattr(router, "norm_topk_prob", True)
    logits = nn.functional.linear(x, router.weight)
    scores, chosen = kernels.route(logits, positions, router.top_k, normalizes, x.dtype)
    total, first = torch.zeros_like(x), 0
    for gate_up, down in zip(*(w.chunk(shares) for w in weights), strict=True):
        number = len(gate_up)
        order, ends = kernels.order_by_expert(chosen, first, number)
        rows = kernels.grouped_product(x, gate_up, order, ends, router.top_k)
        rows = kernels.grouped_product(kernels.act_mul(rows), down, order, ends, 1)
        total += kernels.combine(rows, scores, chosen, first, number)
        first += number
    return total


@torch.no_grad()
@pytest.mark.parametrize("shares", [1, 4])
@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_is_that_of_transformers(family: str, shares: int) -> None:
    """On one rank, or on four of which each has some of the experts; a vacant row is zero."""
    torch.manual_seed(0)
    block = BLOCKS[family]().double()
    for parameter in block.parameters():
        parameter.normal_(0, 0.5)
    x, positions = torch.randn(9, 40).double(), torch.arange(9)
    positions[4] = -1
    wanted = block(x[None])[0]
    wanted[4] = 0
    got = by_kernels(decode_torch, block, x, positions, shares)
    # Measured: 3e-6, since transformers' softmax is in float32.
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_the_example_of_the_docstring() -> None:
    order, ends = decode_torch.order_by_expert(torch.tensor([[4, 3], [7, 4]]).int(), 3, 2)
    assert (order.tolist(), ends.tolist()) == ([1, 0, 3, 2], [1, 3])


# Experts, a token's, its share of them, and widths: fewer and more rows than a tile has, widths
# that tiles do not divide, more pairs than a program orders, experts without a row.
CASES = [(5, 2, (0, 5), 40, 24), (8, 3, (4, 4), 130, 72), (300, 4, (0, 300), 16, 8)]
TOKENS = 50


def inputs(case, dtype):
    """Tokens, of which one does not exist, logits and weights of experts."""
    torch.manual_seed(1)
    experts, _, (_, number), hidden, features = case
    x, positions = torch.randn(TOKENS, hidden).to(dtype), torch.arange(TOKENS).int()
    positions[7] = -1
    gate_up = (torch.randn(number, 2 * features, hidden) * hidden**-0.5).to(dtype)
    down = (torch.randn(number, hidden, features) * features**-0.5).to(dtype)
    return x, positions, torch.randn(TOKENS, experts).to(dtype) * 2, gate_up, down


def computed(kernels, case, tensors, dtype):
    """What each of the kernels gives, from the same inputs in both modules."""
    x, positions, logits, gate_up, down = tensors
    _, per_token, (first, number), *_ = case
    weights, chosen = kernels.route(logits, positions, per_token, True, dtype)
    order, ends = kernels.order_by_expert(chosen, first, number)
    wide = kernels.grouped_product(x, gate_up, order, ends, per_token)
    rows = kernels.grouped_product(wide[:, ::2].contiguous(), down, order, ends, 1)
    return weights, chosen, order, ends, kernels.combine(rows, weights, chosen, first, number)


def interpreted(cases):
    """Every case in one batch, and by some tokens alone."""
    interpret()
    from hybridrl.kernels import experts_triton

    results = []
    for case, dtype in cases:
        x, positions, logits, *weights = inputs(case, dtype)
        batch = computed(experts_triton, case, (x, positions, logits, *weights), dtype)
        alone = [
            computed(experts_triton, case, (x[i], positions[i], logits[i], *weights), dtype)[-1]
            for i in (slice(0, 1), slice(30, 33))
        ]
        results.append((batch, torch.cat(alone)))
    return results


@pytest.mark.long
@needs_triton
def test_kernels_equal_float64_in_every_batch(fresh_ranks) -> None:
    cases = [(case, torch.float32) for case in CASES] + [(CASES[1], torch.bfloat16)]
    (results,) = fresh_ranks(1, interpreted, cases)
    for (case, dtype), (batch, alone) in zip(cases, results, strict=True):
        wide = [x.double() if x.is_floating_point() else x for x in inputs(case, dtype)]
        wanted = computed(decode_torch, case, wide, torch.float64)
        for got, want in zip(batch, wanted, strict=True):
            if want.is_floating_point():
                error = (got.double() - want).abs().max()
                assert error <= TOLERANCES[dtype] * max(1.0, float(want.abs().max())), case
            else:
                assert torch.equal(got, want), case
        _, chosen, *_, out = batch
        assert (chosen[7] == -1).all()
        assert not out[7].any(), "a token that does not exist has no experts"
        assert len(set(chosen.flatten().tolist())) > 3
        assert torch.equal(alone, torch.cat([out[:1], out[30:33]])), "numbers depend on the batch"
