"""Scores that the balance loss reads, by family; and the sequences of a row's tokens."""

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from hybridrl.config import Attention
from hybridrl.engines.probe import random_model
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedModel, pack
from hybridrl.models import packed_attention
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.expert_parallel import experts_of
from hybridrl.models.parallel import num_experts
from hybridrl.models.router_balance import RouterLoss, WatchedLayer
from hybridrl.models.shrink import shrink
from hybridrl.models.stages import prepare_training, whole

CPU = torch.device("cpu")
SIGMOID = ("deepseek_v3", "glm4_moe")
ROUTERS = [
    Qwen3MoeConfig(),
    MixtralConfig(),
    OlmoeConfig(),
    GptOssConfig(),  # takes `topk` of the logits
    DeepseekV3Config(),
    Glm4MoeConfig(),
]


def logits_of(layer: torch.nn.Module, seen: list[torch.Tensor]) -> None:
    """Record the first output of the layer's router, which are its logits in every family."""

    def record(_: Any, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    for name, module in layer.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(record)


@pytest.mark.parametrize("config", ROUTERS, ids=lambda config: config.model_type)
def test_the_loss_is_that_of_the_routers_scores(config: PretrainedConfig) -> None:
    """Softmax, before the choice or after it; sigmoid, with groups and a bias for the choice."""
    torch.manual_seed(0)
    model = prepare_training(random_model(shrink(config)))
    model.set_attn_implementation(packed_attention.NAME)
    experts, loss = num_experts(model.config), RouterLoss(CPU)
    counted: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(decoder_layers(model)):
        WatchedLayer(number, layer, experts, counted.__setitem__, loss)
    logits: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    for layer in decoder_layers(model):
        logits_of(layer, logits)
        for module in experts_of(layer):
            module.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[1]))
    ids = torch.randint(1, model.config.vocab_size, (17,))
    row = pack([TrainSequence(ids, 5)], Attention.torch, CPU, total_tokens=20, counts_experts=True)
    loss.start(0.5)
    PackedModel(whole(model))(row.ids, row)[0].sum().backward()

    wanted = 0.0
    filler = 3  # the shorter sequence comes first
    for scores, of_layer, counts in zip(logits, chosen, counted.values(), strict=True):
        scores = scores.detach().double()[filler:]
        scores = scores.sigmoid() if config.model_type in SIGMOID else scores.softmax(-1)
        share = (scores / scores.sum(-1, keepdim=True)).mean(0)
        assert counts.tolist() == [of_layer[filler:].flatten().bincount(minlength=experts).tolist()]
        wanted += float((counts[0] * experts / counts.sum() * share).sum())
    assert logits
    assert loss.value.item() == pytest.approx(0.5 * wanted, rel=1e-5)


def test_filled_rows_and_rows_without_sequences_are_told_apart() -> None:
    pair = [TrainSequence(torch.arange(n), 1) for n in (3, 2)]
    row = pack(pair, Attention.torch, CPU, total_tokens=6, counts_experts=True)
    assert row.token_sequences is not None
    assert row.token_sequences.of_token.tolist() == [2, 0, 0, 1, 1, 1]
    assert row.token_sequences.lengths.tolist() == [2, 3]
    chosen = torch.tensor([[0, 1]] * 3 + [[2, 0]] * 3)
    assert row.token_sequences.counts(chosen, 3).tolist() == [[2, 2, 0], [3, 0, 3]]
    empty = pack([], Attention.torch, CPU, counts_experts=True).token_sequences
    assert empty is not None
    assert empty.counts(torch.tensor([[0, 1]]), 3).shape == (0, 3)
