"""Rewards, advantages, losses, KL: pure functions, and the tables of their names.

A table maps a name of the config to a dotted string, so that reading it imports nothing. A value
`package.module:name` brings one's own; `verl:name` takes verl's function of that name, which keeps
verl's arguments (padded tensors and a mask).
"""

import functools
import pkgutil
from collections.abc import Mapping
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.dotted import load_function

ADVANTAGES: Mapping[str, str] = {
    "group_relative": "hybridrl.algorithms.advantages:group_relative",
    "leave_one_out": "hybridrl.algorithms.advantages:leave_one_out",
    "greedy_baseline": "hybridrl.algorithms.advantages:greedy_baseline",
    "optimal_baseline": "hybridrl.algorithms.advantages:optimal_baseline",
    "minimum_variance": "hybridrl.algorithms.advantages:minimum_variance",
    "batch_normalised": "hybridrl.algorithms.advantages:batch_normalised",
    "group_baseline_batch_normalised": (
        "hybridrl.algorithms.advantages:group_baseline_batch_normalised"
    ),
    "entropy_reshaped": "hybridrl.algorithms.advantages:entropy_reshaped",
    "novelty_sharpened": "hybridrl.algorithms.advantages:novelty_sharpened",
}
REWARDS: Mapping[str, str] = {
    "majority_vote": "hybridrl.algorithms.rewards:majority_vote",
    "overlong_shaped": "hybridrl.algorithms.rewards:overlong_shaped",
}
BUDGETS: Mapping[str, str] = {
    "equal_treatment": "hybridrl.algorithms.budgets:equal_treatment",
    "hardness_weighted": "hybridrl.algorithms.budgets:hardness_weighted",
    "by_uncertainty": "hybridrl.algorithms.budgets:by_uncertainty",
}
LOSSES: Mapping[str, str] = {
    "clipped": "hybridrl.algorithms.losses:ClippedLoss",
    "cispo": "hybridrl.algorithms.losses:CISPOLoss",
    "reinforce": "hybridrl.algorithms.losses:ReinforceLoss",
    "gspo": "hybridrl.algorithms.sequence_losses:GSPOLoss",
    "cross_entropy": "hybridrl.algorithms.losses:CrossEntropyLoss",
    "distill": "hybridrl.algorithms.distill:DistillLoss",
    "dpo": "hybridrl.algorithms.sequence_losses:DPOLoss",
    "bradley_terry": "hybridrl.algorithms.sequence_losses:BradleyTerryLoss",
    "value": "hybridrl.algorithms.critic:ValueLoss",
}
KL_ESTIMATORS: Mapping[str, str] = {
    "k1": "hybridrl.algorithms.kl:k1",
    "k2": "hybridrl.algorithms.kl:k2",
    "k3": "hybridrl.algorithms.kl:k3",
}
NORMALISATIONS: Mapping[str, str] = {
    "token": "hybridrl.algorithms.normalise:token",
    "sequence": "hybridrl.algorithms.normalise:sequence",
    "constant": "hybridrl.algorithms.normalise:constant",
}


def resolve(table: Mapping[str, str], key: str, name: str) -> Any:
    """What `name` stands for: an entry of `table`, `verl:name` or `package.module:name`.

    Raises ConfigError naming the config key `key` and the known names.
    """
    if name in table:
        return pkgutil.resolve_name(table[name])
    if name.startswith("verl:"):
        # By string: only the controller's side may import verl.
        return pkgutil.resolve_name("hybridrl.compat.verl:function")(name.removeprefix("verl:"))
    if ":" in name:
        return _load(key, name)
    raise ConfigError(key, name, [*table, "verl:<name>", "package.module:name"])


# A loss resolves its names at every call; a file is to run once.
_load = functools.cache(load_function)


__all__ = [
    "ADVANTAGES",
    "BUDGETS",
    "KL_ESTIMATORS",
    "LOSSES",
    "NORMALISATIONS",
    "REWARDS",
    "resolve",
]
