"""Recipes outside of the package: a folder with `__init__.py` and `config.yaml`."""

import importlib.resources
import keyword
import re
import shutil
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf

from hybridrl.config.dotted import load_function
from hybridrl.config.errors import ConfigError, names

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def recipe_by_path(override: str) -> tuple[str, DictConfig] | None:
    """The name and the config of the folder that `recipe=PATH` means; None for anything else.

    A value is a path if it has a slash and is no mapping. A target `:function` is a function of the
    folder's own `__init__.py`. Raises ConfigError where the folder is no recipe.
    """
    key, sign, value = override.partition("=")
    if key != "recipe" or not sign or "/" not in value or value.startswith("{"):
        return None
    folder = Path(value).expanduser().resolve()
    config = folder / "config.yaml"
    if not config.is_file():
        raise ConfigError("recipe", value, "a folder with config.yaml and __init__.py")
    node = OmegaConf.load(config)
    if not isinstance(node, DictConfig) or not isinstance(node.get("target"), str):
        raise ConfigError("recipe", value, "a config.yaml with target: MODULE:FUNCTION")
    if node.target.startswith(":"):
        node.target = f"{folder / '__init__.py'}{node.target}"
    return folder.name, node


def with_defaults(node: DictConfig) -> DictConfig:
    """The yaml `node` of a recipe on top of the settings of its dataclass, where it has one.

    These are plain values: their types and bounds are checked when the recipe is built. Raises
    ConfigError where the recipe cannot be imported.
    """
    recipe: Any = load_function("recipe.target", node.target)
    config_type = get_type_hints(getattr(recipe, "function", recipe)).get("cfg")
    if not (isinstance(config_type, type) and is_dataclass(config_type)):
        return node
    settings = OmegaConf.to_container(OmegaConf.structured(config_type), enum_to_str=True)
    filled = OmegaConf.merge({"target": node.target}, settings, node)
    assert isinstance(filled, DictConfig)
    return filled


def new_recipe(name: str, source: str, parent: Path) -> Path:
    """Copy the recipe `source` of the package to the folder `parent / name`, under its new name.

    Raises ConfigError for a name that cannot be a function's, a source that there is not, or a
    folder that exists.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        allowed = "lower-case letters, digits and _, a letter first; no keyword of Python"
        raise ConfigError("NAME", name, allowed)
    recipes = importlib.resources.files("hybridrl.recipes")
    known = [folder.name for folder in recipes.iterdir() if (folder / "config.yaml").is_file()]
    if source not in known:
        raise ConfigError("--from", source, names(source, known))
    target = parent / name
    if target.exists():
        raise ConfigError("NAME", name, f"a folder that is not there yet ({target} is)")
    target.mkdir(parents=True)
    for file in (recipes / source).iterdir():
        if file.is_file() and Path(file.name).suffix in (".py", ".yaml", ".md"):
            (target / file.name).write_text(file.read_text())
    try:
        _rename(target, source, name)
    except BaseException:
        shutil.rmtree(target)
        raise
    return target


def _rename(folder: Path, old: str, new: str) -> None:
    """The recipe's function, its mark and its target."""
    code = folder / "__init__.py"
    text = code.read_text().replace(
        f'@recipe("{old}")\ndef {old}(', f'@recipe("{new}")\ndef {new}('
    )
    assert f"def {new}(" in text, f"{old} is not the name of its function"
    code.write_text(text)
    config = folder / "config.yaml"
    target = re.compile(r"^target: .*$", re.MULTILINE)
    config.write_text(target.sub(f"target: :{new}", config.read_text(), count=1))
