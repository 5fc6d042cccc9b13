"""The text parts of Qwen3-VL and its mixture as causal language models, which transformers lacks.

Their text models are the base models, so that rows with images give them embeddings, positions
[4, 1, tokens] and DeepStack features (`hybridrl.models.images`), and rows of text alone are as any
other model's. Importing this module makes transformers' `AutoModelForCausalLM` find them. Their
tensor and expert parallelism are those of Qwen3 and Qwen3-MoE, whose layers they have.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLPreTrainedModel,
    Qwen3VLTextModel,
)
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoePreTrainedModel,
    Qwen3VLMoeTextModel,
)


class _WithHead:
    """A text model with its head over the vocabulary."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    text_model: ClassVar[Any]

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.text_model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    def forward(
        self, input_ids: torch.Tensor | None = None, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Logits [batch, tokens, vocab] of what the text model takes."""
        outputs = self.model(input_ids=input_ids, **inputs)
        logits = self.lm_head(outputs.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)


class Qwen3VLTextForCausalLM(_WithHead, Qwen3VLPreTrainedModel, GenerationMixin):
    """Qwen3-VL's text model with its head."""

    text_model = Qwen3VLTextModel
    config: Qwen3VLTextConfig


class Qwen3VLMoeTextForCausalLM(_WithHead, Qwen3VLMoePreTrainedModel, GenerationMixin):
    """Qwen3-VL-MoE's text model with its head."""

    text_model = Qwen3VLMoeTextModel
    config: Qwen3VLMoeTextConfig


class Qwen3VLTextForSequenceClassification(
    GenericForSequenceClassification, Qwen3VLPreTrainedModel
):
    """Qwen3-VL's text model with a head for values."""

    config: Qwen3VLTextConfig


class Qwen3VLMoeTextForSequenceClassification(
    GenericForSequenceClassification, Qwen3VLMoePreTrainedModel
):
    """Qwen3-VL-MoE's text model with a head for values."""

    config: Qwen3VLMoeTextConfig


AutoModelForCausalLM.register(Qwen3VLTextConfig, Qwen3VLTextForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(Qwen3VLMoeTextConfig, Qwen3VLMoeTextForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    Qwen3VLTextConfig, Qwen3VLTextForSequenceClassification, exist_ok=True
)
AutoModelForSequenceClassification.register(
    Qwen3VLMoeTextConfig, Qwen3VLMoeTextForSequenceClassification, exist_ok=True
)
# Their own are missing, or leave the norms of queries and keys out.
Qwen3VLTextConfig.base_model_pp_plan = Qwen3Config.base_model_pp_plan
Qwen3VLTextConfig.base_model_tp_plan = Qwen3Config.base_model_tp_plan
Qwen3VLMoeTextConfig.base_model_tp_plan = Qwen3MoeConfig.base_model_tp_plan
Qwen3VLMoeTextConfig.base_model_ep_plan = Qwen3MoeConfig.base_model_ep_plan
