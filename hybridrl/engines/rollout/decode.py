"""The decode step of Llama-like models with few operations, on the module's own weights.

The number of operations bounds a step for some hundred tokens of a small model. So products of one
input are fused (the module's weights are views of the fused tensor), norms are torch's fused ones,
rotation and residual sums are in place. Blocks of experts are the module's own. The Hugging Face
module is the reference: it computes prefill and all other families, and a test holds the two equal.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from hybridrl.models.paged_attention import PagedBatch
from hybridrl.models.shard import RowLinear, own_layers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


class FusedLinear:
    """Linear layers of one input as one product; `modules` keep views of its weight and bias."""

    def __init__(self, modules: list[nn.Linear]) -> None:
        self._modules = modules
        self.allocate()

    def allocate(self) -> None:
        """Copy the parameters into fused tensors and make them views."""
        self.weight = self._fuse([module.weight for module in self._modules])
        biases = [module.bias for module in self._modules if module.bias is not None]
        assert len(biases) in (0, len(self._modules)), "some of the fused layers have a bias"
        self.bias = self._fuse(biases) if biases else None

    def free(self) -> None:
        """Drop the fused tensors; their owner frees the modules' parameters."""
        self.weight, self.bias = self.weight.new_empty(0), None

    @staticmethod
    def _fuse(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        fused = torch.cat([parameter.data for parameter in parameters])
        ends = torch.tensor([0, *(len(p) for p in parameters)]).cumsum(0).tolist()
        for parameter, (start, stop) in zip(parameters, pairwise(ends), strict=True):
            parameter.data = fused[start:stop]
        return fused

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] to [tokens, sum of outs]."""
        return functional.linear(x, self.weight, self.bias)


class SeparateLinear:
    """`FusedLinear` as several products: the weights are views, and stay where they are."""

    def __init__(self, modules: list[nn.Linear]) -> None:
        self._modules = modules

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] to [tokens, sum of outs]."""
        return torch.cat([functional.linear(x, m.weight, m.bias) for m in self._modules], -1)


class FusedDecoder:
    """Equals `model.model(inputs_embeds, position_ids, paged=...)` for a decode step.

    The model may be a rank's shard (`local_model`). Without `joins_weights` these stay where they
    are.
    """

    def __init__(
        self, model: PreTrainedModel, max_sequence: int, joins_weights: bool = True
    ) -> None:
        assert model.config.model_type in FAMILIES
        self._model = model
        self._layers = layers = own_layers(model)
        attentions = [layer.self_attn for layer in layers]
        linear = FusedLinear if joins_weights else SeparateLinear
        self._qkv = [linear([a.q_proj, a.k_proj, a.v_proj]) for a in attentions]
        self._gate_up = {
            index: linear([layer.mlp.gate_proj, layer.mlp.up_proj])
            for index, layer in enumerate(layers)
            if isinstance(getattr(layer.mlp, "gate_proj", None), nn.Linear)
        }
        config = model.config
        self._positions = max_sequence
        self._table: torch.Tensor | None = None
        self._eps: float = config.rms_norm_eps
        self._dim: int = attentions[0].head_dim
        self._heads: int = attentions[0].q_proj.weight.shape[0] // self._dim
        self._kv_heads: int = attentions[0].k_proj.weight.shape[0] // self._dim
        self._windows: list[int | None] = [
            getattr(a, "sliding_window", None)
            if hasattr(a, "sliding_window") or config.model_type != "mistral"
            else config.sliding_window
            for a in attentions
        ]

    def allocate(self) -> None:
        """Fuse again, after the parameters got new storage."""
        for linear in self._fused():
            linear.allocate()

    def free(self) -> None:
        """Drop the weights."""
        for linear in self._fused():
            linear.free()

    def _fused(self) -> list[FusedLinear]:
        linears = (*self._qkv, *self._gate_up.values())
        return [linear for linear in linears if isinstance(linear, FusedLinear)]

    def __call__(self, paged: PagedBatch, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states `x` [tokens, hidden] at `positions` [tokens] through layers and norm."""
        cos, sin = self._rotation(x, positions)
        for index, layer in enumerate(self._layers):
            h = self._norm(x, layer.input_layernorm.weight)
            h = self._attention(index, layer.self_attn, h, cos, sin, paged)
            x = _add_linear(x, h, layer.self_attn.o_proj)
            h = self._norm(x, layer.post_attention_layernorm.weight)
            if index in self._gate_up:
                gate, up = self._gate_up[index](h).chunk(2, -1)
                x = _add_linear(x, layer.mlp.act_fn(gate).mul_(up), layer.mlp.down_proj)
            else:
                x = x + layer.mlp(h[None])[0]
        norm = self._model.model.norm
        # Only the last stage has one.
        return x if isinstance(norm, nn.Identity) else self._norm(x, norm.weight)

    def _rotation(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cosine and signed sine [tokens, 1, head_dim], so that a rotation needs no negation.

        rotate_half(x) * sin = (halves of x swapped) * (-sin, sin).
        """
        rotary = self._model.model.rotary_emb
        fixed = rotary.rope_type in ("default", "linear", "llama3", "yarn")
        if not fixed or self._table is None:
            at = torch.arange(self._positions, device=x.device) if fixed else positions
            cos, sin = rotary(x[None], at[None])
            half = self._dim // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            self._table = torch.stack((cos[0], signed[0]), 1)[:, :, None]
        table = self._table.index_select(0, positions) if fixed else self._table
        return table.unbind(1)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self._eps)

    def _attention(
        self,
        index: int,
        module: Any,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        paged: PagedBatch,
    ) -> torch.Tensor:
        """[tokens, hidden] to [tokens, heads * head_dim], before the output product."""
        heads, rotated = self._heads, self._heads + self._kv_heads
        qkv = self._qkv[index](x).view(len(x), -1, self._dim)
        qk = qkv[:, :rotated]
        if hasattr(module, "q_norm"):
            qk = self._norm(qk, None)
            qk[:, :heads].mul_(module.q_norm.weight)
            qk[:, heads:].mul_(module.k_norm.weight)
        swapped = qk.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        # Into the fused output, where the rotated keys are adjacent to the values.
        torch.addcmul(qk * cos, swapped, sin, out=qkv[:, :rotated])
        new = qkv[:, heads:].view(len(x), 2, self._kv_heads, self._dim)
        out = paged.attend(index, qkv[:, :heads], new, module.scaling, self._windows[index])
        return out.flatten(1)


def _add_linear(x: torch.Tensor, h: torch.Tensor, linear: nn.Module) -> torch.Tensor:
    """x + linear(h)."""
    if isinstance(linear, RowLinear) or linear.bias is not None:
        return x + linear(h)
    return torch.addmm(x, h, linear.weight.t())
