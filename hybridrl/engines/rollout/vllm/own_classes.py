"""Classes of transformers' models that vLLM alone uses.

For a family without a model of its own vLLM runs transformers' model, and rewrites the class of its
decoder (`support_torch_compile`). The rank trains with that class. So vLLM gets another: the module
of the model is loaded once more, under another name.
"""

import importlib.util
import inspect
import sys
from functools import cache
from types import ModuleType
from typing import Any

from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from vllm.model_executor.models.transformers import base


def give_own_classes() -> None:
    """Let vLLM make transformers' models from classes of its own, in this process."""
    base.AutoModel = OwnAutoModel


class OwnAutoModel:
    """What vLLM calls of transformers' `AutoModel`."""

    @staticmethod
    def from_config(
        config: PretrainedConfig, *, trust_remote_code: bool = False, **options: Any
    ) -> PreTrainedModel:
        """A model with random weights, of a copy of the class that `AutoModel` would take."""
        shared = MODEL_MAPPING[type(config)]
        own = getattr(_copy_of(shared.__module__), shared.__name__)
        model: PreTrainedModel = own._from_config(config, **options)
        return model


@cache
def _copy_of(name: str) -> ModuleType:
    """The module `name`, loaded as another; it stays in its package, for relative imports."""
    path = inspect.getfile(sys.modules[name])
    spec = importlib.util.spec_from_file_location(f"{name}_of_vllm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
