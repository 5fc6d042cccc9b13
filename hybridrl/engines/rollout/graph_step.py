"""A decode step as a fixed sequence of kernels that ask the host nothing: a CUDA graph can hold it.

State, block tables and draws are on the device (`DecodeState`). A step embeds the pending tokens,
computes layers and head, draws, and advances the state.
"""

from types import ModuleType

import torch
from torch.nn import functional

from hybridrl.engines.rollout.decode import FusedLayer
from hybridrl.engines.rollout.stage import RolloutStage
from hybridrl.kernels.decode_state import DecodeState
from hybridrl.models.paged_attention import KVCache

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""The kernels' names by those of transformers."""


class GraphStep:
    """The step of a dense model of `decode.FAMILIES` on one rank, whose draws are not restricted.

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
    ) -> None:
        """Raises ValueError for a model that it does not compute."""
        if reason := obstacle(stage):
            raise ValueError(reason)
        assert stage.decoder is not None
        self._stage, self._decoder = stage, stage.decoder
        self._cache, self._state = cache, state
        self._max_length, self._kernels = max_length, kernels
        self._activation = _ACTIVATIONS[stage.model.config.hidden_act]

    def __call__(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token of the sequence in each of `slots` [rows] int32, and advance the state.

        Returns tokens [rows] int32, -1 where nothing runs, and log-probabilities [rows] float32.
        """
        kernels, state, eps = self._kernels, self._state, self._decoder.eps
        tokens, positions, counts = kernels.begin_step(state, slots)
        x = self._stage.model.get_input_embeddings()(tokens)
        rotations = self._decoder.rotations(x).squeeze(2)
        residual = None
        for layer, cache in zip(self._decoder.layers, self._cache.blocks, strict=True):
            # attention
            h, residual = kernels.residual_norm(x, residual, layer.input_norm, eps)
            places = cache, state.tables, slots, positions
            qkv = layer.qkv.product(h)
            query = kernels.qk_norm_rotary_write(qkv, layer.norms, rotations, *places, eps)
            scaling = layer.attention.scaling
            h = kernels.paged_attention(query, *places, self._max_length, scaling, layer.window)
            x = _out(layer, h.flatten(1))
            # feed-forward
            h, residual = kernels.residual_norm(x, residual, layer.mlp_norm, eps)
            assert layer.gate_up is not None
            x = _down(layer, kernels.act_mul(layer.gate_up.product(h), self._activation))
        norm = self._stage.model.model.norm.weight
        hidden, _ = kernels.residual_norm(x, residual, norm, eps)
        logits = self._stage.logits(hidden)
        drawn = kernels.sample(logits, slots, counts, state.streams, state.temperatures)
        kernels.advance(state, slots, drawn[0])
        return drawn


def obstacle(stage: RolloutStage) -> str:
    """Why a rank's model has no `GraphStep`; empty if it has one."""
    decoder, config = stage.decoder, stage.model.config
    if stage.parallel.tp * stage.parallel.pp > 1:
        return f"tp={stage.parallel.tp}, pp={stage.parallel.pp}: an instance has several ranks"
    dense = decoder is not None and all(layer.gate_up for layer in decoder.layers)
    if decoder is None or not dense or not decoder.rotates_alike:
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
