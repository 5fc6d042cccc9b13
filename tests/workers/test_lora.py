"""An actor with adapters on real processes: what travels, what generates, what the reference is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.config import (
    ActorConfig,
    ClusterConfig,
    Config,
    Device,
    DType,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RolloutLayoutConfig,
    TinyModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.tiny import make_tiny_model
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.role_factory import ActorRoleFactory
from hybridrl.workers.store import SampleStore

TINY = TinyModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=64, alphabet="abcdefghij",
)  # fmt: skip


def sequences(rank: int) -> list[TrainSequence]:
    random = torch.Generator().manual_seed(rank)
    lengths = (7, 12, 9)
    return [
        TrainSequence(torch.randint(3, 13, (length,), generator=random), length - 3)
        for length in lengths
    ]


def run(path: str, train: dict[str, int], gen: dict[str, int], folder: Path) -> dict[str, Any]:
    """Three switches with updates between them; what each moved and left, by rank."""
    config = Config(
        model=ModelConfig(path=path, tiny=TINY),
        actor=ActorConfig(lora=LoraConfig(rank=3, alpha=12)),
        trainer=TrainerConfig(optim=OptimConfig(lr=0.02), layout=TrainLayoutConfig(**train)),
        rollout=RolloutConfig(max_running=4, layout=RolloutLayoutConfig(**gen)),
        cluster=ClusterConfig(ranks=dist.get_world_size(), device=Device.cpu),
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    store, cpu = SampleStore(), torch.device("cpu")
    actor = ColocatedActor(config, path, tokenizer, store, cpu)
    engine, residency = actor.trainer.train_engine, actor.residency
    build = ActorRoleFactory(config, path, tokenizer, store, cpu, actor)
    shared = build.frozen_copy()
    base = actor.base_weights(DType.float32)
    assert base is not None
    assert all(
        parameter.data_ptr() == base[name].data_ptr()
        for name, parameter in shared.engine.model.named_parameters()
    ), "the reference is the base, not a copy"
    kept = {name: tensor.clone() for name, tensor in base.items()}
    results: dict[str, Any] = {"moved": [], "theory": [], "gap": [], "entropy": []}
    old_policy = build.old_policy()
    assert old_policy is not None
    everything = [s for rank in range(dist.get_world_size()) for s in sequences(rank)]
    first = engine.log_probs(everything)
    for _ in range(3):
        engine.update(sequences(dist.get_rank()), CrossEntropyLoss())
        report = actor.enter_generation()
        assert report is not None
        results["moved"].append(report.bytes_received)
        results["theory"].append(report.bytes_theory)
        generated = old_policy.engine.log_probs(everything)
        trained = engine.log_probs(everything)
        pairs = zip(generated, trained, strict=True)
        results["gap"].append(max((a - b).abs().max().item() for a, b in pairs))
        residency.enter_training()
    shared.onload()
    reference = shared.engine.log_probs(everything)
    pairs = zip(reference, first, strict=True)
    results["reference"] = max((a - b).abs().max().item() for a, b in pairs)
    copied = build.frozen_copy()  # by now no base
    assert actor.base_weights(DType.float32) is None
    copied.onload()
    pairs = zip(copied.engine.log_probs(everything), trained, strict=True)
    results["copy"] = max((a - b).abs().max().item() for a, b in pairs)
    assert all(torch.equal(kept[name], tensor) for name, tensor in base.items())
    results["learned"] = max(
        (a - b).abs().max().item() for a, b in zip(first, trained, strict=True)
    )
    return results


@pytest.mark.parametrize(
    ("train", "gen"),
    [
        ({"fsdp": 2}, {"tp": 1}),
        pytest.param({"tp": 2}, {"tp": 1}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tp": 2}, {"tp": 4}, marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "fsdp": 2}, {"pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_only_adapters_move_after_the_first_switch(
    ranks: Callable[..., list[Any]],
    tmp_path: Path,
    train: dict[str, int],
    gen: dict[str, int],
) -> None:
    """What generates is what is trained; the reference is the base, which nothing changes.

    Measured: log-probabilities of order 3 differ by 2e-6.
    """
    path = str(tmp_path / "model")
    make_tiny_model(path, TINY, seed=0)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)  # weights that tell tokens apart
    model.save_pretrained(path)
    size = 1
    for extent in train.values():
        size *= extent
    results = ranks(size, run, path, train, gen, tmp_path)
    for result in results:
        assert result["moved"][1:] == result["theory"][1:]
        assert result["moved"][1] == result["moved"][2]
        assert max(result["gap"]) < 1e-5, result["gap"]
        assert result["reference"] < 1e-5
        assert result["copy"] < 1e-5
        assert result["learned"] > 0.1
    if train == {"fsdp": 2} and gen == {"tp": 1}:  # each lacks half: together they get it all
        linear = [p for name, p in model.named_parameters() if name.endswith("proj.weight")]
        assert len(linear) == 2 * 7
        adapters = sum(3 * sum(weight.shape) for weight in linear)
        weights = sum(parameter.numel() for parameter in model.parameters())
        received = torch.tensor([result["moved"] for result in results]).sum(0).tolist()
        assert received == [4 * (weights + adapters), 4 * adapters, 4 * adapters]
