"""The rollout engine that a config asks for."""

import pytest
import torch
from transformers import Qwen3Config

from hybridrl.config import ClusterConfig, Config, DataConfig, Device, ModelConfig
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.switching import plan_switch
from hybridrl.models.parallel import model_parameters
from hybridrl.models.shard import GenParallel
from hybridrl.workers.generation import make_rollout_engine


def test_sequences_end_with_the_models_positions() -> None:
    """Though the longest prompt of the config and its response would have more tokens."""
    model = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=48,
    )  # fmt: skip
    config = Config(
        model=ModelConfig(path="unused"), data=DataConfig(max_prompt_tokens=32),
        cluster=ClusterConfig(device=Device.cpu),
    )  # fmt: skip
    config.rollout.max_new_tokens, config.rollout.max_running = 40, 1
    switch = plan_switch(model_parameters(model), TrainAxes(), 1, 1)
    engine = make_rollout_engine(
        config, "unused", model, switch, GenParallel(), torch.device("cpu"), None
    )
    engine.submit([Request(0, [1] * 8, SamplingParams(40), 0)])
    with pytest.raises(ValueError, match=r"may reach 49 tokens .* the longest sequence is 48"):
        engine.submit([Request(1, [1] * 9, SamplingParams(40), 0)])
