"""A decode step as a fixed sequence of kernels that ask the host nothing: a CUDA graph can hold it.

State, block tables and draws are on the device (`DecodeState`). A step embeds the pending tokens,
computes layers and head, draws, and advances the state.
"""

from types import ModuleType

import torch
from torch.nn import functional

from hybridrl.engines.rollout.decode import FusedLayer, LayerExperts
from hybridrl.engines.rollout.stage import RolloutStage
from hybridrl.kernels.decode_state import DecodeState
from hybridrl.models.paged_attention import KVCache

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""The kernels' names by those of transformers."""


class GraphStep:
    """The step of a model of `decode.FAMILIES` without stages, whose draws are not restricted.

    Ranks of tp each call it. All of them gather the logits, whose bits are equal on all, and draw
    the same tokens.

    `kernels` is `decode_triton`, or `decode_torch` where Triton is missing. No sequence in `state`
    gets `max_length` tokens or more, and each has blocks of `cache` for what it is to cache.
    """

    def __init__(
        self,
        stage: RolloutStage,
        cache: KVCache,
        state: DecodeState,
        max_length: int,
        kernels: ModuleType,
        records: bool = False,
    ) -> None:
        """Raises ValueError for a model that it does not compute.

        If it `records`, a step returns its tokens' experts besides.
        """
        if reason := obstacle(stage):
            raise ValueError(reason)
        assert stage.decoder is not None
        self._stage, self._decoder = stage, stage.decoder
        self._cache, self._state = cache, state
        self._max_length, self._kernels, self._records = max_length, kernels, records
        self._activation = _ACTIVATIONS[stage.model.config.hidden_act]

    def __call__(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Draw a token of the sequence in each of `slots` [rows] int32, and advance the state.

        Returns tokens [rows] int32, -1 where nothing runs, and log-probabilities [rows] float32;
        then the experts [rows, layers, k] int16 of the tokens that it feeds, if it records them.
        """
        kernels, state, eps = self._kernels, self._state, self._decoder.eps
        tokens, positions, counts = kernels.begin_step(state, slots)
        x = self._stage.model.get_input_embeddings()(tokens)
        rotations = self._decoder.rotations(x).squeeze(2)
        residual, experts = None, []
        for layer, cache in zip(self._decoder.layers, self._cache.blocks, strict=True):
            # attention
            h, residual = kernels.residual_norm(x, residual, layer.input_norm, eps)
            places = cache, state.tables, slots, positions
            qkv = layer.qkv.product(h)
            query = kernels.qk_norm_rotary_write(qkv, layer.norms, rotations, *places, eps)
            scaling = layer.scaling
            h = kernels.paged_attention(query, *places, self._max_length, scaling, layer.window)
            x = _out(layer, h.flatten(1))
            # feed-forward
            h, residual = kernels.residual_norm(x, residual, layer.mlp_norm, eps)
            if layer.experts is not None:
                x, chosen = self._by_experts(layer.experts, h, positions)
                experts.append(chosen)
            else:
                assert layer.gate_up is not None
                x = _down(layer, kernels.act_mul(layer.gate_up.product(h), self._activation))
        norm = self._stage.model.model.norm.weight
        hidden, _ = kernels.residual_norm(x, residual, norm, eps)
        logits = self._stage.logits_everywhere(hidden)
        drawn = kernels.sample(logits, slots, counts, state.streams, state.temperatures)
        kernels.advance(state, slots, drawn[0])
        return (*drawn, torch.stack(experts, 1).short()) if self._records else drawn

    def _by_experts(
        self, experts: LayerExperts, h: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted sum [tokens, hidden] of each token's experts, and these [tokens, k]."""
        kernels, first, number = self._kernels, experts.first, len(experts.gate_up)
        logits = functional.linear(h, experts.router)
        weights, chosen = kernels.route(
            logits, positions, experts.per_token, experts.normalizes, experts.weights_dtype
        )
        order, ends = kernels.order_by_expert(chosen, first, number)
        rows = kernels.grouped_product(h, experts.gate_up, order, ends, experts.per_token)
        rows = kernels.act_mul(rows, self._activation)
        rows = kernels.grouped_product(rows, experts.down, order, ends, 1)
        x = kernels.combine(rows, weights, chosen, first, number)
        return self._stage.parallel.sum(x), chosen


def obstacle(stage: RolloutStage) -> str:
    """Why a rank's model has no `GraphStep`; empty if it has one."""
    decoder, config = stage.decoder, stage.model.config
    if stage.parallel.pp > 1:
        return f"pp={stage.parallel.pp}: stages wait for each other's messages"
    if decoder is None or not decoder.rotates_alike:
        return f"model type {config.model_type} has no step of a fixed sequence"
    if stage.bars_pads:
        return f"model type {config.model_type} draws no pads of images, which a step may"
    if config.hidden_act not in _ACTIVATIONS:
        return f"activation {config.hidden_act}: wanted one of {sorted(_ACTIVATIONS)}"
    return ""


def _out(layer: FusedLayer, h: torch.Tensor) -> torch.Tensor:
    if layer.out_weight is None:
        return layer.attention.o_proj(h)
    return functional.linear(h, layer.out_weight)


def _down(layer: FusedLayer, h: torch.Tensor) -> torch.Tensor:
    if layer.down_weight is None:
        return layer.mlp.down_proj(h)
    return functional.linear(h, layer.down_weight)
