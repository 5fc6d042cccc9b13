"""The text part of a checkpoint that has an image tower, as a causal language model of its own.

transformers has one of Qwen3.5, and none of Qwen3-VL. Its text model is the base model, so that
rows with images give it their embeddings, positions [4, 1, tokens] and DeepStack features
(`hybridrl.models.vision`), and rows of text alone are as any other model's. Importing this module
makes transformers' `AutoModelForCausalLM` find it.
"""

from typing import Any, ClassVar

from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import PrefixChange
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLPreTrainedModel,
    Qwen3VLTextModel,
)

from hybridrl.models.config_json import IMAGE_FAMILIES


class Qwen3VLTextForCausalLM(Qwen3VLPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Qwen3-VL's text model with its head over the vocabulary."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"^model\.visual\."]
    config: Qwen3VLTextConfig

    def __init__(self, config: Qwen3VLTextConfig) -> None:
        super().__init__(config)
        self.model = Qwen3VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, **inputs: Any) -> CausalLMOutputWithPast:
        """Logits [batch, tokens, vocab] of what `Qwen3VLTextModel` takes."""
        outputs = self.model(**inputs)
        logits = self.lm_head(outputs.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the text part, of a model whose images are computed; another's as it is."""
    if config.model_type not in IMAGE_FAMILIES:
        return config
    text: PretrainedConfig = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings
    text.name_or_path = config.name_or_path  # where the tower is
    return text


AutoModelForCausalLM.register(Qwen3VLTextConfig, Qwen3VLTextForCausalLM, exist_ok=True)
if not get_checkpoint_conversion_mapping(Qwen3VLTextConfig.model_type):
    register_checkpoint_conversion_mapping(
        Qwen3VLTextConfig.model_type,
        [PrefixChange(prefix_to_remove="language_model", model_prefix="model")],
    )
