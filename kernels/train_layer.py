"""What a decoder layer computes between its products and its attention, with few kernels.

Norms, rotations and gated activations of transformers are five to thirteen kernels each, forward
and again backward, and keep their steps for the backward pass. Here each is one kernel a pass (the
gradient of a norm's weight takes another) and keeps its inputs alone. Sums and products are in
float32 at least, and each result is rounded once.
"""

import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hybridrl.kernels import train_layer_torch


def runs_on(device: torch.device) -> bool:
    """Whether Triton computes on this device: NVIDIA GPUs since Ampere, where it is installed."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and importlib.util.find_spec("triton") is not None
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> torch.Tensor:
    """RMSNorm of `x` [.., features]: x / sqrt(mean(x^2) + eps) (weight + offset).

    `weight` is [features]; Gemma's `offset` is 1. Differentiable in both.
    """
    out: torch.Tensor = _Norm.apply(x, weight, eps, offset)
    return out


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [1, heads, tokens, dim], rotated by halves: (x1 c - x2 s, x2 c + x1 s).

    `cos` and `sin` are [1, tokens, rotary_dim]; numbers of a head after these pass. Differentiable
    in queries and keys.
    """
    out: tuple[torch.Tensor, torch.Tensor] = _Rotary.apply(query, key, cos, sin)
    return out


def act_mul(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """act(gate) up, all of one shape and differentiable in both.

    `activation` is a key of `decode_torch.ACTIVATIONS`.
    """
    out: torch.Tensor = _ActMul.apply(gate, up, activation)
    return out


def _parts(x: torch.Tensor) -> ModuleType | None:
    """The module that computes on tensors like `x`; None where there is nothing to compute."""
    if x.is_meta or not x.numel():
        return None
    if not runs_on(x.device) or x.dtype == torch.float64:
        return train_layer_torch
    from hybridrl.kernels import train_layer_triton

    return train_layer_triton


def _tokens_first(x: torch.Tensor) -> bool:
    """Whether `x` [1, heads, tokens, dim] is a view of contiguous tokens before heads."""
    return x.ndim == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


def _rows(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x` [.., features] as contiguous rows, in the order of the rows of `like` in memory."""
    if _tokens_first(like):
        x = x.transpose(1, 2)
    return x.contiguous().view(-1, x.shape[-1])


class _Norm(torch.autograd.Function):
    """With n = x scale: dx = (g w - n mean(g w n)) scale, dw = sum over rows of g n."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        if not _tokens_first(x):
            x = x.contiguous()
        out, wide = torch.empty_like(x), torch.promote_types(x.dtype, torch.float32)
        scales = x.new_empty(x.shape[:-1].numel(), dtype=wide)
        if parts := _parts(x):
            parts.norm(_rows(x, x), weight, eps, offset, _rows(out, x), scales)
        ctx.save_for_backward(x, weight, scales)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        if parts := _parts(x):
            rows, out = (_rows(grad, x), _rows(x, x)), _rows(grad_x, x)
            parts.norm_grad(*rows, weight, scales, ctx.offset, out, grad_weight)
        elif grad_weight is not None:
            grad_weight.zero_()
        return grad_x, grad_weight, None, None


class _Rotary(torch.autograd.Function):
    """A rotation; its gradient is the transposed one."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, key, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_query: torch.Tensor, grad_key: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_rotated(grad_query, grad_key, cos, sin, back=True), None, None


def _rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert len(query) == len(cos) == 1, "rows are packed into one"
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    outs = torch.empty_like(query), torch.empty_like(key)
    if parts := _parts(query):
        by_token = tuple(x[0].transpose(0, 1) for x in (query, key, *outs))
        angles = cos[0].contiguous(), sin[0].contiguous()
        parts.rotate(by_token[:2], *angles, by_token[2:], back)
    return outs


class _ActMul(torch.autograd.Function):
    """act(g) u: dg = grad u act'(g), du = grad act(g)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        if parts := _parts(gate):
            parts.act_mul(gate, up, activation, out)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if parts := _parts(gate):
            parts.act_mul_grad(grad.contiguous(), gate, up, ctx.activation, grad_gate, grad_up)
        return grad_gate, grad_up, None
