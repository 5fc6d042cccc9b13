"""Advantages of scalars against verl and the formulas in float64."""

import math
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import torch

from hybridrl.algorithms.advantages import (
    entropy_reshaped,
    greedy_baseline,
    group_relative,
    leave_one_out,
    mean_normalized,
    minimum_variance,
    optimal_baseline,
    standardized_sum,
)


@pytest.mark.parametrize("std_normalize", [True, False])
def test_agrees_with_verl(core_algos: ModuleType, std_normalize: bool) -> None:
    torch.manual_seed(0)
    sizes = [2, 3, 8, 5, 16]
    groups = [torch.randn(size, dtype=torch.float64) for size in sizes]
    groups[2] = groups[2].round()  # ties
    rewards = torch.cat(groups)
    token_rewards = torch.zeros(len(rewards), 4, dtype=torch.float64)
    token_rewards[:, -1] = rewards
    index = np.repeat(np.arange(len(sizes)), sizes)
    expected, _ = core_algos.compute_grpo_outcome_advantage(
        token_rewards,
        torch.ones_like(token_rewards),
        index,
        norm_adv_by_std_in_grpo=std_normalize,
    )
    ours = [a for group in groups for a in group_relative(group, std_normalize=std_normalize)]
    torch.testing.assert_close(
        torch.tensor(ours, dtype=torch.float64), expected[:, 0], rtol=1e-12, atol=1e-12
    )


def test_agrees_with_the_formula() -> None:
    rewards = [0.0, 1.0, 1.0, 0.25]
    array = np.array(rewards)
    std = array.std(ddof=1)
    expected = (array - array.mean()) / (std + 1e-4)
    np.testing.assert_allclose(group_relative(rewards, eps=1e-4), expected, rtol=1e-14)
    np.testing.assert_allclose(
        group_relative(rewards, std_normalize=False), array - array.mean(), rtol=1e-14
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7e8])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_equal_rewards_have_no_advantage(reward: float, size: int) -> None:
    assert group_relative([reward] * size) == [0.0] * size
    assert group_relative([reward] * size, std_normalize=False) == [0.0] * size


def test_no_samples() -> None:
    assert group_relative([]) == []


