"""What the memory plan says of saving, against what it takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.checkpoint.hf import save_hf
from hybridrl.config import (
    ActorConfig,
    ClusterConfig,
    Config,
    Device,
    DType,
    LoraConfig,
    ModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.controller.memory_inputs import PackedRow
from hybridrl.controller.train_sizes import train_sizes
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout import process_groups
from hybridrl.models.peak_memory import PeakMemory

Layout = dict[str, int]
WIDTHS = {
    "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 256, "num_experts_per_tok": 2}
LARGE, SMALL = 4000, 200
"""Tokens of a vocabulary: its embedding is the largest parameter, or a layer has that."""
RANKS = 8
CASES = [
    ("qwen3", LARGE, {"fsdp": 8}, 0),
    ("qwen3", LARGE, {"fsdp": 4, "replicas": 2}, 0),
    ("qwen3", LARGE, {"fsdp": 4, "tp": 2}, 0),
    ("qwen3", LARGE, {"pp": 2, "fsdp": 2, "tp": 2}, 0),
    ("qwen3", SMALL, {"fsdp": 4, "tp": 2}, 0),
    ("qwen3", LARGE, {"fsdp": 8}, 8),
    ("qwen3", SMALL, {"fsdp": 8}, 8),
    ("qwen3", SMALL, {"fsdp": 4, "tp": 2}, 8),
    ("qwen3_moe", SMALL, {"fsdp": 8}, 0),
    ("qwen3_moe", SMALL, {"fsdp": 8, "ep": 4}, 0),
    ("qwen3_moe", SMALL, {"fsdp": 8, "ep": 8}, 0),
    ("qwen3_moe", SMALL, {"fsdp": 4, "tp": 2}, 0),
]
"""A family, its vocabulary, a layout, and the rank of adapters."""


def _trainer(layout: Layout) -> TrainerConfig:
    return TrainerConfig(layout=TrainLayoutConfig(**layout))  # type: ignore[arg-type]


def _peaks(folder: str) -> list[int]:
    """Bytes that saving takes on a rank besides the shards, case by case.

    In torch's fake process group: gloo's threads hold tensors for a moment longer.
    """
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=3, world_size=RANKS, store=FakeStore())
    with (
        mock.patch.object(process_groups, "_meet", return_value=None),
        mock.patch.object(dist, "broadcast_object_list"),
        mock.patch.object(dist, "all_gather_object"),
    ):
        return [_peak(_model(folder, case), case, folder) for case in CASES]


def _peak(model: str, case: tuple[str, int, Layout, int], folder: str) -> int:
    engine = TrainEngine(
        model,
        model=ModelConfig(compute_dtype=DType.bfloat16),
        trainer=_trainer(case[2]),
        device=torch.device("cpu"),
        lora=LoraConfig(rank=case[3]),
    )
    memory = PeakMemory()
    memory.track_external(*(shard.to_local() for shard in engine.named_shards().values()))
    before = memory.allocated("cpu")
    with memory:
        save_hf(engine, Path(folder))
    return memory.peak("cpu") - before


def _model(folder: str, case: tuple[str, int, Layout, int]) -> str:
    kind, vocabulary = case[:2]
    path = Path(folder) / f"{kind}_{vocabulary}"
    if not path.exists():
        widths = WIDTHS | (EXPERTS if kind == "qwen3_moe" else {})
        config = AutoConfig.for_model(kind, vocab_size=vocabulary, **widths)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return str(path)


def _planned(model: str, case: tuple[str, int, Layout, int]) -> int:
    config = Config(
        model=ModelConfig(path=model, compute_dtype=DType.bfloat16),
        actor=ActorConfig(lora=LoraConfig(rank=case[3])),
        trainer=_trainer(case[2]),
        cluster=ClusterConfig(ranks=RANKS, device=Device.cpu),
    )
    shape, trainer = AutoConfig.from_pretrained(model), config.trainer
    row = PackedRow(tokens=8, scored=4)
    sizes = train_sizes(config, shape, trainer.layout, config.actor.lora, row, trainer.optim)
    return max(stage.saving()["parameter being saved"] for stage in sizes)


@pytest.mark.layouts
def test_saving_takes_what_the_plan_says(
    fresh_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """One parameter at a time, on a rank that does not write."""
    (peaks,) = fresh_ranks(1, _peaks, str(tmp_path))
    planned = [_planned(_model(str(tmp_path), case), case) for case in CASES]
    assert dict(zip(map(str, CASES), peaks, strict=True)) == dict(
        zip(map(str, CASES), planned, strict=True)
    )
