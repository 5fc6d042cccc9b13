"""Layers that are computed again: gradients without it, and hooks that run for their own call."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.models.blocks import decoder_layers
from hybridrl.models.recomputation import checkpoint_layers


class Scaled(nn.Module):
    """A layer whose hook takes a keyword, as those of routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.scale, self.taken, self.computed = 1.0, [], 0  # type: ignore[var-annotated]
        self.register_forward_pre_hook(self._take, with_kwargs=True)

    def _take(self, _: nn.Module, args: Any, kwargs: dict[str, float]) -> Any:
        self.scale = kwargs["scale"]
        self.taken.append(self.scale)
        return args, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.computed += 1
        return torch.tanh(self.scale * self.linear(x))


def gradient(layer: Scaled) -> torch.Tensor:
    """Two calls have their backward passes after both, the first one first."""
    layer.linear.zero_grad()
    x = torch.arange(8, dtype=torch.float64).view(2, 4).requires_grad_()
    first, second = layer(x, scale=0.1), layer(x, scale=0.3)
    first.sum().backward()
    second.square().sum().backward()
    assert layer.linear.weight.grad is not None
    return layer.linear.weight.grad


def test_each_call_is_computed_again_with_its_own_hooks() -> None:
    torch.manual_seed(0)
    layer = Scaled()
    wanted = gradient(layer).clone()
    assert (layer.taken, layer.computed) == ([0.1, 0.3], 2)
    checkpoint_layers([layer])
    assert isinstance(layer, Scaled)
    assert torch.equal(gradient(layer), wanted)
    assert layer.taken[2:] == [0.1, 0.3, 0.1, 0.3]
    assert layer.computed == 6
    with torch.no_grad():  # nothing to keep
        layer(torch.ones(2, 4, dtype=torch.float64), scale=1.0)
    layer.eval()(torch.ones(2, 4, dtype=torch.float64), scale=1.0)
    assert layer.computed == 8


def test_a_model_has_the_gradients_that_it_had() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    ids, calls = torch.arange(12).view(2, 6), [0]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model.train()(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = gradients()
    layers = decoder_layers(model)
    layers[0].mlp.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    checkpoint_layers(layers)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), wanted, strict=True))
    assert calls == [2]
