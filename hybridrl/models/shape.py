"""The Hugging Face config of a model, without its weights."""

import tempfile

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

from hybridrl.config import ConfigError, ModelConfig
from hybridrl.models.load import load_config, one_line
from hybridrl.models.tiny import make_tiny_model


def model_shape(config: ModelConfig) -> PretrainedConfig:
    """From `model.shape` where it is set, else from `model.path`, else of the tiny model.

    Raises ConfigError if the shape is no Hugging Face config.
    """
    if config.shape:
        shape = dict(config.shape)
        try:
            return AutoConfig.for_model(shape.pop("model_type"), **shape)
        except KeyError:
            raise ConfigError("model.shape.model_type", "???", "a model type as `qwen3`") from None
        except (ValueError, TypeError, StrictDataclassError) as error:
            allowed = f"a Hugging Face config ({one_line(error)})"
            raise ConfigError("model.shape", config.shape, allowed) from error
    if config.path:
        return load_config(config.path, vision=config.vision)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        make_tiny_model(directory, config.tiny, seed=0)
        return load_config(directory, vision=config.vision)
