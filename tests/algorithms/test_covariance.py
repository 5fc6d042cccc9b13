"""Clip-Cov and KL-Cov: losses against verl, and the choice of tokens over a whole batch."""

import math
from collections import Counter
from functools import partial
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

from hybridrl.algorithms.covariance import (
    ClipCovLoss,
    KLCovLoss,
    covariances,
    hold,
    keep,
    largest,
    log_prob_sum,
    num_between,
    share_out,
    threshold,
    token_means,
)
from hybridrl.config import ConfigError

LENGTHS = (3, 7, 1, 12, 5, 30, 22)
CLOSE: dict[str, Any] = {"rtol": 2e-7, "atol": 1e-9}


class Batch:
    """Responses of one advantage each, whose log-probabilities are apart by `spread`; float64."""

    def __init__(self, spread: float) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        self.log_probs = -draw(self.mask.shape).abs()
        self.old = self.log_probs + spread * draw(self.mask.shape)
        self.advantages = draw(len(LENGTHS), 1).expand(self.mask.shape).contiguous()
        self.responses = [x[:n] for x, n in zip(self.log_probs, LENGTHS, strict=True)]

    def covariances(self) -> list[torch.Tensor]:
        """The covariances of each response, by the recipe's own stages."""
        sums = [log_prob_sum(x)[1] for x in self.responses]
        advantages = self.advantages[:, 0].tolist()
        means, mean_advantages, tokens = token_means(LENGTHS, sums, advantages)
        assert tokens == [80] * len(LENGTHS)
        columns = zip(self.responses, advantages, means, mean_advantages, strict=True)
        return [covariances(*column) for column in columns]

    def ours(self, loss: Any, chosen: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Mean loss of the tokens, gradient and metrics."""
        leaf = self.log_probs.clone().requires_grad_()
        fields = {"advantages": self.advantages[self.mask], "old_log_probs": self.old[self.mask]}
        fields[loss.fields[-1]] = torch.cat(chosen)
        values, metrics = loss(leaf[self.mask], None, fields)
        (grad,) = torch.autograd.grad(values.mean(), leaf)
        return values.mean().detach(), grad, metrics

    def verl(self, function: Any, **settings: float) -> tuple[torch.Tensor, torch.Tensor, Any]:
        from verl.workers.config import ActorConfig, PolicyLossConfig

        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(**settings),
        )  # fmt: skip
        leaf = self.log_probs.clone().requires_grad_()
        total, metrics = function(
            self.old, leaf, self.advantages, self.mask.double(), "token-mean", config
        )
        (grad,) = torch.autograd.grad(total, leaf)
        return total.detach(), grad, metrics


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_clip_cov_agrees_with_verl(core_algos: ModuleType, spread: float) -> None:
    """With a ratio of 1 all candidates are left out, by chance or not.

    verl keeps candidates that PPO clips: they have a loss, but no gradient.
    """
    batch, bounds = Batch(spread), {"low": 0.5, "high": 3.0}
    covariance = batch.covariances()
    candidates = [num_between(x, **bounds) for x in covariance]
    counts, seeds = share_out(LENGTHS, candidates, ratio=1.0, random=Random(0))
    assert counts == candidates
    assert 0 < sum(counts) < 40
    columns = zip(covariance, counts, seeds, strict=True)
    total, grad, metrics = batch.ours(ClipCovLoss(), [keep(*x, **bounds) for x in columns])
    expected, expected_grad, theirs = batch.verl(
        core_algos.compute_policy_loss_clip_cov,
        clip_cov_ratio=1.0, clip_cov_lb=0.5, clip_cov_ub=3.0,
    )  # fmt: skip
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    assert metrics["clip_fraction_cov"].mean().item() == pytest.approx(sum(counts) / 80)
    if not spread:
        torch.testing.assert_close(total, expected, **CLOSE)
        assert theirs["actor/pg_clipfrac"] == pytest.approx(sum(counts) / 80)


@pytest.mark.parametrize("ratio", [1e-4, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_kl_cov_agrees_with_verl(core_algos: ModuleType, ratio: float, spread: float) -> None:
    batch = Batch(spread)
    covariance = batch.covariances()
    texts = [largest(x, 80, ratio=ratio) for x in covariance]
    least = threshold(texts, [80] * len(LENGTHS), ratio=ratio)
    held = [hold(*column) for column in zip(covariance, least, strict=True)]
    assert sum(x.sum().item() for x in held) == max(1, int(80 * ratio))
    total, grad, metrics = batch.ours(KLCovLoss(cov_kl_coef=0.7), held)
    settings = {"kl_cov_ratio": ratio, "ppo_kl_coef": 0.7}
    expected, expected_grad, _ = batch.verl(core_algos.compute_policy_loss_kl_cov, **settings)
    torch.testing.assert_close(total, expected, **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    assert metrics["held_fraction"].sum() == max(1, int(80 * ratio))


def test_covariances_are_those_of_the_batch() -> None:
    """Their mean is numpy's covariance, of tokens that are taken together."""
    batch = Batch(0.0)
    together = torch.stack([batch.log_probs[batch.mask], batch.advantages[batch.mask]])
    expected = torch.cov(together, correction=0)[0, 1]
    torch.testing.assert_close(torch.cat(batch.covariances()).mean(), expected)


def test_equal_covariances_are_held_together() -> None:
    covariance = [torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.5])]
    texts = [largest(x, 4, ratio=0.5) for x in covariance]
    least = threshold(texts, [4, 4], ratio=0.5)
    assert least == [1.0, 1.0]
    held = [hold(x, y).tolist() for x, y in zip(covariance, least, strict=True)]
    assert held == [[1, 1], [1, 0]]
    assert threshold([], [], ratio=0.5) == []
    assert threshold(["", ""], [0, 0], ratio=0.5) == [math.inf, math.inf]


