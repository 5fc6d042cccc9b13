"""The parts of `train_layer` in torch: they write into tensors that are given.

Sums and products are in float32 at least, and each result is rounded once.
"""

from collections.abc import Callable

import torch

from hybridrl.kernels.decode_torch import ACTIVATIONS


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    out: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """RMSNorm of `x` [rows, features], and the `scales` [rows] of its rows: 1 / sqrt(mean square).

    The norm is x scale (weight + offset).
    """
    wide = x.to(scales.dtype)
    scales.copy_((wide.square().mean(-1) + eps).rsqrt())
    out.copy_(wide * scales[:, None] * (weight.to(wide.dtype) + offset))


def norm_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    offset: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor | None,
) -> None:
    """Gradients of `x` [rows, features] and, where it is wanted, of `weight` [features]."""
    wide = grad.to(scales.dtype)
    normed = x.to(scales.dtype) * scales[:, None]
    scaled = wide * (weight.to(wide.dtype) + offset)
    grad_x.copy_((scaled - normed * (scaled * normed).mean(-1, True)) * scales[:, None])
    if grad_weight is not None:
        grad_weight.copy_((wide * normed).sum(0))


def rotate(
    heads: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    outs: tuple[torch.Tensor, torch.Tensor],
    back: bool,
) -> None:
    """Rotate queries and keys [tokens, heads, dim] by halves.

    `cos` and `sin` are [tokens, rotary_dim]; numbers of a head after these pass. With `back` their
    gradients: the transposed rotation.
    """
    size = cos.shape[-1]
    for x, out in zip(heads, outs, strict=True):
        wide = torch.promote_types(x.dtype, torch.float32)
        first, second = x[..., :size].to(wide).chunk(2, -1)
        (c, other_c), (s, other_s) = (y.to(wide)[:, None].chunk(2, -1) for y in (cos, sin))
        if back:
            s, other_s = -other_s, -s
        turned = first * c - second * s, second * other_c + first * other_s
        out.copy_(torch.cat((*turned, x[..., size:].to(wide)), -1))


def act_mul(gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """act(gate) up, all of one shape; `activation` is a key of ACTIVATIONS."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    out.copy_(ACTIVATIONS[activation](gate.to(wide)) * up.to(wide))


def act_mul_grad(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
) -> None:
    """Gradients of `gate` and `up`."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    grad, gate, up = (x.to(wide) for x in (grad, gate, up))
    act: Callable[[torch.Tensor], torch.Tensor] = ACTIVATIONS[activation]
    with torch.enable_grad():
        gate = gate.detach().requires_grad_()
        activated = act(gate)
        (of_gate,) = torch.autograd.grad(activated, gate, grad * up)
    grad_gate.copy_(of_gate)
    grad_up.copy_(grad * activated.detach())
