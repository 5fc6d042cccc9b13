"""Small models of every family, ragged sequences, and the oracle: transformers in float64."""

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hybridrl.engines.train.interface import TrainSequence

VOCAB = 53  # odd, so that tensor parallelism pads it
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0, "num_labels": 1,
}  # fmt: skip
WITHOUT_HEAD_DIM = {key: value for key, value in SHAPE.items() if key != "head_dim"}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=5),
    "qwen2": Qwen2Config(
        **WITHOUT_HEAD_DIM, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
        tie_word_embeddings=True,
    ),
}
LENGTHS = [(9, 4), (3, 1), (17, 9), (9, 0), (5, 2), (12, 11), (7, 3), (9, 1), (30, 20)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`tiny(family, classifier=False, shard="5GB")` writes a random model: its directory."""
    directories: dict[tuple[str, bool, str], str] = {}

    def make(family: str = "qwen3", classifier: bool = False, shard: str = "5GB") -> str:
        key = family, classifier, shard
        if key not in directories:
            torch.manual_seed(7)
            auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
            model = auto.from_config(CONFIGS[family], dtype=torch.float32)
            directory = tmp_path_factory.mktemp(family)
            model.save_pretrained(directory, max_shard_size=shard)
            directories[key] = str(directory)
        return directories[key]

    return make


@pytest.fixture(scope="session")
def sequences() -> list[TrainSequence]:
    """Nine sequences of 3 to 30 tokens, one of them without a response, one ending in padding."""
    random = torch.Generator().manual_seed(3)
    sequences = [
        TrainSequence(torch.randint(1, VOCAB, (length,), generator=random), response)
        for length, response in LENGTHS
    ]
    sequences[6].ids[-2:] = 0
    sequences[7].ids[3] = VOCAB - 1  # the last row before the padding
    return sequences


@pytest.fixture(scope="session")
def log_probs_oracle() -> Callable[..., list[torch.Tensor]]:
    """`f(path, sequences, temperature)`: transformers, each sequence alone, in float64."""

    @torch.no_grad()
    def score(
        path: str, sequences: Sequence[TrainSequence], temperature: float
    ) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        scores = []
        for sequence in sequences:
            length, response = len(sequence.ids), sequence.response_tokens
            logits = model(sequence.ids[None]).logits[0, length - response - 1 : length - 1]
            targets = sequence.ids[length - response :, None]
            scores.append((logits / temperature).log_softmax(-1).gather(-1, targets)[:, 0].float())
        return scores

    return score


@pytest.fixture(scope="session")
def values_oracle() -> Callable[..., list[float]]:
    """`f(path, sequences)`: transformers' own score of each sequence alone, in float64."""

    @torch.no_grad()
    def score(path: str, sequences: Sequence[TrainSequence]) -> list[float]:
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64)
        return [model(sequence.ids[None]).logits.item() for sequence in sequences]

    return score
