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
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout import process_groups
from hybridrl.layout.weight_switch import SwitchStats, WeightSwitch
from hybridrl.models.activations import PeakMemory
from hybridrl.preflight import train_sizes as sizes_of_training
from hybridrl.preflight.memory_inputs import PackedRow
from hybridrl.preflight.train_sizes import train_sizes

Layout = dict[str, int]
WIDTHS = {
    "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 256, "num_experts_per_tok": 2}
LARGE, SMALL = 4000, 200
"""Tokens of a vocabulary: its embedding is the largest parameter, or a layer has that."""
RANKS, RANK = 8, 3
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
    """Bytes of a parameter on the rank that writes it, besides shards and buckets, case by case.

    In torch's fake process group: gloo's threads hold tensors for a moment longer.
    """
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    with mock.patch.object(process_groups, "_meet", return_value=None):
        return [_peak(_model(folder, case), case) for case in CASES]


def _peak(model: str, case: tuple[str, int, Layout, int]) -> int:
    engine = TrainEngine(
        model,
        model=ModelConfig(compute_dtype=DType.bfloat16),
        trainer=_trainer(case[2]),
        device=torch.device("cpu"),
        lora=LoraConfig(rank=case[3]),
    )
    memory = PeakMemory()
    memory.track_external(*(shard.to_local() for shard in engine.named_shards().values()))
    before, peaks = memory.allocated("cpu"), []
    buckets, switch = [], WeightSwitch.switch

    def counted(*args: Any, **more: Any) -> SwitchStats:
        stats = switch(*args, **more)
        buckets.append(stats.scratch_bytes)
        return stats

    with memory, mock.patch.object(WeightSwitch, "switch", counted):
        for name in engine.shapes():
            memory.restart()
            engine.gather({name: RANK}, torch.bfloat16)
            peaks.append(memory.peak("cpu") - before - buckets[-1])
    return max(peaks)


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


def test_small_parameters_and_buckets_count_too(tmp_path: Path) -> None:
    """A rank gathers a bucket of them at a time, and two buckets are on their way."""
    case = CASES[0]
    model = _model(str(tmp_path), case)
    largest, bucket = LARGE * WIDTHS["hidden_size"] * 2, 4096
    with mock.patch.object(sizes_of_training, "BUCKET_BYTES", bucket):
        assert _planned(model, case) == largest + 2 * bucket
    with mock.patch.object(sizes_of_training, "BUCKET_BYTES", 2 * largest):
        total = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters()) * 2
        assert 2 * largest < total
        assert _planned(model, case) == 3 * 2 * largest


@pytest.mark.layouts
def test_saving_takes_what_the_plan_says(
    fresh_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """One parameter at a time, on the rank that writes it."""
    (peaks,) = fresh_ranks(1, _peaks, str(tmp_path))
    with mock.patch.object(sizes_of_training, "BUCKET_BYTES", 0):
        planned = [_planned(_model(str(tmp_path), case), case) for case in CASES]
    assert dict(zip(map(str, CASES), peaks, strict=True)) == dict(
        zip(map(str, CASES), planned, strict=True)
    )
