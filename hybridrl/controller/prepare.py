"""Everything that is checked and made before a run starts a process."""

import importlib
import importlib.util
import json
import re
import sys
import typing
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config import Config, ConfigError
from hybridrl.config.compose import explain
from hybridrl.data import Data, load_data
from hybridrl.flow import Graph, Recipe

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Prepared:
    """What a run needs before its ranks start."""

    model_path: str
    data: Data
    graph: Graph
    warm_start: Graph | None


def prepare(config: Config) -> Prepared:
    """Check the config against the world, make the tiny model; raises `ConfigError`."""
    from transformers.utils import logging as transformers_logging

    from hybridrl.rewards import validate_reward

    transformers_logging.disable_progress_bar()

    run_dir = Path(config.run.dir)
    graph = build_recipe(config.recipe)
    warm_start = None
    if config.warm_start.steps:
        warm_start = build_recipe({"target": "hybridrl.recipes.sft:sft"})
    validate_reward(config.reward, config.data.sources)
    _writable(run_dir)
    model_path = _model_path(config, run_dir)
    data = _load(config, model_path)
    return Prepared(model_path, data, graph, warm_start)


def build_recipe(settings: dict[str, Any]) -> Graph:
    """The graph of the recipe at `recipe.target` under its other settings."""
    settings = dict(settings)
    target = settings.pop("target", None)
    if not target:
        raise ConfigError("recipe.target", target, "module:function, or /path/file.py:function")
    recipe = _load_recipe(str(target))
    config_type = typing.get_type_hints(recipe.function).get("cfg")
    cfg: Any = SimpleNamespace(**settings)
    if is_dataclass(config_type):
        try:
            merged = OmegaConf.merge(OmegaConf.structured(config_type), settings)
            cfg = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            found = explain(error, [f"{key}={value}" for key, value in settings.items()])
            raise ConfigError(f"recipe.{found.key}", found.value, found.allowed) from None
    try:
        return recipe.build(cfg)
    except ValueError as error:
        raise ConfigError("recipe", recipe.name, f"settings that make a dataflow: {error}") from None


def _load_recipe(target: str) -> Recipe:
    path, _, name = target.rpartition(":")
    try:
        module = _import_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
        recipe = getattr(module, name)
    except (ImportError, FileNotFoundError, AttributeError, ValueError) as error:
        raise ConfigError(
            "recipe.target", target, f"module:function, or /path/file.py:function ({error})"
        ) from None
    if not isinstance(recipe, Recipe):
        raise ConfigError("recipe.target", target, "a function marked @recipe(...)")
    return recipe


def _import_file(path: Path) -> ModuleType:
    """Import a recipe that lives outside; its functions travel to the ranks by value."""
    from ray import cloudpickle

    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(f"hybridrl_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def _writable(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".probe"
        probe.write_bytes(b"\0" * 65536)
        probe.unlink()
    except OSError as error:
        raise ConfigError("run.dir", run_dir, f"a writable directory ({error.strerror})") from None


def _model_path(config: Config, run_dir: Path) -> str:
    path = config.model.path
    if path is None:
        from hybridrl.models.tiny import make_tiny_model

        made = run_dir / "start"
        make_tiny_model(made, config.model.tiny, config.run.seed)
        return str(made)
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ConfigError("model.path", path, "a Hugging Face directory (no config.json in it)")
        if not list(Path(path).glob("*.safetensors")):
            raise ConfigError("model.path", path, "weights in safetensors (none in it)")
        return str(Path(path).resolve())
    if not _HUB_NAME.fullmatch(path) or path.startswith("."):
        raise ConfigError("model.path", path, "a directory that exists, or a hub name")
    return path


def _load(config: Config, model_path: str) -> Data:
    from transformers import AutoConfig, AutoTokenizer

    try:
        context = AutoConfig.from_pretrained(model_path).max_position_embeddings
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, json.JSONDecodeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            "model.path", config.model.path, f"a directory that exists, or a hub name ({reason})"
        ) from None
    return load_data(
        config.data, tokenizer, max_context=context, max_new_tokens=config.rollout.max_new_tokens
    )
