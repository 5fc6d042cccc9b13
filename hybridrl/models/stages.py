"""Pipeline chunks of a Hugging Face model, with its code and its names."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

import hybridrl.models.qwen3_vl  # noqa: F401  (a model that transformers lacks)
from hybridrl.models.image_text import TOWER_MODULE, has_tower, tower_in

_LAYER_NUMBERS = ("mlp_only_layers",)
"""Lists of some layers' numbers, which may by chance be as long as a model is deep."""

ADAPTER = "default"
"""peft's name of a model's only adapters."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive layers of a model as a separate model, with `offset` layers before them.

    The `first` one has the embedding, the `last` one norm and head.
    """

    model: PreTrainedModel
    offset: int
    first: bool
    last: bool

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the whole model's plain names; a tied head under the embedding's."""
        base = self.model.base_model_prefix
        layers, tied = f"{base}.layers.", self.model.config.tie_word_embeddings
        head = f"{head_name(self.model)}.weight"
        for name, parameter in self.model.named_parameters():
            if name.startswith(layers):
                number, _, suffix = name.removeprefix(layers).partition(".")
                name = f"{layers}{int(number) + self.offset}.{suffix}"
            elif tied and not self.first and name == head:
                name = f"{base}.{modules_before(self.model.config)[0]}.weight"
            yield plain_name(name), parameter


def plain_name(name: str) -> str:
    """The name of a module or parameter in checkpoints: without the components that peft adds.

    Weights keep their Hugging Face names; adapters are called as in `adapter_model.safetensors`.

    Example: `layers.0.mlp.up_proj.base_layer.weight` is `layers.0.mlp.up_proj.weight`, and
    `layers.0.mlp.up_proj.lora_A.default.weight` is `layers.0.mlp.up_proj.lora_A.weight`.
    """
    components = name.split(".")
    wrapping = {i for i, word in enumerate(components) if word == "base_layer"}
    wrapping |= {i + 1 for i, word in enumerate(components) if word in ("lora_A", "lora_B")}
    return ".".join(word for i, word in enumerate(components) if i not in wrapping)


def modules_before(config: PretrainedConfig) -> list[str]:
    """Modules of the base model that the first pipeline stage has besides its layers.

    The embedding is the first of them, a tower that trains the last.
    """
    names = list(config.base_model_pp_plan or ("embed_tokens", "layers", "norm"))
    return names[: names.index("layers")] + [TOWER_MODULE] * has_tower(config)


def modules_after(config: PretrainedConfig) -> list[str]:
    """Modules of the base model that the last pipeline stage has besides its layers."""
    names = list(config.base_model_pp_plan or ("embed_tokens", "layers", "norm"))
    return names[names.index("layers") + 1 :]


def head_name(model: PreTrainedModel) -> str:
    """The module after the norm: `score` in a sequence classifier, else the vocabulary's head."""
    if hasattr(model, "score"):
        return "score"
    head = model.get_output_embeddings()
    return next((name for name, child in model.named_children() if child is head), "lm_head")


def per_layer_lists(settings: Mapping[str, Any], depth: int) -> dict[str, list[Any]]:
    """The settings of a config that have an entry for each of its `depth` layers."""
    return {
        name: value
        for name, value in settings.items()
        if "layer" in name and name not in _LAYER_NUMBERS
        if isinstance(value, list) and len(value) == depth
    }


def prepare_training(model: PreTrainedModel) -> PreTrainedModel:
    """`model` in training mode as far as gradient checkpointing needs it, and no further.

    All modules but the model and its layers stay in evaluation mode. What is random in training,
    such as the jitter of a router, would train another policy than the one that generates.
    """
    model.train()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel | GradientCheckpointingLayer):
            module.training = False
    return model


def whole(model: PreTrainedModel) -> Chunk:
    """The model as its only chunk."""
    return Chunk(model, 0, first=True, last=True)


def cut(model: PreTrainedModel, start: int, stop: int) -> Chunk:
    """Layers `start` to `stop` of `model`; the chunk shares its modules.

    A tied head is the exception: the last chunk has a copy of the embedding, whose gradient must be
    added to that of the first. The chunk's forward is transformers' own. Chunks after the first
    take `inputs_embeds`; before the last, `last_hidden_state` is the last layer's output.
    """
    # An empty model of so many layers.
    base, config = model.base_model, copy.deepcopy(model.config)
    first, last = start == 0, stop == config.num_hidden_layers
    of_layers = per_layer_lists(config.to_dict(), config.num_hidden_layers)
    config.num_hidden_layers = stop - start
    for setting, values in of_layers.items():
        setattr(config, setting, values[start:stop])
    name = head_name(model)
    auto = AutoModelForSequenceClassification if name == "score" else AutoModelForCausalLM
    with torch.device("meta"):
        chunk = auto.from_config(config, attn_implementation=model.config._attn_implementation)
    # The modules of the whole one that belong to this chunk.
    here = {
        **dict.fromkeys(modules_before(config), first),
        **dict.fromkeys(modules_after(config), last),
    }
    for child_name, child in base.named_children():
        if here.get(child_name, True):  # rotations, which no stage lacks
            setattr(chunk.base_model, child_name, child)
        else:
            # An embedding or a tower is not called, the others pass on.
            uncalled = child in (model.get_input_embeddings(), tower_in(model))
            setattr(chunk.base_model, child_name, None if uncalled else nn.Identity())
    chunk.base_model.layers = nn.ModuleList(list(base.layers)[start:stop])
    head = getattr(model, name) if last else None
    if head is not None and not first and head.weight is model.get_input_embeddings().weight:
        head = copy.deepcopy(head)
    setattr(chunk, name, head)
    return Chunk(prepare_training(chunk), start, first, last)


def hollow(model: PreTrainedModel) -> None:
    """Drop the modules of `model` once its chunks hold them; its config stays.

    Otherwise every stage would keep the weights of all stages.
    """
    head = head_name(model)
    base = model.base_model
    base.layers = nn.ModuleList()
    for name in (*modules_before(model.config), *modules_after(model.config)):
        setattr(base, name, None)
    setattr(model, head, None)
