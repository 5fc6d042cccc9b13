"""The decoder layers of a model, whatever its family calls them."""

from torch import nn
from transformers import PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers in order: `layers` in most families, `h` in GPT-2, `decoder.layers` in OPT."""
    layers = getattr(model.base_model, "layers", None)
    if isinstance(layers, nn.ModuleList):
        return layers
    number = model.config.num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))
    return next(candidate for candidate in lists if len(candidate) == number)


def layers_name(model: PreTrainedModel) -> str:
    """The name of `decoder_layers` in the base model."""
    layers = decoder_layers(model)
    return next(name for name, module in model.base_model.named_modules() if module is layers)
