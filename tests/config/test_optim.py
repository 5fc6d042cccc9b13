"""The optimizer's settings."""

import sys
from operator import attrgetter

import pytest

from hybridrl.config import Config, ConfigError, OptimName
from hybridrl.preflight.prepare import build_recipe, check_optimizers


@pytest.mark.parametrize("key", ["trainer", "warm_start", "roles.critic"])
def test_moments_of_eight_bits_need_their_package(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run that uses them; a config is fine without, so a plan counts them anywhere."""
    monkeypatch.setitem(sys.modules, "torchao", None)
    config = Config()
    config.warm_start.steps = 1
    attrgetter(key)(config).optim.name = OptimName.adamw8bit
    config.check_groups()
    graph = build_recipe({"target": "hybridrl.recipes.ppo:ppo"})
    with pytest.raises(ConfigError) as raised:
        check_optimizers(config, graph)
    assert str(raised.value) == (
        f"{key}.optim.name=adamw8bit: wanted adamw or muon;"
        " adamw8bit needs torchao: pip install 'hybridrl[adamw8bit]'"
    )
    attrgetter(key)(config).optim.name = OptimName.adamw
    check_optimizers(config, graph)
