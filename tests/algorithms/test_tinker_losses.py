"""Losses of Tinker's API against its formulas in float64, values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridrl.algorithms.tinker_losses import LOSSES, TARGETS, tinker_loss

Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LENGTHS = (3, 5, 1)


def ppo(low: float, high: float) -> Formula:
    """The clipped surrogate, to be summed."""

    def formula(p: torch.Tensor, q: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        ratio = (p - q).exp()
        return -torch.minimum(ratio * a, ratio.clamp(low, high) * a)

    return formula


def gspo(p: torch.Tensor, q: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """One ratio a datum, of the tokens with an advantage, which are alike within a datum here."""
    trained = a != 0
    s = (p - q)[trained].mean().exp() if trained.any() else torch.ones(())
    return trained * ppo(1 - 3e-4, 1 + 4e-4)(s.log(), torch.zeros(()), a)


FORMULAS: dict[str, tuple[dict[str, float], Formula]] = {
    "cross_entropy": ({}, lambda p, q, a: -a * p),
    "importance_sampling": ({}, lambda p, q, a: -(p - q).exp() * a),
    "ppo": ({}, ppo(0.8, 1.2)),
    "ppo own bounds": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.01},
        ppo(0.5, 1.01),
    ),
    "cispo": ({}, lambda p, q, a: -(p - q).detach().exp().clamp(0.0, 4.0) * a * p),
    "dro": ({"beta": 0.3}, lambda p, q, a: 0.15 * (p - q) ** 2 - a * p),
    "gspo": ({}, gspo),
}


def drawn(spread: float = 0.8) -> tuple[list[torch.Tensor], ...]:
    """Log-probabilities, those of sampling, and advantages of data; the first token has none."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[torch.Tensor]:
        return [torch.randn(n, generator=generator, dtype=torch.float64) for n in LENGTHS]

    log_probs = [-x.abs() for x in draw()]
    old = [x + spread * y for x, y in zip(log_probs, draw(), strict=True)]
    advantages = [torch.full_like(x, 1.5 - i) for i, x in enumerate(log_probs)]
    for one in advantages[:2]:
        one[0] = 0
    return log_probs, old, advantages


def ours(name: str, settings: dict[str, float], num: int, copies: int = 1) -> tuple[Any, ...]:
    """The sum and its gradient, of the data `copies` times."""
    log_probs, old, advantages = (torch.cat(x * copies) for x in drawn())
    sizes = torch.tensor(LENGTHS * copies)
    leaf = log_probs.clone().requires_grad_()
    fields = {"logprobs": old, "advantages": advantages, "weights": advantages}
    fields["sequence"] = torch.arange(len(sizes)).repeat_interleave(sizes)
    if num:
        fields["candidate_log_probs"] = leaf[:, None]
    values, _ = tinker_loss(name, settings, num)(leaf, None, fields)
    assert values.shape == leaf.shape
    values.sum().backward()
    return values.sum().item(), leaf.grad


@pytest.mark.parametrize("num_candidates", [0, 1])
@pytest.mark.parametrize("case", FORMULAS)
def test_values_and_gradients_are_those_of_the_formula(case: str, num_candidates: int) -> None:
    settings, formula = FORMULAS[case]
    leaves = [x.clone().requires_grad_() for x in drawn()[0]]
    total = torch.stack(
        [formula(p, q, a).sum() for p, q, a in zip(leaves, *drawn()[1:], strict=True)]
    ).sum()
    total.backward()
    value, gradient = ours(case.split()[0], settings, num_candidates)
    assert value == pytest.approx(total.item(), rel=1e-12)
    torch.testing.assert_close(
        gradient, torch.cat([x.grad for x in leaves]), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("case", FORMULAS)
def test_four_times_the_data_are_four_times_the_loss(case: str) -> None:
    settings, _ = FORMULAS[case]
    value, gradient = ours(case.split()[0], settings, 0)
    four, of_four = ours(case.split()[0], settings, 0, copies=4)
    assert four == pytest.approx(4 * value, rel=1e-12)
    torch.testing.assert_close(of_four, gradient.repeat(4), rtol=1e-12, atol=1e-14)


def test_several_targets_of_a_position_add_up() -> None:
    loss = tinker_loss("cross_entropy", {}, 2)
    assert loss.candidates == TARGETS
    targets = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    weights = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
    fields = {"candidate_log_probs": targets, "weights": weights.flatten()}
    values, _ = loss(torch.zeros(2), None, fields | {"sequence": torch.zeros(2).long()})
    assert values.tolist() == [2.0, 8.0]
    with pytest.raises(ValueError, match=r"^loss_fn=ppo has one target a position, not 2$"):
        tinker_loss("ppo", {}, 2)


def test_each_documented_loss_is_here() -> None:
    assert {case.split()[0] for case in FORMULAS} == set(LOSSES)
    with pytest.raises(ValueError, match=r"set loss_fn=importance_sampling$"):
        tinker_loss("stable_reinforce", {}, 0)
