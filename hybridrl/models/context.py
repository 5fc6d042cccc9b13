"""The longest sequence that a model reads, by its config."""

from transformers import PretrainedConfig


def context_tokens(config: PretrainedConfig) -> int:
    """Tokens of the longest sequence that the engines compute as transformers does.

    Under `longrope` (Phi 3, Phi 4) transformers rotates a sequence beyond the original context by
    other frequencies, from its first token on. It asks the longest sequence of a call, and a packed
    row or a decode step has several. So the original context is all that there is.
    """
    tokens: int = config.max_position_embeddings
    rotation = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [x for x in rotation.values() if isinstance(x, dict)]
    for parameters in by_layer_type or [rotation]:
        if parameters.get("rope_type") == "longrope":
            tokens = min(tokens, parameters["original_max_position_embeddings"])
    return tokens
