"""Decoder layers with fewer kernels (`trainer.fuse_layers`): see `hybridrl.kernels.train_layer`.

A module is taken for what it computes, not for its name: a norm, a rotation or a gated activation
that gives other numbers than the kernel's formula stays as transformers computes it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.func import functional_call
from transformers import PreTrainedModel

from hybridrl.kernels.decode_torch import ACTIVATIONS
from hybridrl.kernels.train_layer import act_mul, rms_norm, rotary

ROTATION = "apply_rotary_pos_emb"
"""The name by which an attention finds the rotation in its file."""
TOLERANCE = 1e-5
"""How far float32 numbers around 1 may be apart that two formulas give."""


@dataclass(slots=True)
class FusedLayers:
    """How many modules of a model have a kernel."""

    norms: int = 0
    rotations: int = 0
    activations: int = 0

    @property
    def number(self) -> int:
        """All of them."""
        return self.norms + self.rotations + self.activations


def fuse_layers(model: PreTrainedModel) -> FusedLayers:
    """Have norms, rotations and gated activations of `model` run as one kernel each.

    Call it before the model is sharded; parameters may have no values. Adapters, tensor
    parallelism and FSDP find the modules, their parameters and their hooks as they were.
    """
    fused = FusedLayers()
    offsets: dict[type[nn.Module], float | None] = {}
    rotating: dict[type[nn.Module], FunctionType | None] = {}
    for module in model.base_model.modules():
        kind = type(module)
        if eps := _eps(module):
            if kind not in offsets:
                offsets[kind] = _norm_offset(module, eps)
            if (offset := offsets[kind]) is not None:
                module.forward = _FusedNorm(module, eps, offset)
                fused.norms += 1
        elif activation := _gated_activation(module):
            module.forward = _FusedGate(module, activation)
            fused.activations += 1
        else:
            if kind not in rotating:
                rotating[kind] = _with_fused_rotation(kind)
            if forward := rotating[kind]:
                module.forward = MethodType(forward, module)
                fused.rotations += 1
    return fused


@dataclass(frozen=True, slots=True)
class _FusedNorm:
    """The forward pass of a norm."""

    module: nn.Module
    eps: float
    offset: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.module.weight
        if not isinstance(x, DTensor):
            return rms_norm(x, weight, self.eps, self.offset)
        # Under tensor parallelism each rank normalizes its tokens, or all of them.
        of_weight = [Partial() if p.is_shard() else Replicate() for p in x.placements]
        local = weight.to_local(grad_placements=of_weight)
        out = rms_norm(x.to_local(), local, self.eps, self.offset)
        return DTensor.from_local(
            out, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )


@dataclass(frozen=True, slots=True)
class _FusedGate:
    """The forward pass of a gated feed-forward layer."""

    module: nn.Module
    activation: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mlp: Any = self.module
        out: torch.Tensor = mlp.down_proj(
            act_mul(mlp.gate_proj(x), mlp.up_proj(x), self.activation)
        )
        return out


def _rotated(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of transformers' function of the name `ROTATION`."""
    assert unsqueeze_dim == 1, "heads come before tokens"
    return rotary(query, key, cos, sin)


# What a module computes


def _eps(module: nn.Module) -> float | None:
    """The constant of a module that may be an RMSNorm: it has a weight, and nothing else."""
    parameters = dict(module.named_parameters())
    if parameters.keys() != {"weight"} or parameters["weight"].ndim != 1:
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _norm_offset(module: nn.Module, eps: float) -> float | None:
    """What an RMSNorm adds to its weight, 0 or 1; None for another module."""
    size = len(module.weight)  # type: ignore[arg-type]
    weight = torch.linspace(-1.0, 1.0, size)
    # Squares about as large as `eps`, and much larger.
    x = torch.stack([torch.linspace(-1.0, 2.0, size) * scale for scale in (eps**0.5, 1.0)])
    try:
        with torch.no_grad():
            got = functional_call(module, {"weight": weight}, (x,))
    except Exception:
        return None
    offsets = [o for o in (0.0, 1.0) if _alike(got, rms_norm(x, weight, eps, o))]
    return offsets[0] if len(offsets) == 1 else None


def _gated_activation(module: nn.Module) -> str | None:
    """The activation of down(act(gate(x)) up(x)), a key of `ACTIVATIONS`; None for another module.

    Called with stand-ins for its products.
    """
    act = getattr(module, "act_fn", None)
    if act is None or not all(hasattr(module, f"{n}_proj") for n in ("gate", "up", "down")):
        return None
    x = torch.linspace(-4.0, 4.0, 64)
    products: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gate_proj": lambda x: 1.5 * x - 0.5,
        "up_proj": lambda x: 2.0 - x,
        "down_proj": lambda x: 3.0 * x + 1.0,
    }
    try:
        got = type(module).forward(SimpleNamespace(act_fn=act, **products), x)
    except Exception:
        return None
    gate, up = products["gate_proj"](x), products["up_proj"](x)
    for name, activation in ACTIVATIONS.items():
        if _alike(got, products["down_proj"](activation(gate) * up)):
            return name
    return None


def _with_fused_rotation(attention: type[nn.Module]) -> FunctionType | None:
    """The forward pass of an attention with a rotation of one kernel; None where it has another.

    It is the class's own code, which finds another function under the name `ROTATION`. Others that
    use its file, as generation in the same process, keep the function that they have. A decorator,
    which gives the cache its older name, is left out: training has no cache.
    """
    forward: Any = inspect.unwrap(attention.forward)
    if not inspect.isfunction(forward) or ROTATION not in forward.__code__.co_names:
        return None
    if not _rotates_by_halves(forward.__globals__.get(ROTATION)):
        return None
    names = {**forward.__globals__, ROTATION: _rotated}
    own = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def _rotates_by_halves(function: Any) -> bool:
    """Whether a function of queries, keys, cosines and sines computes what `rotary` does."""
    numbers = torch.linspace(-1.0, 2.0, 4 * 3 * 8).view(1, 4, 3, 8)
    angles = torch.linspace(0.0, 3.0, 3 * 8).view(1, 3, 8)
    for size in (8, 4):  # whole heads, and a part of each
        own = angles[..., :size]
        inputs = numbers, numbers[:, :2].flip(-1), own.cos(), own.sin()
        try:
            pairs = [*zip(function(*inputs), rotary(*inputs), strict=True)]
        except Exception:
            if size == 4:  # it rotates whole heads alone
                continue
            return False
        if not all(_alike(x, y) for x, y in pairs):
            return False
    return True


def _alike(got: Any, wanted: torch.Tensor) -> bool:
    return (
        isinstance(got, torch.Tensor)
        and got.shape == wanted.shape
        and torch.allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    )
