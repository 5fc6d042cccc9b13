"""Group-relative advantages against verl and the formula."""

from types import ModuleType

import numpy as np
import pytest
import torch

from hybridrl.algorithms import ADVANTAGES, resolve
from hybridrl.algorithms.advantages import group_relative
from hybridrl.config import ConfigError


@pytest.mark.parametrize("std_normalise", [True, False])
def test_agrees_with_verl(core_algos: ModuleType, std_normalise: bool) -> None:
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
        norm_adv_by_std_in_grpo=std_normalise,
    )
    ours = [a for group in groups for a in group_relative(group, std_normalise=std_normalise)]
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
        group_relative(rewards, std_normalise=False), array - array.mean(), rtol=1e-14
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.7e8])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_equal_rewards_have_no_advantage(reward: float, size: int) -> None:
    assert group_relative([reward] * size) == [0.0] * size
    assert group_relative([reward] * size, std_normalise=False) == [0.0] * size


def test_no_samples() -> None:
    assert group_relative([]) == []


def test_names_resolve(core_algos: ModuleType) -> None:
    assert resolve(ADVANTAGES, "recipe.advantage", "group_relative") is group_relative
    theirs = resolve(ADVANTAGES, "recipe.advantage", "verl:compute_grpo_outcome_advantage")
    assert theirs.func is core_algos.compute_grpo_outcome_advantage
    own = resolve(ADVANTAGES, "recipe.advantage", "statistics:fmean")
    assert own([1.0, 3.0]) == 2.0
    with pytest.raises(ConfigError, match=r"recipe\.advantage=grpo: wanted one of group_relative"):
        resolve(ADVANTAGES, "recipe.advantage", "grpo")
