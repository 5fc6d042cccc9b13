"""Adaptive coefficients and multipliers against verl and autograd."""

import math
from types import ModuleType

import pytest
import torch

from hybridrl.algorithms.control import AdaptiveKL, Multiplier, with_cost
from hybridrl.config import ConfigError


def test_kl_controllers_agree_with_verl(core_algos: ModuleType) -> None:
    theirs = core_algos.AdaptiveKLController(0.2, 0.05, 100)
    ours, control = 0.2, AdaptiveKL(target=0.05, horizon=100)
    for kl, num_samples in [(0.0, 8), (0.05, 8), (0.052, 16), (3.0, 64), (-1.0, 4), (0.048, 1)]:
        theirs.update(kl, num_samples)
        ours = control(ours, kl, num_samples)
        assert ours == pytest.approx(float(theirs.value), rel=1e-14)


def test_multiplier_is_gradient_ascent_on_its_logarithm() -> None:
    """The authors' code: SGD in ln m on -(cost - threshold) m, then the bound."""
    control = Multiplier(lr=0.3, threshold=0.5, maximum=2.0)
    log_m = torch.tensor(math.log(0.7), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([log_m], lr=0.3)
    ours = 0.7
    for cost in [1.0, 0.5, -2.0, 4.0, 4.0, 4.0, -1.0]:
        optimizer.zero_grad()
        (-(cost - 0.5) * log_m.exp()).backward()
        optimizer.step()
        with torch.no_grad():
            log_m.clamp_(max=math.log(2.0))
        ours = control(ours, cost)
        assert ours == pytest.approx(log_m.exp().item(), rel=1e-12)
    assert Multiplier()(1.0, 1.0) == pytest.approx(1.105, abs=2e-4), "the docstring's example"
    assert Multiplier()(1.0, 1e9) == 5.0
    assert math.isfinite(Multiplier(maximum=None)(1.0, 1e9))
    assert Multiplier()(1.0, -1e9) == 0.0


def test_costs_join_rewards() -> None:
    torch.manual_seed(0)
    a, c = torch.randn(2, 9, dtype=torch.float64)
    torch.testing.assert_close(with_cost(a, c, 0.0), a)
    torch.testing.assert_close(with_cost(a, c, 3.0), 0.25 * a - 0.75 * c)
    assert with_cost(2.0, 1.0, 1.0) == 0.5


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan])
def test_a_wrong_setting_is_named(number: float) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.kl_target"):
        AdaptiveKL(target=number)
    with pytest.raises(ConfigError, match=r"recipe\.kl_horizon"):
        AdaptiveKL(target=1.0, horizon=number)
    with pytest.raises(ConfigError, match=r"recipe\.multiplier_max"):
        Multiplier(maximum=number)
    if number != 0:
        with pytest.raises(ConfigError, match=r"recipe\.multiplier_lr"):
            Multiplier(lr=number)