def test_every_candidate_is_as_likely_to_be_left_out() -> None:
    """3 of 9 candidates in 900 draws: each 300 times, of standard deviation 14."""
    covariance = [torch.arange(6.0), torch.arange(2.0, 8.0), torch.zeros(4)]
    bounds = {"low": 0.5, "high": 5.5}
    candidates = [num_between(x, **bounds) for x in covariance]
    assert candidates == [5, 4, 0]
    times: Counter[tuple[int, int]] = Counter()
    random = Random(1)
    for _ in range(900):
        counts, seeds = share_out([6, 6, 4], candidates, ratio=0.2, random=random)
        assert sum(counts) == 3
        for i, column in enumerate(zip(covariance, counts, seeds, strict=True)):
            kept = keep(*column, **bounds)
            assert kept.sum() == len(kept) - counts[i]
            times.update((i, j) for j in range(len(kept)) if not kept[j])
    assert set(times) == {(0, j) for j in range(1, 6)} | {(1, j) for j in range(4)}
    assert all(abs(number - 300) < 70 for number in times.values())


def test_a_draw_is_repeated_by_its_seed() -> None:
    x = torch.arange(50.0)
    first, again, other = (keep(x, 9, seed, low=0, high=40) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_candidates_or_tokens_all_stays() -> None:
    assert share_out([4], [0], ratio=0.5, random=Random(0))[0] == [0]
    assert share_out([], [], ratio=0.5, random=Random(0)) == ([], [])
    assert token_means([0], [0.0], [1.0]) == ([0.0], [0.0], [0])
    assert keep(torch.zeros(3), 0, 7, low=1, high=5).tolist() == [1, 1, 1]


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.cov_kl_coef=-1.0: wanted 0 or more"):
        KLCovLoss(cov_kl_coef=-1.0)
    with pytest.raises(ConfigError, match=r"recipe\.clip_low=2.0: wanted 0 to 1"):
        ClipCovLoss(clip_low=2.0)