class Groups:
    """Random rewards and response lengths of ragged groups, and what verl takes of them."""

    def __init__(self, sizes: Sequence[int] = (2, 3, 8, 5, 16), seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.rewards = [generator.normal(size=n) for n in sizes]
        self.rewards[1] = self.rewards[1].round()  # ties
        self.lengths = [generator.integers(1, 9, size=n) for n in sizes]
        self.index = np.repeat(np.arange(len(sizes)), sizes)
        self.flat = np.concatenate(self.rewards)
        self.counts = np.concatenate(self.lengths)
        self.mask = torch.arange(9) < torch.tensor(self.counts)[:, None]
        last = torch.arange(9) == torch.tensor(self.counts)[:, None] - 1
        self.token_rewards = torch.where(last, torch.tensor(self.flat)[:, None], 0.0)

    def first(self, verls: tuple[torch.Tensor, torch.Tensor]) -> np.ndarray:
        """The advantage that all tokens of a sample have."""
        advantages = verls[0]
        same = torch.where(self.mask, advantages, advantages[:, :1])
        torch.testing.assert_close(same, advantages[:, :1].expand_as(same), rtol=0, atol=0)
        return advantages[:, 0].numpy()

    def joined(self, function, *columns):  # type: ignore[no-untyped-def]
        """`function` by group, joined."""
        return np.concatenate([function(*group) for group in zip(*columns, strict=True)])


EXACT = {"rtol": 1e-11, "atol": 1e-12}
MASKED_MEAN = {"rtol": 1e-9, "atol": 1e-10}
"""verl's masked mean adds 1e-8 to the number of tokens, here about 150: off by 7e-11."""


def test_leave_one_out_agrees_with_verl_and_the_formula(core_algos: ModuleType) -> None:
    groups = Groups()
    advantages = groups.joined(leave_one_out, groups.rewards)
    theirs = core_algos.compute_rloo_outcome_advantage(
        groups.token_rewards, groups.mask.double(), groups.index
    )
    np.testing.assert_allclose(advantages, groups.first(theirs), **EXACT)
    for rewards in groups.rewards:
        others = [np.delete(rewards, i).mean() for i in range(len(rewards))]
        np.testing.assert_allclose(leave_one_out(rewards), rewards - others, **EXACT)


def test_optimal_baseline_agrees_with_verl(core_algos: ModuleType) -> None:
    groups = Groups()
    advantages = groups.joined(optimal_baseline, groups.rewards, groups.lengths)
    theirs = core_algos.compute_opo_outcome_advantage(
        groups.token_rewards, groups.mask.double(), groups.index
    )
    np.testing.assert_allclose(advantages, groups.first(theirs), **EXACT)


def test_greedy_baseline_agrees_with_verl(core_algos: ModuleType) -> None:
    groups = Groups()
    greedy = [np.full(len(rewards), 0.1 * i) for i, rewards in enumerate(groups.rewards)]
    advantages = groups.joined(greedy_baseline, groups.rewards, greedy)
    theirs = core_algos.compute_remax_outcome_advantage(
        groups.token_rewards, torch.tensor(np.concatenate(greedy)), groups.mask.double()
    )
    np.testing.assert_allclose(advantages, groups.first(theirs), **EXACT)
    with pytest.raises(ValueError, match="zip"):
        greedy_baseline([1.0, 2.0], [1.0])


def test_minimum_variance_is_where_the_variance_is_least() -> None:
    """The group's off-policy gradient is sum w_i g_i (R_i - b): b minimizes sum |w g (R - b)|^2."""
    generator = np.random.default_rng(4)
    rewards, norms = generator.normal(size=6), generator.gamma(1.0, size=6)
    ratios = np.exp(generator.normal(size=6))
    advantages = np.array(minimum_variance(rewards, norms, ratios))
    weights = ratios**2 * norms
    baseline = (weights * rewards).sum() / weights.sum()
    np.testing.assert_allclose(advantages, rewards - baseline, **EXACT)

    def variance(b: float) -> float:
        return float((weights * (rewards - b) ** 2).sum())

    assert variance(baseline) < min(variance(baseline - 1e-4), variance(baseline + 1e-4))
    np.testing.assert_allclose(
        minimum_variance(rewards, norms, np.full(6, 0.3)), optimal_baseline(rewards, norms), **EXACT
    )


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_minimum_variance_stands_extreme_ratios(scale: float) -> None:
    ratios = [scale, scale * 1e-30, 0.0]
    advantages = minimum_variance([1.0, 0.0, 5.0], [2.0, 7.0, 1.0], ratios)
    np.testing.assert_allclose(advantages, [0.0, -1.0, 4.0], atol=1e-12)


def test_entropy_reshaped_agrees_with_the_formula() -> None:
    generator = np.random.default_rng(5)
    advantages, entropies = generator.normal(size=7), generator.gamma(2.0, size=7)
    mean = entropies.mean()
    expected = (1 + (mean - entropies) / mean) * advantages
    np.testing.assert_allclose(entropy_reshaped(advantages, entropies), expected, **EXACT)
    assert entropy_reshaped([1.0, -2.0], [0.0, 0.0]) == [1.0, -2.0]
    assert entropy_reshaped([], []) == []


ALONE = {
    "leave_one_out": lambda rewards: leave_one_out(rewards),
    "optimal_baseline": lambda rewards: optimal_baseline(rewards, [3] * len(rewards)),
    "minimum_variance": lambda rewards: minimum_variance(
        rewards, [3] * len(rewards), [0.5] * len(rewards)
    ),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("size", [0, 1, 3, 10])
@pytest.mark.parametrize("reward", [0.1, -7.7e8])
def test_without_spread_there_is_no_advantage(name: str, size: int, reward: float) -> None:
    assert ALONE[name]([reward] * size) == [0.0] * size


def test_samples_without_tokens_count_for_nothing() -> None:
    assert optimal_baseline([1.0, 0.0], [0, 0]) == [0.0, 0.0]
    assert optimal_baseline([1.0, 0.0], [0, 4]) == [1.0, 0.0]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_mean_normalized_follows_the_likelihood(p: float, size: int) -> None:
    """The expected gradient by p, over all numbers of right responses. That of log p is 1 / p, the
    sum of (1 - p)^k over k from 0; here it ends at k = size - 2.
    """
    score = {1.0: 1 / p, 0.0: -1 / (1 - p)}  # the derivative of a response's log-probability
    gradient = 0.0
    for right in range(size + 1):
        rewards = [1.0] * right + [0.0] * (size - right)
        chance = math.comb(size, right) * p**right * (1 - p) ** (size - right)
        terms = zip(mean_normalized(rewards, eps=0.0), rewards, strict=True)
        gradient += chance * sum(a * score[reward] for a, reward in terms) / size
    assert gradient == pytest.approx(sum((1 - p) ** k for k in range(size - 1)))


def test_mean_normalized_agrees_with_the_formula() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.25])
    mean = rewards.mean()
    np.testing.assert_allclose(mean_normalized(rewards), (rewards - mean) / (mean + 1e-6), **EXACT)
    assert mean_normalized([-1.0, 0.5]) == [0.0, 0.0]
    assert mean_normalized([]) == []


def test_standardized_sum_agrees_with_verl(core_algos: ModuleType) -> None:
    """Responses have one token, since verl weighs them by their tokens.

    Its rewards are float32, and it adds 1e-8 to the variance.
    """
    first, second = Groups(seed=0), Groups(seed=1)
    size, weights = len(first.flat), [1.0, -0.25]
    theirs, _ = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros(size, 1),
        torch.ones(size, 1),
        first.index,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": weights},
        non_tensor_batch={"a": first.flat, "b": second.flat},
        batch={"prompts": torch.zeros(size, 2), "attention_mask": torch.ones(size, 3).long()},
    )
    columns = [groups.joined(group_relative, groups.rewards) for groups in (first, second)]
    ours = standardized_sum(*columns, weights=weights)
    np.testing.assert_allclose(ours, theirs[:, 0].numpy(), rtol=2e-5, atol=2e-6)


def test_standardized_sum_agrees_with_the_formula() -> None:
    columns = np.random.default_rng(2).normal(size=(3, 20))
    weights = np.array([1.0, 0.5, 0.0])
    total = weights @ columns
    expected = (total - total.mean()) / (total.std(ddof=1) + 1e-6)
    ours = standardized_sum(*columns, weights=weights)
    np.testing.assert_allclose(ours, expected, **EXACT)
    assert standardized_sum([1.0, -1.0], [-1.0, 1.0], weights=[1, 1]) == [0.0, 0.0]
