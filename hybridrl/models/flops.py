"""The work of training on a sequence, and of an image tower, from a model's config."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.config_json import layers_with_keys, num_recurrent
from hybridrl.models.image_text import TOWER
from hybridrl.models.parallel import experts_per_token, meta_model, model_parameters, num_experts
from hybridrl.models.recurrent import Mixer, mixers_of, state_shapes, use_batches
from hybridrl.models.stages import modules_before
from hybridrl.models.states import StateShapes


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Floating-point operations of a forward pass over a sequence; backward has twice as many.

    A token takes `per_token`, two for each parameter of the layers that computes: of a mixture
    those of the chosen experts. One whose successor is scored takes `per_scored`, for the head.
    Each pair of a query and a key up to it takes `per_pair`, two for each feature of keys and of
    values. In layers with a window it takes `per_windowed_pair`, if less than `window` apart.

    Recomputed activations do not count: they are no work of the model. Recurrent layers count among
    `per_token`, with the products of their states (`state_flops`).
    """

    per_token: int
    per_scored: int
    per_pair: int
    per_windowed_pair: int = 0
    window: int = 0

    @classmethod
    def of(cls, config: PretrainedConfig) -> "ForwardFlops":
        """Count the operations of a model, whatever its layout."""
        experts, chosen = num_experts(config), experts_per_token(config)
        embeddings = tuple(modules_before(config))
        layers = head = 0
        for parameter in model_parameters(config):
            size = math.prod(parameter.shape)
            if parameter.name.endswith(_RATES) or parameter.name.startswith(TOWER):
                continue  # a tower counts by images
            if parameter.experts:
                size = size * chosen // experts
            is_looked_up = any(f".{name}." in parameter.name for name in embeddings)
            if is_looked_up:
                head += size if config.tie_word_embeddings else 0
            elif parameter.name.startswith(_HEADS):
                head += size
            else:
                layers += size
        shape = attention_shape(config)
        pair = 2 * config.num_attention_heads * (shape.key_size + shape.value_size)
        windowed = _windowed_layers(config)
        window = getattr(config, "sliding_window", None) or 0
        full = layers_with_keys(config).count(True) - windowed
        per_token = 2 * layers + state_flops(config)
        return cls(per_token, 2 * head, pair * full, pair * windowed, window)

    def __call__(self, tokens: int, scored: int) -> int:
        """Count a sequence of so many tokens, of which `scored` are predicted."""
        pairs = tokens * (tokens + 1) // 2
        outside = max(0, tokens - self.window)
        near = pairs - outside * (outside + 1) // 2
        attention = self.per_pair * pairs + self.per_windowed_pair * near
        return self.per_token * tokens + self.per_scored * scored + attention


@dataclass(frozen=True, slots=True)
class TowerFlops:
    """Floating-point operations of an image tower's forward pass over an image, as `ForwardFlops`.

    A patch takes `per_patch`, each of the pads that patches are merged to `per_pad`. Patches attend
    to all patches of the image: each pair of two takes `per_pair`.
    """

    per_patch: int
    per_pad: int
    per_pair: int
    patches_per_pad: int

    @classmethod
    def of(cls, tower: Any) -> "TowerFlops":
        """Count the operations of this tower."""
        per_patch = per_pad = 0
        for name, parameter in tower.named_parameters():
            if parameter.dim() == 1 or name.startswith("pos_embed."):  # no products
                continue
            if "merger" in name:
                per_pad += 2 * parameter.numel()
            else:
                per_patch += 2 * parameter.numel()
        per_pair = 4 * tower.config.hidden_size * len(tower.blocks)
        return cls(per_patch, per_pad, per_pair, tower.config.spatial_merge_size**2)

    def __call__(self, patches: int) -> int:
        """Count an image of so many patches."""
        pads = patches // self.patches_per_pad
        return self.per_patch * patches + self.per_pad * pads + self.per_pair * patches**2


_HEADS = ("lm_head.", "embed_out.")
_RATES = ".A_log"  # of decay, of each element of a state: they are in no product
_DELTA_RULE = "Delta"  # in the names of such mixers: GatedDeltaNet, KimiDeltaAttention
_STATE, _DELTA_STATE = 4, 6


def state_flops(config: PretrainedConfig) -> int:
    """Count the operations of a token on the states of recurrent layers."""
    if not num_recurrent(config):
        return 0
    model = meta_model(config)
    use_batches(model)
    return mixer_flops(mixers_of(model), state_shapes(model))


def mixer_flops(mixers: Sequence[Mixer], shapes: StateShapes) -> int:
    """Count the operations of a token on the states of `mixers`, which have these `shapes`.

    A token adds an outer product to the matrix of a head and multiplies a vector with the result,
    which takes four operations an element. Under a delta rule it first multiplies its key with the
    matrix (Gated DeltaNet, arXiv 2412.06464, equation 10). What kernels compute besides, to take
    several tokens at once, is no work of the model.
    """
    flops = 0
    for mixer, (_, *states) in zip(mixers, shapes, strict=True):
        has_delta = _DELTA_RULE in type(mixer.module).__name__
        elements = sum(shape.numel() for shape, _ in states)
        flops += (_DELTA_STATE if has_delta else _STATE) * elements
    return flops


def forward_flops(config: PretrainedConfig) -> tuple[int, int]:
    """a and b of a n + b n^2, about the operations of a forward pass over n tokens.

    For shares of work: the head counts as if every token were scored. In a layer with a window
    every token has a whole one.
    """
    flops = ForwardFlops.of(config)
    per_token = flops.per_token + flops.per_scored + flops.per_windowed_pair * flops.window
    return per_token, flops.per_pair // 2


def _windowed_layers(config: PretrainedConfig) -> int:
    """Layers that attend within a window."""
    if types := getattr(config, "layer_types", None):
        return list(types).count("sliding_attention")
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0
