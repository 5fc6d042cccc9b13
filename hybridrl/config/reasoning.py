"""reasoning_gym, which makes questions and judges answers, without what few tasks need."""

import importlib
import sys
from types import ModuleType
from typing import Any


def import_reasoning_gym() -> ModuleType:
    """The package, whose cellular automata import what they alone need when one is made.

    That is cellpylib with matplotlib, 0.3 of 0.9 s of CPU.
    """
    if "reasoning_gym" not in sys.modules:
        sys.modules.setdefault("cellpylib", _ImportedAtFirstUse("cellpylib"))
    import reasoning_gym

    package: ModuleType = reasoning_gym
    return package


class _ImportedAtFirstUse(ModuleType):
    """Stands for a module until one of its names is wanted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # who lists modules asks for their files
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
