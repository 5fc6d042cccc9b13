"""The forward pass of a rank's experts against transformers' own."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from hybridrl.models.expert_parallel import LocalExperts
from hybridrl.models.shard import ExpertsShard, GenParallel

HIDDEN, EXPERTS, K = 32, 8, 3
SHAPE = {"hidden_size": HIDDEN, "num_experts_per_tok": K}
WIDTH = {"num_experts": EXPERTS, "moe_intermediate_size": 24}
BLOCKS: dict[str, tuple[Any, PretrainedConfig]] = {
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(**SHAPE, **WIDTH, norm_topk_prob=True)),
    "qwen2_moe": (
        Qwen2MoeSparseMoeBlock,
        Qwen2MoeConfig(**SHAPE, **WIDTH, shared_expert_intermediate_size=24),
    ),
    "mixtral": (
        MixtralSparseMoeBlock,
        MixtralConfig(**SHAPE, num_local_experts=EXPERTS, intermediate_size=24),
    ),
}


@pytest.fixture(autouse=True)
def _unwritten_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills what `empty` returns with NaN
    yield
    torch.use_deterministic_algorithms(False)


def make_block(family: str, dtype: torch.dtype) -> Any:
    """A block with random weights, which has a router and experts."""
    torch.manual_seed(0)
    block_class, config = BLOCKS[family]
    config._experts_implementation = "eager"
    block = block_class(config).requires_grad_(False)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block.to(dtype).eval()


def tokens(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("family", BLOCKS)
def test_blocks_equal_transformers_in_float64(family: str, rows: int) -> None:
    block, hidden = make_block(family, torch.float64), tokens(rows, torch.float64)
    wanted = block(hidden[None])[0]
    block.float()
    block.experts.forward = ExpertsShard(block.experts, GenParallel())
    torch.testing.assert_close(block(hidden.float()[None])[0], wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", BLOCKS)
def test_experts_equal_grouped_products_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    block, hidden = make_block(family, dtype), tokens(33, dtype)
    _, weights, chosen = block.gate(hidden)
    assert chosen.unique().numel() > 2
    wanted = grouped_mm_experts_forward(block.experts, hidden, chosen, weights)
    got = ExpertsShard(block.experts, GenParallel())(hidden, chosen, weights)
    assert got.dtype == dtype
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_experts_of_several_ranks(dtype: torch.dtype) -> None:
    """A rank's part equals transformers' bit for bit, with no token, too; the parts add up."""
    block, hidden = make_block("qwen3_moe", dtype), tokens(9, dtype)
    _, weights, chosen = block.gate(hidden)
    chosen = chosen.clamp(max=5)  # the last rank has no token
    ranks, number = 4, EXPERTS // 4
    total = torch.zeros(9, HIDDEN, dtype=torch.float64)
    for rank in range(ranks):
        own = make_block("qwen3_moe", dtype).experts
        for name, parameter in list(own.named_parameters()):
            cut = parameter[number * rank : number * (rank + 1)].clone()
            setattr(own, name, nn.Parameter(cut, requires_grad=False))
        parallel: Any = SimpleNamespace(ep=ranks, tp_rank=rank, sum=lambda x: x)
        partial = ExpertsShard(own, parallel)(hidden, chosen, weights)
        local = chosen - number * rank
        local = local.masked_fill((local < 0) | (local >= number), number)
        assert torch.equal(partial, LocalExperts(own, elsewhere=True)(hidden, local, weights))
        assert bool(partial.any()) == (rank < ranks - 1)
        total += partial
    whole = ExpertsShard(block.experts, GenParallel())(hidden, chosen, weights)
    # A part is rounded once to its format.
    tolerance = 4 * torch.finfo(dtype).eps * float(whole.abs().max())
    torch.testing.assert_close(total, whole.double(), rtol=0, atol=tolerance)
