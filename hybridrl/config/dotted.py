"""Functions named in the config by a dotted path."""

import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridrl.config.errors import ConfigError


def load_function(key: str, path: str) -> Callable[..., Any]:
    """The function that `package.module:name` or `/path/file.py:name` names.

    It runs the module's own code. Raises ConfigError naming `key` where the path has another form,
    the module does not import, or it has no such function.
    """
    function: Callable[..., Any] = load_object(key, path, "a function")
    if not callable(function):
        raise ConfigError(key, path, f"a function, not {type(function).__name__}")
    return function


def load_object(key: str, path: str, wanted: str) -> Any:
    """As `load_function`, for an object of any kind, which is `wanted`, in words."""
    module, _, name = path.rpartition(":")
    if not module or not name:
        raise ConfigError(key, path, "package.module:name or /path/file.py:name")
    try:
        if module.endswith(".py"):
            return _from_file(Path(module), name)
        return pkgutil.resolve_name(f"{module}:{name}")
    except (Exception, SystemExit) as error:  # the user's module may raise anything on import
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(key, path, f"{wanted} that can be imported ({problem})") from error


def _from_file(file: Path, name: str) -> Any:
    # The prefix keeps a file that is called like an installed module from hiding it.
    stem = file.parent.name if file.stem == "__init__" else file.stem
    module_name = f"hybridrl_user_{stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None  # a name that ends in .py has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return getattr(module, name)
