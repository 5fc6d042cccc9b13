"""What recipes of preferences train on, against their papers' formulas; see `test_formulas.py`."""

from collections.abc import Iterable
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Bench = Response = Any  # classes of conftest.py


def flat(groups: Iterable[Iterable[Response]]) -> list[Response]:
    return [response for group in groups for response in group]


def pairs(bench: Bench) -> list[tuple[Response, ...]]:
    """The chosen and the rejected response to each prompt."""
    sides = [flat(bench.groups(1, branch=side)) for side in ("chosen", "rejected")]
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(bench: Bench, smoothing: float) -> None:
    """Equation 7; with labels that are doubted Mitchell's conservative one."""

    def reward(r: Response) -> Tensor:
        return 0.1 * (r.new_log_probs - r.reference_log_probs).sum()

    both = pairs(bench)
    margins = torch.stack([reward(chosen) - reward(rejected) for chosen, rejected in both])
    loss = -((1 - smoothing) * logsigmoid(margins) + smoothing * logsigmoid(-margins)).mean()
    bench.run("dpo", label_smoothing=smoothing).agrees(flat(both), loss)


def test_dpo_as_ipo(bench: Bench) -> None:
    """arXiv 2310.12036, equation 17, per token: squared, towards 1 / (2 beta)."""

    def mean(r: Response) -> Tensor:
        return (r.new_log_probs - r.reference_log_probs).mean()

    both = pairs(bench)
    margins = torch.stack([mean(chosen) - mean(rejected) for chosen, rejected in both])
    loss = (margins - 1 / (2 * 0.2)).square().mean()
    bench.run("dpo", variant="ipo", beta=0.2).agrees(flat(both), loss)


def mean(r: Response) -> Tensor:
    return r.new_log_probs.mean()


def test_simpo(bench: Bench) -> None:
    """Equation 6."""
    both = pairs(bench)
    margins = torch.stack([1.5 * mean(chosen) - 1.5 * mean(rejected) for chosen, rejected in both])
    loss = -logsigmoid(margins - 0.4).mean()
    bench.run("simpo", beta=1.5, gamma=0.4).agrees(flat(both), loss)


def test_orpo(bench: Bench) -> None:
    """Equations 3, 6 and 7: odds of a response's mean likelihood."""
    both = pairs(bench)

    def log_odds(r: Response) -> Tensor:
        p = mean(r).exp()
        return (p / (1 - p)).log()

    ratios = torch.stack([log_odds(chosen) - log_odds(rejected) for chosen, rejected in both])
    fine_tuning = torch.stack([-mean(chosen) for chosen, _ in both])
    loss = (fine_tuning - 0.3 * logsigmoid(ratios)).mean()
    bench.run("orpo", odds_weight=0.3).agrees(flat(both), loss)


@pytest.mark.parametrize("drift", [0.3, -0.3])
def test_kto(bench: Bench, drift: float) -> None:
    """Equations 7 and 8; the reference point is of responses to other prompts, not below 0."""
    bench.drift = drift
    sides = [flat(bench.groups(1, branch=f"other_{side}")) for side in ("chosen", "rejected")]
    gains = [(r.old_log_probs - r.reference_log_probs).sum().item() for r in flat(sides)]
    z = max(fmean(gains), 0.0)
    assert (z > 0) == (drift < 0)

    def h(r: Response) -> Tensor:
        return (r.new_log_probs - r.reference_log_probs).sum()

    both = pairs(bench)
    wanted = [1.2 * (1 - torch.sigmoid(0.4 * (h(chosen) - z))) for chosen, _ in both]
    others = [0.7 * (1 - torch.sigmoid(0.4 * (z - h(rejected)))) for _, rejected in both]
    batch = bench.run("kto", beta=0.4, desirable_weight=1.2, undesirable_weight=0.7)
    batch.agrees(flat(both), torch.stack([*wanted, *others]).mean())
    assert batch.scalar("kl") == pytest.approx([z] * 8)


def test_kto_without_pairs(bench: Bench) -> None:
    """KTO's equations hold for rows of one response, whose reward says which ones are wanted."""
    bench.reward_of = lambda id: 1.0 if id.prompt % 3 else -1.0
    gains = [
        (r.old_log_probs - r.reference_log_probs).sum().item()
        for r in flat(bench.groups(1, branch="other_answer"))
    ]
    z = max(fmean(gains), 0.0)
    rows = flat(bench.groups(1))
    signs = [1.0 if r.reward > 0 else -1.0 for r in rows]
    assert {*signs} == {1.0, -1.0}
    losses = []
    for r, sign in zip(rows, signs, strict=True):
        h = (r.new_log_probs - r.reference_log_probs).sum()
        weight = 1.2 if sign > 0 else 0.7
        losses.append(weight * (1 - torch.sigmoid(0.4 * sign * (h - z))))
    batch = bench.run("kto", unpaired=True, beta=0.4, desirable_weight=1.2, undesirable_weight=0.7)
    batch.agrees(rows, torch.stack(losses).mean())


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_rm(bench: Bench, center: float) -> None:
    """InstructGPT (arXiv 2203.02155), equation 1; centered: arXiv 2312.09244, equation 2."""
    both = pairs(bench)
    rewards = torch.stack([torch.cat([r.new_reward for r in pair]) for pair in both])
    loss = -logsigmoid(rewards[:, 0] - rewards[:, 1]) + center * rewards.sum(1).square()
    bench.run("rm", center=center).agrees(flat(both), loss.mean(), "reward")
