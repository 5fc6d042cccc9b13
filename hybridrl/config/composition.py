"""What Hydra composes, with the choices of the groups composed once in a process.

Hydra reads some thirty files for each composition, and the same ones whatever `key.name=value` sets
in them. So a choice of every group is kept, and each composition sets its values in a copy. That
takes a fifth of the time, which counts for sweeps, `hybridrl plan auto` and tests. With a directory
of the user's own (`--config-dir`) all files are read each time.
"""

import functools
import os
import pickle
from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

CONFIG_MODULE = "hybridrl.conf"


def compose_train(overrides: Sequence[str]) -> DictConfig:
    """The root `train` with these overrides, and Hydra's own settings under `hydra`.

    Raises what `hydra.compose` raises. It stands for that function, but for `hydra.overrides` and
    `hydra.job.override_dirname`, which lack what sets a value, unless an override names `hydra`.
    """
    # Interpolations may want all of the overrides, and a user's own files may change.
    if any("hydra" in line for line in overrides):
        return _read(overrides)
    values = [line for line in overrides if _sets_value(line)]
    choices = tuple(line for line in overrides if line not in values)
    node: DictConfig = pickle.loads(_composed(choices))
    node.hydra.runtime.cwd = os.getcwd()
    parsed = OverridesParser.create().parse_overrides(values)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, node)
    return node


def forget() -> None:
    """Compose anew: what a group can choose has changed."""
    _composed.cache_clear()


def _sets_value(override: str) -> bool:
    """Whether it leaves the choices of the groups, whose names have no dot, as they are."""
    key = override.partition("=")[0]
    return "." in key and "@" not in key and "/" not in key


@functools.lru_cache(maxsize=256)
def _composed(choices: tuple[str, ...]) -> bytes:
    """Hydra's composition, pickled: five times as fast to read as OmegaConf copies."""
    return pickle.dumps(_read(choices))


def _read(overrides: Sequence[str]) -> DictConfig:
    """What Hydra composes of the files as they are."""
    GlobalHydra.instance().clear()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        return compose("train", overrides=list(overrides), return_hydra_config=True)
