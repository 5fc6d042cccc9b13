"""Rewards, advantages, losses, KL: pure functions, and the tables of their names.

A table maps a name of the config to a dotted string, so that reading it imports nothing. A value
`package.module:name` or `/path/file.py:name` is the user's own. Start from `advantages.py`,
`losses.py` (`ClippedLoss`) and `critic.py` (`gae`, `ValueLoss`).
"""

import functools
import pkgutil
from collections.abc import Mapping
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.dotted import load_function
from hybridrl.config.loss import Loss

KL_ESTIMATORS: Mapping[str, str] = {
    "k1": "hybridrl.algorithms.kl:k1",
    "k2": "hybridrl.algorithms.kl:k2",
    "k3": "hybridrl.algorithms.kl:k3",
}
NORMALIZATIONS: Mapping[str, str] = {
    "token": "hybridrl.algorithms.normalize:token",
    "sequence": "hybridrl.algorithms.normalize:sequence",
    "constant": "hybridrl.algorithms.normalize:constant",
}


def resolve(table: Mapping[str, str], key: str, name: str) -> Any:
    """The object called `name`: an entry of `table`, or `package.module:name`.

    Raises ConfigError naming the config key `key` and the known names.
    """
    if name in table:
        return pkgutil.resolve_name(table[name])
    if ":" in name:
        return _load(key, name)
    raise ConfigError(key, name, [*table, "package.module:name"])


# A loss resolves its names at every call; a file is to run once.
_load = functools.cache(load_function)


__all__ = [
    "KL_ESTIMATORS",
    "NORMALIZATIONS",
    "Loss",
    "resolve",
]
