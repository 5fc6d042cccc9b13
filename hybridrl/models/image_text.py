"""The text part of a checkpoint for images and text: what trains, and what stays as it was.

Where no sample has an image the tower takes no part, and the positions of a token are all its
number. Then the language model of such a checkpoint computes what a causal language model does
(`config_json.IMAGE_TEXT`), with the same weights under other names. Images are for some families
alone (`config_json.IMAGE_FAMILIES`, `hybridrl.models.vision`).
"""

import copy
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from hybridrl.models.config_json import IMAGE_FAMILIES, IMAGE_TEXT, is_read

_OF_TEXT, _OF_WHOLE = "model.", "model.language_model."
TOWER_MODULE = "visual"
"""The tower's module in an image model, and in a text part that has it."""
TOWER = f"model.{TOWER_MODULE}."
"""Before the names of a tower's tensors, in the image model and in a text part that has it."""
_FROM_WHOLE = ("bos_token_id", "eos_token_id", "pad_token_id")
PROCESSORS = (
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""The files of a checkpoint that say how images become its inputs."""
PART_SETTINGS = "whole_type", "image_pads", "tower_config", "trains_tower"
"""What the config of a text part has of its image model (`language_config`)."""


def language_config(config: PretrainedConfig, trains_tower: bool = False) -> PretrainedConfig:
    """The config of the causal language model in an image model's; a copy of it, if it is one.

    Whether embeddings are tied is the whole model's matter, and so are special tokens that the text
    part does not name. `whole_type` is the image model's type: no other config has the attribute.
    `image_pads` are tokens that stand for images and videos, which no model writes, `tower_config`
    is the config of the tower that makes features of images. With `trains_tower` the tower is a
    part of the model (`attach_tower`). Raises ValueError for one without a tower that is computed.
    """
    model_type = IMAGE_TEXT.get(config.model_type)
    has_images = getattr(config, "vision_config", None) is not None
    if trains_tower and not (has_images and config.model_type in IMAGE_FAMILIES):
        raise ValueError(f"model type {config.model_type} has no image tower that is computed")
    if model_type is None or not has_images:
        return config
    inner = config.get_text_config()
    if inner.model_type == model_type:
        text = copy.deepcopy(inner)
    else:  # a family without a causal language model of its own
        settings = inner.to_dict() | {"norm_topk_prob": True}
        rotation = settings.pop("rope_parameters") or {}
        settings["rope_parameters"] = {
            name: value for name, value in rotation.items() if not name.startswith("mrope")
        }
        for name in ("model_type", "transformers_version", "architectures"):
            settings.pop(name, None)
        text = AutoConfig.for_model(model_type, **settings)
    text.whole_type = config.model_type
    text.tie_word_embeddings = config.tie_word_embeddings
    if config.model_type in IMAGE_FAMILIES:
        text.name_or_path = config.name_or_path  # where the tower is
        text.image_pads = [config.image_token_id, config.video_token_id]
        text.tower_config = copy.deepcopy(config.vision_config)
        text.trains_tower = trains_tower
    for name in _FROM_WHOLE:
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    return text


def image_pads(config: PretrainedConfig) -> list[int]:
    """The tokens that stand for images and videos, of a model with this `config`; none of others.

    An image model's config and that of its text part say the same.
    """
    pads: list[int] = getattr(language_config(config), "image_pads", [])
    return [pad for pad in pads if pad < config.get_text_config().vocab_size]


def whole_config(path: str) -> PretrainedConfig | None:
    """The config of the image model at `path`, as it was dequantized; None where it is none.

    The hub is asked only for a file that this machine does not have.
    """
    try:
        settings, _ = PretrainedConfig.get_config_dict(path, local_files_only=True)
    except OSError:
        settings, _ = PretrainedConfig.get_config_dict(path)
    if settings.get("model_type") not in IMAGE_TEXT or not settings.get("vision_config"):
        return None
    config = AutoConfig.from_pretrained(path, local_files_only=True)  # it has been fetched
    if is_read(getattr(config, "quantization_config", None)):
        del config.quantization_config
    return config


def whole_model(path: str) -> PreTrainedModel | None:
    """The image model at `path` without memory for its weights; None where it is none."""
    config = whole_config(path)
    if config is None:
        return None
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def meta_tower(config: PretrainedConfig, **settings: Any) -> PreTrainedModel:
    """The tower of the model whose text part has this `config`, without memory for its weights.

    The `settings` go to transformers' `from_config`.
    """
    whole = AutoConfig.for_model(
        config.whole_type,
        vision_config=config.tower_config.to_dict(),
        text_config={"num_hidden_layers": 1},
    )
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(whole, **settings)
    tower: PreTrainedModel = model.model.visual
    return tower


def has_tower(config: PretrainedConfig) -> bool:
    """Whether the tower trains as a part of the model with this `config`."""
    return getattr(config, "trains_tower", False)


def attach_tower(model: PreTrainedModel) -> None:
    """Give the text part `model` its image tower, if that trains with it, without memory.

    The names of its parameters are those of the image model: `model.visual.blocks.0.attn.qkv.bias`.
    """
    if has_tower(model.config):
        tower = meta_tower(model.config, dtype=model.dtype)  # its rotations stay in float32
        tower.set_attn_implementation("sdpa")  # not causal, as packed rows' is
        setattr(model.base_model, TOWER_MODULE, tower)


def tower_in(model: PreTrainedModel) -> PreTrainedModel | None:
    """The tower that trains with `model` (`attach_tower`); None for a model or stage without."""
    tower: PreTrainedModel | None = getattr(model.base_model, TOWER_MODULE, None)
    return tower


def whole_name(name: str) -> str:
    """The name in the image model of a tensor of its text part, or of a tower in that."""
    if name.startswith(TOWER):
        return name
    return _OF_WHOLE + name.removeprefix(_OF_TEXT) if name.startswith(_OF_TEXT) else name


def text_name(name: str) -> str | None:
    """The reverse of `whole_name`; None for what is not of the text part."""
    if name.startswith(_OF_WHOLE):
        return _OF_TEXT + name.removeprefix(_OF_WHOLE)
    return None if name.startswith(_OF_TEXT) else name


def own_name(name: str) -> str | None:
    """The reverse of `whole_name`; None for what is neither of the text part nor of the tower."""
    return name if name.startswith(TOWER) else text_name(name)


class KeptTensors(Mapping[str, torch.Tensor]):
    """Tensors of files, by their stored names, each of which is read when it is asked for."""

    def __init__(self, slices: Mapping[str, Any]) -> None:
        self._slices = slices

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._slices[name][...]
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._slices  # a Mapping's own test reads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def empty(self) -> dict[str, torch.Tensor]:
        """Tensors of these shapes and formats without memory."""
        empty = {}
        for name, stored in self._slices.items():
            shape = stored.get_shape()
            one = stored[tuple(slice(0, 1) for _ in shape) or ...]
            empty[name] = torch.empty(shape, dtype=one.dtype, device="meta")
        return empty


def copy_processor_file(path: str, name: str, folder: Path) -> None:
    """Copy one of `PROCESSORS` from the model at `path` to `folder`, where the model has it.

    Raises OSError where the hub does not say.
    """
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    if file is not None:
        shutil.copy(file, folder)
