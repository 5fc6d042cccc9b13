"""The optimizer's settings."""

import importlib.util
from unittest.mock import patch

import pytest

from hybridrl.config import Config, ConfigError, OptimConfig, OptimName, TrainerConfig


def test_moments_of_eight_bits_need_their_package() -> None:
    trainer = TrainerConfig(optim=OptimConfig(name=OptimName.adamw8bit))
    with (
        patch.object(importlib.util, "find_spec", return_value=None),
        pytest.raises(ConfigError) as raised,
    ):
        Config(trainer=trainer)
    assert str(raised.value) == (
        "trainer.optim.name=adamw8bit: wanted adamw or muon;"
        " adamw8bit needs torchao: pip install 'hybridrl[adamw8bit]'"
    )
    with patch.object(importlib.util, "find_spec", return_value=object()):
        assert Config(trainer=trainer).trainer.optim.name is OptimName.adamw8bit
