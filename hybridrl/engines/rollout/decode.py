"""The decode step of Llama-like models with few operations, on the module's own weights.

The number of operations bounds a step for some hundred tokens of a small model. So products of one
input are fused (the module's weights are views of the fused tensor), norms are torch's fused ones,
rotation and residual sums are in place. Blocks of experts are the module's own. The Hugging Face
module is the reference: it computes prefill and all other families, and a test holds the two equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.models.paged_attention import PagedBatch
from hybridrl.models.shard import RowLinear, own_layers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen3_vl_text")


class FusedLinear:
    """Linear layers of one input as one product; `modules` keep views of its weight and bias."""

    def __init__(self, modules: list[nn.Linear]) -> None:
        self._modules = modules
        self.allocate()

    def allocate(self) -> None:
        """Copy the parameters into fused tensors and make them views."""
        weight = self._fuse([module.weight for module in self._modules])
        biases = [module.bias for module in self._modules if module.bias is not None]
        assert len(biases) in (0, len(self._modules)), "some of the fused layers have a bias"
        bias = self._fuse(biases) if biases else None
        # [tokens, in] to [tokens, sum of outs], perhaps to `out`, without a Python call.
        if bias is None:
            self.product = partial(torch.mm, mat2=weight.t())
        else:
            self.product = partial(torch.addmm, bias, mat2=weight.t())

    def free(self) -> None:
        """Drop the fused tensors; their owner frees the modules' parameters."""
        del self.product

    @staticmethod
    def _fuse(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        fused = torch.cat([parameter.data for parameter in parameters])
        ends = torch.tensor([0, *(len(p) for p in parameters)]).cumsum(0).tolist()
        for parameter, (start, stop) in zip(parameters, pairwise(ends), strict=True):
            parameter.data = fused[start:stop]
        return fused


class SeparateLinear:
    """`FusedLinear` as several products: the weights are views, and stay where they are."""

    def __init__(self, modules: list[nn.Linear]) -> None:
        self._modules = modules

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, in] to [tokens, sum of outs]."""
        products = [functional.linear(x, m.weight, m.bias) for m in self._modules]
        return torch.cat(products, -1, out=out)


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """What a graph step reads of a layer's experts, of which the rank has some, or parts of all.

    `router` is [experts, hidden], `gate_up` [local, 2 features, hidden], `down` [local, hidden,
    features]. The local experts begin with number `first`.
    """

    router: nn.Parameter
    per_token: int
    normalizes: bool
    weights_dtype: torch.dtype
    gate_up: nn.Parameter
    down: nn.Parameter
    first: int

    @classmethod
    def of(cls, mlp: Any, model_type: str) -> "LayerExperts":
        """Read a block of Mixtral or Qwen3, whose experts compute as `ExpertsShard`."""
        router, experts = mlp.gate, mlp.experts
        return cls(
            router=router.weight,
            per_token=router.top_k,
            normalizes=getattr(router, "norm_topk_prob", True),
            # The others round a token's weights as they round its router's logits.
            weights_dtype=torch.float32 if model_type == "mixtral" else router.weight.dtype,
            gate_up=experts.gate_up_proj,
            down=experts.down_proj,
            first=experts.forward.first,
        )


@dataclass(slots=True)
class FusedLayer:
    """What a step reads of a decoder layer, so that it asks no module for its attributes.

    Parameters stay what they are when their tensors are freed and allocated. `out_weight` and
    `down_weight` are None where the product is the module's own: it has a bias, or sums over tp.
    A layer has `gate_up` or `experts`.
    """

    attention: Any
    mlp: Any
    scaling: float
    act: Any
    input_norm: nn.Parameter
    mlp_norm: nn.Parameter
    window: int | None
    qkv: FusedLinear | SeparateLinear
    gate_up: FusedLinear | SeparateLinear | None = None
    experts: LayerExperts | None = None
    norms: tuple[nn.Parameter, nn.Parameter] | None = None  # of queries and of keys
    out_weight: nn.Parameter | None = None
    down_weight: nn.Parameter | None = None

    @classmethod
    def of(cls, layer: nn.Module, config: PretrainedConfig, joins_weights: bool) -> "FusedLayer":
        """The layer of a model of one of `FAMILIES`."""
        a: Any = layer.self_attn
        mlp: Any = layer.mlp
        linear = FusedLinear if joins_weights else SeparateLinear
        # Only Mistral's attention does not know its window.
        everywhere = config.sliding_window if config.model_type == "mistral" else None
        own = cls(
            attention=a,
            mlp=mlp,
            scaling=a.scaling,
            act=getattr(mlp, "act_fn", None),
            input_norm=layer.input_layernorm.weight,  # type: ignore[union-attr, arg-type]
            mlp_norm=layer.post_attention_layernorm.weight,  # type: ignore[union-attr, arg-type]
            window=getattr(a, "sliding_window", everywhere),
            qkv=linear([a.q_proj, a.k_proj, a.v_proj]),
            out_weight=_plain_weight(a.o_proj),
        )
        if hasattr(a, "q_norm"):
            own.norms = a.q_norm.weight, a.k_norm.weight
        if isinstance(getattr(mlp, "gate_proj", None), nn.Linear):
            own.gate_up = linear([mlp.gate_proj, mlp.up_proj])
            own.down_weight = _plain_weight(mlp.down_proj)
        else:
            own.experts = LayerExperts.of(mlp, config.model_type)
        return own


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """Memory that one layer after another writes its products to, and the views that it reads.

    `qkv` is [tokens, (heads + 2 kv_heads) * head_dim]. In it are `rotated` [tokens, heads +
    kv_heads, head_dim], `query` [tokens, heads, head_dim], and `new` [tokens, 2, kv_heads,
    head_dim]: keys and values. `gate_up` [tokens, 2 features] has `gate` and `up`.
    """

    qkv: torch.Tensor
    rotated: torch.Tensor
    query: torch.Tensor
    new: torch.Tensor
    gate_up: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor

    @classmethod
    def of(
        cls, x: torch.Tensor, heads: int, kv_heads: int, head_dim: int, features: int
    ) -> "LayerOutputs":
        """Memory for as many tokens as `x` has, of its type and on its device."""
        tokens, num = len(x), heads + 2 * kv_heads
        qkv, gate_up = x.new_empty(tokens, num * head_dim), x.new_empty(tokens, 2 * features)
        by_head = qkv.view(tokens, num, head_dim)
        rotated, new = by_head[:, : heads + kv_heads], by_head[:, heads:].unflatten(1, (2, -1))
        return cls(qkv, rotated, by_head[:, :heads], new, gate_up, *gate_up.chunk(2, -1))


class FusedDecoder:
    """Equals `model.model(inputs_embeds, position_ids, paged=...)` for a decode step.

    The model may be a rank's shard (`local_model`). Without `joins_weights` these stay where they
    are.
    """

    def __init__(
        self, model: PreTrainedModel, max_sequence: int, joins_weights: bool = True
    ) -> None:
        config = model.config
        assert config.model_type in FAMILIES
        self._model = model
        self.layers = [FusedLayer.of(layer, config, joins_weights) for layer in own_layers(model)]
        attention = self.layers[0].attention
        self._positions = max_sequence
        self._table: torch.Tensor | None = None
        self.eps: float = config.rms_norm_eps
        self._dim: int = attention.head_dim
        self._heads: int = attention.q_proj.weight.shape[0] // self._dim
        self._kv_heads: int = attention.k_proj.weight.shape[0] // self._dim
        dense = [layer.mlp.gate_proj for layer in self.layers if layer.gate_up is not None]
        self._features: int = dense[0].weight.shape[0] if dense else 0
        self._outputs: LayerOutputs | None = None
        # Only the last stage has one.
        norm: Any = model.model.norm
        self._norm: nn.Parameter | None = None if isinstance(norm, nn.Identity) else norm.weight
        # Whether a position's rotation is the same in all batches.
        kind: Any = model.model.rotary_emb.rope_type
        self.rotates_alike: bool = kind in ("default", "linear", "llama3", "yarn")

    def allocate(self) -> None:
        """Fuse again, after the parameters got new storage."""
        for linear in self._fused():
            linear.allocate()

    def free(self) -> None:
        """Drop the weights, and the memory of a step."""
        self._outputs = None
        for linear in self._fused():
            linear.free()

    def _fused(self) -> list[FusedLinear]:
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.gate_up)]
        return [linear for linear in linears if isinstance(linear, FusedLinear)]

    def __call__(self, paged: PagedBatch, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states `x` [tokens, hidden] at `positions` [tokens] through layers and norm.

        A layer makes no call of this project's functions but those of its attention.
        """
        cos, sin = self._rotation(x, positions)
        attend, norms, outputs = paged.attention(), self._head_norms(), self._outputs
        if outputs is None or len(outputs.qkv) != len(x):  # kept while as many tokens come
            sizes = self._heads, self._kv_heads, self._dim, self._features
            outputs = self._outputs = LayerOutputs.of(x, *sizes)
        hidden, dim, half = x.shape[1:], (self._dim,), self._dim // 2
        for number, layer in enumerate(self.layers):
            # queries, keys and values, of which the first two are rotated
            h = torch.rms_norm(x, hidden, layer.input_norm, self.eps)
            layer.qkv.product(h, out=outputs.qkv)
            qk = outputs.rotated
            if norms is not None:
                qk = torch.rms_norm(qk, dim, None, self.eps).mul_(norms[number])
            torch.addcmul(qk * cos, qk.roll(half, -1), sin, out=outputs.rotated)
            # attention
            rest = layer.scaling, layer.window
            h = attend(number, outputs.query, outputs.new, *rest).flatten(1)
            if layer.out_weight is not None:
                x = torch.addmm(x, h, layer.out_weight.t())
            else:
                x = x + layer.attention.o_proj(h)
            # feed-forward, or experts
            h = torch.rms_norm(x, hidden, layer.mlp_norm, self.eps)
            if layer.gate_up is None:
                x = x + layer.mlp(h[None])[0]
                continue
            layer.gate_up.product(h, out=outputs.gate_up)
            h = layer.act(outputs.gate).mul_(outputs.up)
            if layer.down_weight is not None:
                x = torch.addmm(x, h, layer.down_weight.t())
            else:
                x = x + layer.mlp.down_proj(h)
        return x if self._norm is None else torch.rms_norm(x, hidden, self._norm, self.eps)

    def _head_norms(self) -> Sequence[torch.Tensor] | None:
        """A layer's norm weights of each rotated head [heads + kv_heads, head_dim], if it has any.

        They are read at each step, as all weights are.
        """
        if self.layers[0].norms is None:
            return None
        norms = torch.stack([w for layer in self.layers for w in layer.norms or ()])
        query, key = norms.view(-1, 2, 1, self._dim).unbind(1)
        heads = query.expand(-1, self._heads, -1), key.expand(-1, self._kv_heads, -1)
        return torch.cat(heads, 1).unbind(0)

    def _rotation(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cosine and signed sine [tokens, 1, head_dim], so that a rotation needs no negation.

        rotate_half(x) * sin = (halves of x swapped) * (-sin, sin).
        """
        if not self.rotates_alike:
            return self._rotations(x, positions).unbind(1)
        return self.rotations(x).index_select(0, positions).unbind(1)

    def rotations(self, x: torch.Tensor) -> torch.Tensor:
        """Cosines and signed sines [positions, 2, 1, head_dim] of all positions, kept."""
        if self._table is None:
            self._table = self._rotations(x, torch.arange(self._positions, device=x.device))
        return self._table

    def _rotations(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self._model.model.rotary_emb(x[None], positions[None])
        half = self._dim // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        return torch.stack((cos[0], signed[0]), 1)[:, :, None]


def _plain_weight(linear: nn.Module) -> nn.Parameter | None:
    """The weight of a layer that adds nothing to its product."""
    plain = not isinstance(linear, RowLinear) and linear.bias is None
    return linear.weight if plain else None  # type: ignore[return-value]
