"""verl's functions as an oracle."""

import os
from types import ModuleType

import pytest

from hybridrl.compat.verl import environment
from hybridrl.config import Device


@pytest.fixture(scope="session")
def core_algos() -> ModuleType:
    """verl.trainer.ppo.core_algos, imported without its search for an accelerator."""
    os.environ.update({k: v for k, v in environment(Device.cpu).items() if k not in os.environ})
    from verl.trainer.ppo import core_algos

    return core_algos
