"""The kernels of a decode step, as cases that `cubins` compiles."""

from dataclasses import dataclass
from typing import Any

import torch

TOKENS = 64
"""Rows of a decode step. Their number is a launch's grid, so one compilation serves all."""
MAX_LENGTH = 32768
SHAPES = {
    "1.5b": {"heads": 12, "kv_heads": 2, "dim": 128},
    "8b": {"heads": 32, "kv_heads": 8, "dim": 128},
    "narrow": {"heads": 9, "kv_heads": 3, "dim": 64},
    "wide": {"heads": 8, "kv_heads": 4, "dim": 256},
}
"""Query heads, key-value heads and their width: Qwen2.5, Llama 3, SmolLM2 and Gemma 2."""
LAYER = {
    "residual_norm": "_residual_norm_kernel",
    "qk_norm_rotary_write": "_rotate_kernel",
    "act_mul": "_act_mul_kernel",
    "attention of a split": "_split_kernel",
    "attention of a whole": "_split_kernel",
    "attention of four queries": "_split_kernel",
    "attention with window, cap and sinks": "_split_kernel",
    "join of splits": "_join_kernel",
}
STEP = {
    "sample of chunks": "_chunk_kernel",
    "sample of rows": "_draw_kernel",
    "begin_step": "_begin_kernel",
    "advance": "_advance_kernel",
}
EXPERTS = {
    "route": "_route_kernel",
    "order_by_expert": "_order_kernel",
    "gate-up of experts": "_product_kernel",
    "down of experts": "_product_kernel",
    "combine": "_combine_kernel",
}
"""What is compiled, and its function, of which some launches have several."""
MOE = "30b-a3b"
MOE_SHAPE = {"hidden": 2048, "features": 768, "experts": 128, "per_token": 8}
"""The experts of Qwen3."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One compilation: a key of LAYER with one of SHAPES, of EXPERTS with MOE, or of STEP."""

    capability: int
    dtype: str
    shape: str
    kernel: str

    @property
    def name(self) -> str:
        """Its key in tests/kernels/cubins.json."""
        return f"sm_{self.capability} {self.dtype} {self.shape} {self.kernel}"

    @property
    def function(self) -> str:
        """The name of the function that is compiled."""
        return (LAYER | STEP | EXPERTS)[self.kernel]

    @property
    def multiplies(self) -> bool:
        """Whether tensor cores have something to do."""
        return self.function in ("_split_kernel", "_product_kernel")

    def launch(self) -> None:
        """Launch it as the package does, on tensors without values."""
        if self.kernel in STEP:
            _launch_step(self.kernel)
        elif self.kernel in EXPERTS:
            _launch_experts(self.kernel, getattr(torch, self.dtype), **MOE_SHAPE)
        else:
            _launch_layer(self.kernel, getattr(torch, self.dtype), **SHAPES[self.shape])


def decode_cases(capability: int) -> list[DecodeCase]:
    """Layers and experts in bfloat16, what multiplies in float32 too, and a step's ends."""
    layer = [(dtype, shape, kernel) for dtype, shape, kernel in _layer_cases()]
    step = [("float32", "step", kernel) for kernel in STEP]
    experts = [("bfloat16", MOE, kernel) for kernel in EXPERTS]
    experts.append(("float32", MOE, "gate-up of experts"))
    return [DecodeCase(capability, *case) for case in layer + experts + step]


def _layer_cases() -> list[tuple[str, str, str]]:
    once = [("bfloat16", "8b", kernel) for kernel in LAYER]
    widths = [
        (dtype, shape, "attention of a split")
        for dtype in ("bfloat16", "float32")
        for shape in SHAPES
        if (dtype, shape) != ("bfloat16", "8b")
    ]
    return [*once, *widths, ("bfloat16", "wide", "attention with window, cap and sinks")]


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch_layer(kernel: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    from hybridrl.kernels import layer_triton, paged_attention_triton

    def tensor(*shape: int) -> torch.Tensor:
        return _meta(*shape, dtype=dtype)

    cache = tensor(1024, 2, kv_heads, 16, dim)
    places = _meta(TOKENS + 1, MAX_LENGTH // 16), _meta(TOKENS), _meta(TOKENS)
    if kernel == "residual_norm":
        x = tensor(TOKENS, heads * dim)
        layer_triton.residual_norm(x, x, tensor(heads * dim), 1e-6)
    elif kernel == "act_mul":
        layer_triton.act_mul(tensor(TOKENS, 2 * 14336))
    elif kernel == "qk_norm_rotary_write":
        rotation = tensor(MAX_LENGTH, 2, dim)
        norms = tensor(dim), tensor(dim)
        qkv = tensor(TOKENS, (heads + 2 * kv_heads) * dim)
        layer_triton.qk_norm_rotary_write(qkv, norms, rotation, cache, *places, 1e-6)
    else:
        options: dict[str, Any] = {}
        if kernel == "attention of four queries":
            options["queries"] = 4
        elif kernel == "attention with window, cap and sinks":
            options |= {"window": 4096, "softcap": 50.0, "sinks": tensor(heads)}
        length = 512 if kernel == "attention of a whole" else MAX_LENGTH
        query = tensor(TOKENS, heads, dim)
        paged_attention_triton.paged_attention(query, cache, *places, length, dim**-0.5, **options)


def _launch_experts(
    kernel: str, dtype: torch.dtype, hidden: int, features: int, experts: int, per_token: int
) -> None:
    from hybridrl.kernels import experts_triton as kernels

    def tensor(*shape: int) -> torch.Tensor:
        return _meta(*shape, dtype=dtype)

    pairs, chosen = TOKENS * per_token, _meta(TOKENS, per_token)
    places = _meta(pairs), _meta(experts)
    if kernel == "route":
        kernels.route(tensor(TOKENS, experts), _meta(TOKENS), per_token, True, dtype)
    elif kernel == "order_by_expert":
        kernels.order_by_expert(chosen, 0, experts)
    elif kernel == "gate-up of experts":
        weight = tensor(experts, 2 * features, hidden)
        kernels.grouped_product(tensor(TOKENS, hidden), weight, *places, per_token)
    elif kernel == "down of experts":
        weight = tensor(experts, hidden, features)
        kernels.grouped_product(tensor(pairs, features), weight, *places, 1)
    else:
        weights = tensor(TOKENS, per_token)
        kernels.combine(tensor(pairs, hidden), weights, chosen, 0, experts)


def _launch_step(kernel: str) -> None:
    from hybridrl.kernels import sample_triton
    from hybridrl.kernels.decode_state import DecodeState

    state = DecodeState.vacant(TOKENS, MAX_LENGTH // 16, 4, torch.device("meta"))
    slots = _meta(TOKENS)
    if kernel == "begin_step":
        sample_triton.begin_step(state, slots)
    elif kernel == "advance":
        sample_triton.advance(state, slots, slots)
    else:
        logits = _meta(TOKENS, 151_936, dtype=torch.float32)
        sample_triton.sample(logits, slots, slots, state.streams, state.temperatures)
