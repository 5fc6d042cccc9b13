"""The settings of an earlier run, as the start of another command's."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from hybridrl.config import Config, ScheduleKind, compose
from hybridrl.config.cluster import ClusterKind
from hybridrl.config.errors import ConfigError
from hybridrl.config.recipe_source import add_recipe
from hybridrl.config.renamed_keys import (
    NEEDLESS_KEYS,
    REMOVED_KEYS,
    RENAMED_GROUPS,
    RENAMED_KEYS,
)

_NAME = "stored_run"
GROUPS = {
    "cluster", "cost", "data", "environment", "model", "recipe", "reward", "rollout", "schedule",
}  # fmt: skip
"""Groups of settings of which another is chosen by name."""


def overrides_of(run_dir: Path, following: Sequence[str] = (), repeats: bool = True) -> list[str]:
    """Overrides that compose the settings of the run in `run_dir`; any that follow them prevail.

    So does a group that one of those in `following` chooses: `recipe=ppo` brings other settings,
    and the run's own are left out. Raises ConfigError where there are none, and for an experiment,
    whose settings those of the run would undo. What `repeats` the run needs its training as it
    was: also raises for a key that is gone, unless it had the value that every run has now.
    """
    keys = dict(override.lstrip("+~").partition("=")[::2] for override in following)
    if "experiment" in keys:
        raise ConfigError("experiment", "", "settings one by one: those of the run prevail")
    replaced = [key for key, value in keys.items() if key in GROUPS and not value.startswith("{")]
    file = run_dir / ".hydra" / "config.yaml"
    if not file.is_file():
        raise ConfigError("run", run_dir, "a run directory (one that holds .hydra/config.yaml)")
    settings = OmegaConf.load(file)
    assert isinstance(settings, DictConfig)
    if repeats:
        _check_removed(settings)
    _rename(settings)
    for key in ("requeue", "restarts"):  # what repeats a run, or evaluates it, starts once
        settings.cluster.pop(key, None)
    recipe = settings.pop("recipe")
    # A file has an Enum's names, of which `asynchronous` is not the value.
    enums: dict[str, type[Enum]] = {"schedule": ScheduleKind, "cluster": ClusterKind}
    kinds = {group: enum[settings[group].kind].value for group, enum in enums.items()}
    for group in replaced:
        settings.pop(group, None)
    add_recipe(_NAME, recipe)
    ConfigStore.instance().store(group=_NAME, name="settings", package="_global_", node=settings)
    choices = {"recipe": _NAME, **kinds}
    chosen = [f"{group}={name}" for group, name in choices.items() if group not in replaced]
    defaults = _defaults().copy()
    for group in {"recipe", *replaced}:
        defaults.pop(group)
    return [*chosen, f"+{_NAME}=settings", *_without(defaults, settings)]


@cache
def _defaults() -> DictConfig:
    """The settings of a run that chooses nothing."""
    node = compose.composed(["recipe=grpo"])
    OmegaConf.set_struct(node, False)
    return node


def _without(defaults: DictConfig, settings: DictConfig, path: str = "") -> list[str]:
    """Overrides that leave out what mappings have by default, and the run's own do not have.

    Hydra merges mappings: a source of the default data would be a second one.
    """
    overrides = []
    for key in defaults:
        default, own = defaults._get_node(key), settings._get_node(key)
        if own is None:
            if OmegaConf.get_type(defaults) is dict and path:
                overrides.append(f"~{path}{key!s}")
        elif isinstance(default, DictConfig) and isinstance(own, DictConfig):
            overrides += _without(default, own, f"{path}{key!s}.")
    return overrides


def composed_run(
    overrides: Sequence[str],
    writes: bool = True,
    check: Callable[[Config], None] = lambda config: None,
) -> Config:
    """The config of `overrides`, which are written where the command line has them in `run.dir`.

    Nothing is written for a config that `check` refuses.
    """
    node = compose.composed(compose.resolve_arguments(overrides))
    node.run.dir = str(Path(node.run.dir).absolute())
    config = compose.to_config(node)
    check(config)
    if not writes:
        return config
    settings = Path(config.run.dir) / ".hydra" / "config.yaml"
    settings.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(node, settings)
    return config


def _check_removed(settings: DictConfig) -> None:
    """Raise ConfigError where a key that is gone had another value than every run has now."""
    for key, now in REMOVED_KEYS.items():
        if (value := OmegaConf.select(settings, key, default=now)) != now:
            raise ConfigError(key, value, f"{now}, as every run has it now")


def _rename(settings: DictConfig) -> None:
    """Give keys that have another name now this one, and leave out those that are gone."""
    cluster = settings.cluster  # which once had the keys of every kind, without effect
    known = {field.name for field in fields(compose.KINDS["cluster"][cluster.kind])}
    with open_dict(cluster):
        for name in [name for name in cluster if name not in known]:
            del cluster[name]
    for key in (*REMOVED_KEYS, *NEEDLESS_KEYS):
        parent, _, name = key.rpartition(".")
        group = OmegaConf.select(settings, parent)
        if isinstance(group, DictConfig) and name in group:
            with open_dict(group):
                del group[name]
    own_recipe = not str(settings.recipe.target).startswith("hybridrl.recipes.")
    for old, new in {**RENAMED_GROUPS, **RENAMED_KEYS}.items():
        parent, _, name = old.rpartition(".")
        if parent == "recipe" and own_recipe:
            continue
        group = OmegaConf.select(settings, parent) if parent else settings
        if not isinstance(group, DictConfig) or name not in group:
            continue
        value = group[name]
        if new.startswith(f"{old}.") and isinstance(value, DictConfig):
            continue  # a group of now, which has the name of a key of old
        with open_dict(group):
            del group[name]
        OmegaConf.update(settings, new, value, force_add=True)
