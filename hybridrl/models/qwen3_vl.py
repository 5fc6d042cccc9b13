"""The text part of Qwen3-VL as a causal language model, which transformers lacks.

Its text model is the base model, so that rows with images give it their embeddings, positions
[4, 1, tokens] and DeepStack features (`hybridrl.models.images`), and rows of text alone are as any
other model's. Importing this module makes transformers' `AutoModelForCausalLM` find it. Its tensor
parallelism is that of Qwen3, whose layers it has.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, Qwen3Config
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLPreTrainedModel,
    Qwen3VLTextModel,
)


class Qwen3VLTextForCausalLM(Qwen3VLPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Qwen3-VL's text model with its head over the vocabulary."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    config: Qwen3VLTextConfig

    def __init__(self, config: Qwen3VLTextConfig) -> None:
        super().__init__(config)
        self.model = Qwen3VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor | None = None, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Logits [batch, tokens, vocab] of what `Qwen3VLTextModel` takes."""
        outputs = self.model(input_ids=input_ids, **inputs)
        logits = self.lm_head(outputs.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


AutoModelForCausalLM.register(Qwen3VLTextConfig, Qwen3VLTextForCausalLM, exist_ok=True)
if Qwen3VLTextConfig.base_model_tp_plan is None:
    Qwen3VLTextConfig.base_model_tp_plan = Qwen3Config.base_model_tp_plan
