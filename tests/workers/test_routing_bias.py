"""Routing biases that training moves go wherever weights go."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.checkpoint import distributed
from hybridrl.checkpoint.hf import save_hf
from hybridrl.config import (
    ClusterConfig,
    Config,
    Device,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RolloutLayoutConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.buffers import persistent_buffers, routing_biases
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.ema import MovingAverage
from hybridrl.workers.role_factory import ActorRoleFactory
from hybridrl.workers.store import SampleStore

RATE = 0.25
CPU = torch.device("cpu")


def make_model(path: Path) -> None:
    tokenizer = make_char_tokenizer("abcdefghij", 64)
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=None,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
        n_group=1, topk_group=1, first_k_dense_replace=1, pad_token_id=0, eos_token_id=1,
        initializer_range=0.2,
    )  # fmt: skip
    DeepseekV3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def gap(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def run(path: str, folder: Path) -> dict[str, Any]:
    """Two updates, then the biases of all that has the weights."""
    config = Config(
        model=ModelConfig(path=path),
        trainer=TrainerConfig(
            optim=OptimConfig(lr=0.02),
            layout=TrainLayoutConfig(pp=2),
            router_bias_update_rate=RATE,
        ),
        rollout=RolloutConfig(max_running=4, layout=RolloutLayoutConfig(tp=2)),
        cluster=ClusterConfig(ranks=2, device=Device.cpu),
    )
    tokenizer, store = AutoTokenizer.from_pretrained(path), SampleStore()
    actor = ColocatedActor(config, path, tokenizer, store, CPU)
    engine = actor.trainer.train_engine
    build = ActorRoleFactory(config, path, tokenizer, store, CPU, actor)
    random = torch.Generator().manual_seed(0)
    every = [TrainSequence(torch.randint(3, 13, (n,), generator=random), n - 3) for n in (9, 14)]
    average, slow = build.frozen_copy(), MovingAverage(engine, 0.9)
    actor.trainer.averages["average"] = slow
    for _ in range(2):
        engine.update([every[dist.get_rank()]], CrossEntropyLoss())
        slow.follow()
    biases = {"trained": engine.buffers()}

    # Generation, a copy that scores, and a value model.
    actor.enter_generation()
    old_policy, copied = build.old_policy(), build.frozen_copy()
    assert old_policy is not None
    copied.onload()
    trained = engine.log_probs(every)
    gaps = [gap(x.engine.log_probs(every), trained) for x in (old_policy, copied)]
    assert actor.generator.rollout.model is not None
    biases["generation"] = persistent_buffers(actor.generator.rollout.model)
    biases["copy"] = persistent_buffers(copied.engine.model)
    worker = SimpleNamespace(
        actor=actor, scorers={"average": average}, residency=actor.residency, config=config
    )
    ActorWorker._refresh_averages(worker)
    biases["average"] = persistent_buffers(average.engine.model)
    other = TrainerConfig(layout=TrainLayoutConfig(), router_bias_update_rate=RATE)
    critic = TrainEngine(path, model=config.model, trainer=other, device=CPU, gives_values=True)
    critic.take_weights([*engine.weights(), *engine.buffers().items()])
    biases["value model"] = critic.buffers()

    # A checkpoint, read under another layout, and what transformers opens.
    distributed.save(folder / "resume", engine, {})
    resumed = TrainEngine(path, model=config.model, trainer=other, device=CPU)
    distributed.load(folder / "resume", resumed, distributed.progress_of(engine), {})
    biases["resumed"] = resumed.buffers()
    save_hf(engine, folder / "hf", tokenizer)
    return {"gaps": gaps, **{name: routing_biases(x) for name, x in biases.items()}}


@pytest.mark.long
def test_biases_go_where_weights_go(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """From two stages to generation under tp, copies, a value model, and checkpoints.

    Measured: log-probabilities of order 1 differ by 6e-7, and by 0.5 with the first biases.
    """
    make_model(tmp_path / "model")
    first, second = ranks(2, run, str(tmp_path / "model"), tmp_path)
    saved = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "hf")
    wanted = first["trained"]
    assert len(wanted) == 2
    assert all(bias.abs().max() >= RATE for bias in wanted.values())
    for result in (first, second):
        assert max(result.pop("gaps")) < 1e-5
        for place, biases in result.items():
            assert biases.keys() == wanted.keys(), place
            assert all(torch.equal(wanted[name], bias) for name, bias in biases.items()), place
    for name, bias in routing_biases(persistent_buffers(saved)).items():
        assert torch.equal(wanted[name], bias), name
