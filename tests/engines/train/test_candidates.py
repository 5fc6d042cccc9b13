"""A loss on more tokens than the response's own, under every axis, against transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybridrl.algorithms.distill import TopKDistillLoss
from hybridrl.config import ModelConfig, OptimConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence

K, VOCAB, TEMPERATURE = 5, 41, 0.7


@pytest.fixture
def taught(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """The sequences with a teacher's likeliest tokens; one more has no token to train on."""
    random = torch.Generator().manual_seed(5)
    for sequence in sequences:
        logits = 2 * torch.randn(sequence.response_tokens, VOCAB, generator=random)
        top = logits.log_softmax(-1).topk(K)
        sequence.fields = {"teacher_top_ids": top.indices, "teacher_top_log_probs": top.values}
    return sequences


def oracle(path: str, sequences: list[TrainSequence]) -> tuple[float, float]:
    """Loss and norm of its gradient, each sequence alone, in float64."""
    model = AutoModelForCausalLM.from_pretrained(path).double()
    losses = []
    for sequence in sequences:
        num = sequence.response_tokens
        logits = model(sequence.ids[None]).logits[0, -num - 1 : -1] / TEMPERATURE
        ids: Any = sequence.fields["teacher_top_ids"]
        top: Any = sequence.fields["teacher_top_log_probs"]
        p, q = logits.softmax(-1).gather(1, ids), top.double().exp()
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
        values = (p * (p / q).log()).sum(-1)
        losses.append(values if sequence.mask is None else values[sequence.mask])
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
    return loss.item(), torch.cat(gradients).norm().item()


def update(
    path: str, sequences: list[TrainSequence], layout: dict[str, int], chunk: int, max_tokens: int
) -> dict[str, float]:
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=max_tokens,
            chunk_tokens=chunk,
            optim=OptimConfig(lr=1e-2, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(**layout),
        ),
        device=torch.device("cpu"),
        temperature=TEMPERATURE,
    )
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    return engine.update(mine, TopKDistillLoss(top_k=K))


CASES = {
    "one rank": ({}, 0, 20),
    "chunks": ({}, 4, 4),
    "tp": ({"tp": 2}, 0, 20),
    "fsdp": ({"fsdp": 2}, 0, 9),
    "pp": ({"pp": 2}, 0, 20),
    "cp": ({"cp": 2}, 0, 8),
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.layouts] * (x != "one rank")) for x in CASES]
)
def test_loss_and_gradient(
    tiny: Callable[..., str],
    taught: list[TrainSequence],
    ranks: Callable[..., list[Any]],
    case: str,
) -> None:
    """Measured in float32: 2e-7 of the loss, 1e-6 of the norm."""
    layout, chunk, max_tokens = CASES[case]
    path = tiny("qwen3", num_hidden_layers=4)
    loss, norm = oracle(path, taught)
    size = 1 if case in ("one rank", "chunks") else 2
    for metrics in ranks(size, update, path, taught, layout, chunk, max_tokens):
        for name in ("loss", "divergence"):
            assert metrics[name] == pytest.approx(loss, rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
