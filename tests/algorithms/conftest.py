"""verl's functions as an oracle."""

from types import ModuleType

import pytest

from hybridrl.compat.verl import function


@pytest.fixture(scope="session")
def core_algos() -> ModuleType:
    """verl.trainer.ppo.core_algos, imported without its search for an accelerator."""
    function("agg_loss")
    from verl.trainer.ppo import core_algos

    return core_algos
