"""Tiny models, ragged sequences, and the oracle: a plain padded forward of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridrl.engines.train.interface import TrainSequence

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`tiny(family, tied=True, **config)` writes a random model and returns its directory."""

    def make(family: str = "qwen3", tied: bool = True, **extra: object) -> str:
        config_class, model_class = FAMILIES[family]
        settings = {
            "vocab_size": 41,
            "hidden_size": 24,
            "intermediate_size": 36,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
            "initializer_range": 0.3,
        }
        torch.manual_seed(7)
        model = model_class(config_class(**settings | extra))
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        return str(directory)

    return make


@pytest.fixture
def sequences() -> list[TrainSequence]:
    """Nine sequences of 3 to 17 tokens with advantages, old log-probabilities and some masks."""
    return make_sequences()


@pytest.fixture(scope="session")
def sequences_of() -> Callable[[], list[TrainSequence]]:
    """Makes the `sequences`, for fixtures of a wider scope."""
    return make_sequences


def make_sequences() -> list[TrainSequence]:
    """Sequences that are equal at every call."""
    random = torch.Generator().manual_seed(3)
    sequences = []
    for length, response in [
        (9, 4),
        (3, 1),
        (17, 9),
        (9, 6),
        (5, 2),
        (12, 12 - 1),
        (7, 3),
        (9, 1),
        (4, 3),
    ]:
        mask = torch.rand(response, generator=random) > 0.3 if len(sequences) % 3 == 0 else None
        if mask is not None:
            mask[0] = True
        fields = {
            "advantages": torch.randn(1, generator=random).item(),
            "old_log_probs": -3 * torch.rand(response, generator=random),
        }
        ids = torch.randint(0, 41, (length,), generator=random)
        sequences.append(TrainSequence(ids, response, fields, mask))
    return sequences


@pytest.fixture
def padded_log_probs() -> Callable[..., list[torch.Tensor]]:
    """`f(model, sequences, temperature=1)`: log-probabilities of all response tokens, padded."""

    def score(
        model: torch.nn.Module, sequences: Sequence[TrainSequence], temperature: float = 1.0
    ) -> list[torch.Tensor]:
        longest = max(len(sequence.ids) for sequence in sequences)
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence.ids)] = sequence.ids
            mask[row, : len(sequence.ids)] = 1
        logits = model(ids, attention_mask=mask).logits / temperature
        scores = []
        for row, sequence in enumerate(sequences):
            length, response = len(sequence.ids), sequence.response_tokens
            log_p = logits[row, length - response - 1 : length - 1].log_softmax(-1)
            scores.append(log_p.gather(-1, sequence.ids[-response:, None])[:, 0])
        return scores

    return score


@pytest.fixture
def model_dir(tiny: Callable[..., str]) -> Path:
    """A tied Qwen3."""
    return Path(tiny("qwen3"))
