"""From a command line to a `Config`: Hydra composes, dataclasses check, errors are one line."""

import difflib
import importlib.resources
import re
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from hybridrl.config import Config, ConfigError

CONFIG_MODULE = "hybridrl.conf"


def register() -> None:
    """Make the typed schema and every recipe's own config known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config, provider="hybridrl")
    for folder in sorted(importlib.resources.files("hybridrl.recipes").iterdir(), key=str):
        config = folder / "config.yaml"
        if config.is_file():
            node = OmegaConf.create(config.read_text())
            store.store(group="recipe", name=folder.name, node=node, provider="hybridrl.recipes")


def check(overrides: Sequence[str], config_dir: str | None, config_name: str = "train") -> None:
    """Compose `overrides` once and raise `ConfigError` for the first thing that is wrong.

    Of a sweep (`key=a,b`) the first choice is composed. Run before Hydra's own entry, whose
    messages take a screen.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ConfigError("override", error.override, "key=value, as Hydra writes it") from None
    flat = [_first_choice(override) for override in parsed]
    if config_dir is not None:
        flat.append(f"hydra.searchpath=[{config_dir}]")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            composed = compose(config_name, overrides=flat)
            # run.dir is resolved by Hydra's entry, which alone knows the choices and the time.
            OmegaConf.update(composed, "run.dir", "unresolved")
            to_config(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides) from None


def to_config(composed: DictConfig) -> Config:
    """The typed configuration; raises `ConfigError` for a value of the wrong type or range."""
    try:
        missing = OmegaConf.missing_keys(composed)
        if missing:
            key = sorted(missing)[0]
            raise ConfigError(key, "???", f"a value ({key}=...)")
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise explain(error, ()) from None
    assert isinstance(config, Config)
    return config


def explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """One line for what Hydra or OmegaConf found wrong: key, value, what is allowed."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and isinstance(cause, Exception):
        chain.append(cause)
    for link in chain:
        if isinstance(link, ConfigError):
            return link
        if isinstance(link, MissingConfigException) and link.missing_cfg_file:
            group, _, option = str(link.missing_cfg_file).rpartition("/")
            options = link.options or []
            return ConfigError(group or "config", option, _names(option, options))
    for link in chain:
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _explain_key(link, overrides)
    text = " ".join(str(error).split())
    return ConfigError("override", " ".join(overrides), text)


def _explain_key(error: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError:
    key = str(error.full_key)
    value = _value_of(key, overrides)
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(key, "???", f"a value ({key}=...)")
    if isinstance(error, ValidationError):
        return ConfigError(key, value, _allowed(str(error.msg or error).splitlines()[0]))
    parent, _, name = key.rpartition(".")
    return ConfigError(key, value, "a known key: " + _names(name, _keys_of(parent, key, overrides)))


def _allowed(message: str) -> str:
    """What OmegaConf's message says is allowed, without the rest."""
    if found := re.search(r"expected one of \[(.*)\]", message):
        return f"one of {found[1]}"
    if found := re.search(r"could not be converted to (\w+)", message):
        kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
        return kinds.get(found[1], found[1])
    return message


def _names(wrong: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(wrong, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return "one of " + ", ".join(sorted(known)) + hint


def _keys_of(path: str, wrong: str, overrides: Sequence[str]) -> list[str]:
    """Keys below `path` in what the other overrides compose to."""
    others = [o for o in overrides if o.lstrip("+~").partition("=")[0] != wrong]
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            node: Any = compose("train", overrides=others)
    except (HydraException, OmegaConfBaseException):
        return []
    for part in filter(None, path.split(".")):
        node = OmegaConf.select(node, part, throw_on_missing=False)
    return [str(key) for key in node] if isinstance(node, DictConfig) else []


def _value_of(key: str, overrides: Sequence[str]) -> str:
    for override in reversed(overrides):
        name, sign, value = override.partition("=")
        if sign and name.lstrip("+~") == key:
            return value
    return ""


def _first_choice(override: Override) -> str:
    line = str(override.input_line)
    if not override.is_sweep_override():
        return line
    key, _, _ = line.partition("=")
    first = next(iter(override.sweep_string_iterator()))
    return f"{key}={first}"
