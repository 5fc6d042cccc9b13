"""flash-attn takes the calls of packed attention, and refuses what we refuse: from its sources."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foreign import Sources

from hybridrl.config import Attention
from hybridrl.models import packed_attention
from hybridrl.models.attention_choice import FLASH_CAPABILITY, FLASH_DTYPES, FLASH_HEAD_SIZES
from hybridrl.models.packed_attention import make_packing
from hybridrl.models.recomputation import KEPT

pytestmark = pytest.mark.contracts

FUNCTION = "flash_attn.flash_attn_interface:flash_attn_varlen_func"
CPP = {"torch::kFloat16": torch.float16, "torch::kBFloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def checks(flash_attn: Sources) -> dict[str, str]:
    """The bodies of the C++ functions that check and launch, forward and backward."""
    source = (flash_attn.root / "csrc/flash_attn/flash_api.cpp").read_text()
    parts = re.split(r"\n(mha_\w+)\(", source)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name: bodies[name] for name in ("mha_varlen_fwd", "mha_varlen_bwd")}


@pytest.fixture
def called(flash_attn: Sources, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that packed attention passes, by flash-attn's names."""
    arguments: dict[str, Any] = {}

    def bound(*args: Any, **words: Any) -> torch.Tensor:
        arguments.update(flash_attn.signature(FUNCTION).bind(*args, **words).arguments)
        return args[0]

    module = SimpleNamespace(flash_attn_varlen_func=bound)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    packing = make_packing([2, 3], Attention.flash, torch.device("cpu"))
    query, key, value = (torch.zeros(heads, 5, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    packed_attention._variable_length(query, key, value, packing, 0.25, 2)
    return arguments


def test_the_package_gives_the_function(flash_attn: Sources) -> None:
    assert flash_attn.has("flash_attn", "flash_attn_varlen_func")


def test_our_call_binds(called: dict[str, Any]) -> None:
    """Rows of tokens, heads, width; 32-bit positions; a window without the attending token."""
    assert [tuple(called[name].shape) for name in "qkv"] == [(5, 4, 16), (5, 2, 16), (5, 2, 16)]
    assert all(called[name].stride(-1) == 1 for name in "qkv")  # the kernel asks for it
    assert called["cu_seqlens_q"].dtype == called["cu_seqlens_k"].dtype == torch.int32
    assert (called["max_seqlen_q"], called["max_seqlen_k"]) == (3, 3)
    assert (called["softmax_scale"], called["causal"]) == (0.25, True)
    assert called["window_size"] == (1, 0)
    assert (called["deterministic"], called["softcap"]) == (False, 0.0)


@pytest.mark.parametrize("function", ["mha_varlen_fwd", "mha_varlen_bwd"])
class TestItsOwnChecks:
    """What the kernels refuse, so that our choice refuses as much and no more."""

    def test_formats(self, checks: dict[str, str], function: str) -> None:
        (condition,) = re.findall(r"TORCH_CHECK\((q_dtype == .*?),\n", checks[function])
        assert {CPP[name] for name in re.findall(r"torch::k\w+", condition)} == set(FLASH_DTYPES)

    def test_head_sizes(self, checks: dict[str, str], function: str) -> None:
        (most,) = re.findall(r"TORCH_CHECK\(head_size <= (\d+),", checks[function])
        (step,) = re.findall(r"TORCH_CHECK\(head_size % (\d+) == 0,", checks[function])
        assert range(int(step), int(most) + 1, int(step)) == FLASH_HEAD_SIZES

    def test_gpus(self, checks: dict[str, str], function: str) -> None:
        assert "bool is_sm8x_min = cc_major >= 8;" in checks[function]
        assert "TORCH_CHECK(is_sm8x_min," in checks[function]
        assert FLASH_CAPABILITY == (8, 0)

    def test_positions_are_32_bit(self, checks: dict[str, str], function: str) -> None:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            assert f"TORCH_CHECK({name}.dtype() == torch::kInt32" in checks[function]


def test_its_backward_can_be_deterministic(checks: dict[str, str]) -> None:
    """Else it adds the queries' gradients atomically."""
    assert "const bool deterministic" in checks["mha_varlen_bwd"]
    assert "if (!deterministic)" in checks["mha_varlen_bwd"]


def test_its_forward_pass_is_an_operation_that_selective_recomputation_keeps(
    flash_attn: Sources,
) -> None:
    source = (flash_attn.root / "flash_attn/flash_attn_interface.py").read_text()
    operations = set(re.findall(r'custom_op_wrapper\(\s*"(flash_attn::\w+)"', source))
    assert operations & KEPT == {"flash_attn::_flash_attn_varlen_forward"}
