"""The work of training on a sequence, from a model's config."""

import math
from dataclasses import dataclass

from transformers import PretrainedConfig

from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.config_json import num_recurrent
from hybridrl.models.parallel import experts_per_token, model_parameters, num_experts
from hybridrl.models.stages import modules_before


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Floating-point operations of a forward pass over a sequence; backward has twice as many.

    A token takes `per_token`, two for each parameter of the layers that computes: of a mixture
    those of the chosen experts. One whose successor is scored takes `per_scored`, for the head.
    Each pair of a query and a key up to it takes `per_pair`, two for each feature of keys and of
    values. In layers with a window it takes `per_windowed_pair`, if less than `window` apart.

    Recomputed activations do not count: they are no work of the model. Of recurrent layers the
    products with parameters count, which are nearly all of their work.
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
        full = config.num_hidden_layers - windowed - num_recurrent(config)
        return cls(2 * layers, 2 * head, pair * full, pair * windowed, window)

    def __call__(self, tokens: int, scored: int) -> int:
        """Count a sequence of so many tokens, of which `scored` are predicted."""
        pairs = tokens * (tokens + 1) // 2
        outside = max(0, tokens - self.window)
        near = pairs - outside * (outside + 1) // 2
        attention = self.per_pair * pairs + self.per_windowed_pair * near
        return self.per_token * tokens + self.per_scored * scored + attention


_HEADS = ("lm_head.", "embed_out.")


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
