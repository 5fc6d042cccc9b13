"""The work of training on a sequence, from a model's config."""

import math

from transformers import PretrainedConfig

from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.parallel import experts_per_token, model_parameters, num_experts
from hybridrl.models.stages import modules_before


def forward_flops(config: PretrainedConfig) -> tuple[int, int]:
    """a and b of a n + b n^2, the floating-point operations of a forward pass over n tokens.

    Backward has twice as many, so shares are the same. A token takes two for each parameter that
    computes. Of a mixture these are those of the chosen experts; the head counts as if every token
    were scored. The n^2 / 2 pairs of a causal layer take two for each feature of keys and of
    values. A layer with a window pays for the window.
    """
    experts, chosen = num_experts(config), experts_per_token(config)
    embeddings = tuple(modules_before(config))
    active = 0
    for parameter in model_parameters(config):
        size = math.prod(parameter.shape)
        if parameter.experts:
            size = size * chosen // experts
        is_looked_up = any(f".{name}." in parameter.name for name in embeddings)
        active += 0 if is_looked_up and not config.tie_word_embeddings else size
    shape = attention_shape(config)
    features = config.num_attention_heads * (shape.key_size + shape.value_size)
    windowed = _windowed_layers(config)
    window = 2 * features * windowed * (getattr(config, "sliding_window", None) or 0)
    full = config.num_hidden_layers - windowed
    return 2 * active + window, features * full


def _windowed_layers(config: PretrainedConfig) -> int:
    """Layers that attend within a window."""
    if types := getattr(config, "layer_types", None):
        return list(types).count("sliding_attention")
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0
