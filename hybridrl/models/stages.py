"""Pipeline chunks of a Hugging Face model, with its code and its names."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

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
        layers = f"{base}.layers."
        tied = self.model.config.tie_word_embeddings
        for name, parameter in self.model.named_parameters():
            if name.startswith(layers):
                number, _, suffix = name.removeprefix(layers).partition(".")
                name = f"{layers}{int(number) + self.offset}.{suffix}"
            elif tied and not self.first and name == "lm_head.weight":
                name = f"{base}.embed_tokens.weight"
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


def head_name(model: PreTrainedModel) -> str:
    """The module after the norm: `score` in a sequence classifier, else the vocabulary's head."""
    return "score" if hasattr(model, "score") else "lm_head"


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
    base, config = model.base_model, copy.deepcopy(model.config)
    first, last = start == 0, stop == config.num_hidden_layers
    config.num_hidden_layers = stop - start
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[start:stop]
    name = head_name(model)
    auto = AutoModelForSequenceClassification if name == "score" else AutoModelForCausalLM
    with torch.device("meta"):
        chunk = auto.from_config(config, attn_implementation=model.config._attn_implementation)
    chunk.base_model.layers = nn.ModuleList(list(base.layers)[start:stop])
    chunk.base_model.rotary_emb = base.rotary_emb
    chunk.base_model.embed_tokens = base.embed_tokens if first else None
    chunk.base_model.norm = base.norm if last else nn.Identity()
    head = getattr(model, name) if last else None
    if head is not None and not first and head.weight is base.embed_tokens.weight:
        head = copy.deepcopy(head)
    setattr(chunk, name, head)
    return Chunk(prepare_training(chunk), start, first, last)


def hollow(model: PreTrainedModel) -> None:
    """Drop the modules of `model` once its chunks hold them; its config stays.

    Otherwise every stage would keep the weights of all stages.
    """
    base = model.base_model
    base.layers = nn.ModuleList()
    base.embed_tokens = base.norm = None
    setattr(model, head_name(model), None)
