"""What the plan of a pipeline depends on: how many rows it computes at once."""

import pytest
from transformers import AutoConfig, PretrainedConfig

from hybridrl.config import (
    ActivationMode,
    ClusterConfig,
    Config,
    DataConfig,
    Device,
    LoraConfig,
    PipelineSchedule,
    RolloutConfig,
)
from hybridrl.costs.train_memory import TrainSizes
from hybridrl.preflight.memory_inputs import PackedRow
from hybridrl.preflight.prepare import build_recipe
from hybridrl.preflight.train_sizes import train_sizes


@pytest.fixture
def config() -> Config:
    """4 prompts x 8 samples of at most 200 tokens, on 4 ranks: two replicas of two stages."""
    config = Config(
        cluster=ClusterConfig(device=Device.cuda, ranks=4),
        data=DataConfig(max_prompt_tokens=100),
        rollout=RolloutConfig(max_new_tokens=100),
    )
    config.trainer.prompts_per_step = 4
    config.trainer.layout.pp = config.trainer.layout.fsdp = 2
    config.resolve_device(4, "this test")
    return config


@pytest.mark.parametrize(
    ("most", "mini_batches", "chunk", "rows"),
    [
        (1000, 1, 0, 4),  # 17 samples of a replica, five a row
        (1000, 4, 0, 1),  # 5 samples
        (330, 1, 0, 17),  # one a row: two are too long together
        (150, 4, 0, 5),  # each is longer than a micro-batch, and a row
        (60, 4, 60, 5),  # a sample has four chunks, but five may be short
    ],
)
def test_rows_of_a_round(
    config: Config, most: int, mini_batches: int, chunk: int, rows: int
) -> None:
    config.trainer.max_tokens_per_micro_batch = most
    config.trainer.mini_batches, config.trainer.chunk_tokens = mini_batches, chunk
    graph = build_recipe({"target": "hybridrl.recipes.grpo:grpo"})
    assert PackedRow.of(config, graph, config.trainer.layout, 4).number == rows


def _stages(config: Config, rows: int) -> list[TrainSizes]:
    shape: PretrainedConfig = AutoConfig.for_model(
        "qwen3", hidden_size=256, intermediate_size=512, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, vocab_size=1000,
    )  # fmt: skip
    layout, optim = config.trainer.layout, config.trainer.optim
    return train_sizes(config, shape, layout, LoraConfig(), PackedRow(1000, 500, rows), optim)


@pytest.mark.parametrize(
    ("schedule", "received"),
    [
        # Stage 0 of 1F1B has two rows in flight, and a gradient on its way to it; stage 1 a row.
        (PipelineSchedule.one_f_one_b, (1 + 1, 0 + 1)),
        # Five and three passes of two chunks in flight, and a row and a gradient on their way.
        (PipelineSchedule.interleaved, (4 + 2, 2 + 2)),
    ],
)
def test_a_stage_has_memory_for_the_rows_in_flight_alone(
    config: Config, schedule: PipelineSchedule, received: tuple[int, int]
) -> None:
    config.trainer.layout.schedule = schedule
    few, many = _stages(config, 10), _stages(config, 14)
    row = 1000 * 256 * 2
    for stage, messages in enumerate(received):
        assert many[stage].received == few[stage].received == messages * row
        assert many[stage].update() == few[stage].update()


def test_a_row_of_an_interleaved_pipeline_needs_others(config: Config) -> None:
    """Five rows are six there: a multiple of the stages."""
    config.trainer.layout.schedule = PipelineSchedule.interleaved
    config.trainer.max_tokens_per_micro_batch, config.trainer.mini_batches = 150, 4
    graph = build_recipe({"target": "hybridrl.recipes.grpo:grpo"})
    assert PackedRow.of(config, graph, config.trainer.layout, 4).number == 6


def test_offloaded_activations_of_a_zero_bubble_pipeline_are_on_the_host(config: Config) -> None:
    config.trainer.layout.schedule = PipelineSchedule.zero_bubble
    kept = [stage.update()["activations"] for stage in _stages(config, 8)]
    config.trainer.activations = ActivationMode.offload
    offloaded = [stage.update()["activations"] for stage in _stages(config, 8)]
    assert all(a > 1.5 * b for a, b in zip(kept, offloaded, strict=True))
