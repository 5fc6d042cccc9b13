"""Prompts of vLLM's, of which some have images: it gets the features of the process's own tower.

vLLM would have a tower of its own, and read pictures by the processor of the checkpoint. Here it
has neither: a request brings the ids of the run and the features that the native engine and the
trainer take. So all read a picture alike, it is computed once for its group, and a process has one
tower in a format.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from transformers import BatchFeature, PretrainedConfig
from transformers.utils import is_torchvision_available
from vllm.inputs import mm_input, tokens_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from hybridrl.engines.rollout.available import VLLM_IMAGE_MODELS
from hybridrl.engines.rollout.interface import Request
from hybridrl.models.image_files import digest_of
from hybridrl.models.vision import ImageReader, VisionTower, tower_of

_IMAGE = "image"
"""vLLM's name of the kind of input."""


class PromptInputs:
    """vLLM's inputs for requests of the model with this `config`.

    Without `embeds`, on a pipeline stage that gets hidden states, images come without features.
    Requests that wait have theirs on the host, once for all requests of an image: vLLM moves those
    of a step to the device.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, embeds: bool
    ) -> None:
        self._reader = tower_of(config, dtype, device, embeds)
        self._items: WeakValueDictionary[bytes, Any] = WeakValueDictionary()

    def of(self, request: Request, salt: str) -> Any:
        """The prompt of a request, whose tokens so far are all a prompt to vLLM."""
        tokens = [*request.prompt_ids, *request.response_ids]
        if not request.images:
            return tokens_input(tokens, cache_salt=salt)
        reader = self._reader()
        pads = np.flatnonzero(np.asarray(request.prompt_ids) == reader.tokens.image)
        items, hashes, places, start = [], [], [], 0
        for image in request.images:
            grid = reader.grid(image)
            size = reader.tokens.num_pads(grid)
            digest = digest_of(image)
            item = self._items.get(digest)
            if item is None:
                item = _item(reader, image, torch.tensor([grid]), size)
                self._items[digest] = item
            items.append(item)
            hashes.append(digest.hex())
            places.append(PlaceholderRange(offset=int(pads[start]), length=size))
            start += size
        assert start == len(pads), "pads of the images"
        return mm_input(
            tokens,
            MultiModalKwargsItems({_IMAGE: items}),
            {_IMAGE: hashes},
            {_IMAGE: places},
            cache_salt=salt,
        )


def _item(reader: ImageReader, image: bytes, grid: torch.Tensor, size: int) -> Any:
    """What vLLM's model gets of an image: its `grid` [1, 3], and features [pads, all hidden]."""
    inputs = {"image_grid_thw": grid}
    fields = {"image_grid_thw": MultiModalFieldConfig.batched(_IMAGE, keep_on_cpu=True)}
    if isinstance(reader, VisionTower):
        inputs["image_embeds"] = reader.image_features(image).flatten(1).cpu()
        sizes = torch.tensor([size])
        fields["image_embeds"] = MultiModalFieldConfig.flat_from_sizes(_IMAGE, sizes)
    (item,) = MultiModalKwargsItems.from_hf_inputs(BatchFeature(inputs), fields)[_IMAGE]
    return item


def take_features(config: PretrainedConfig) -> dict[str, Any]:
    """Have vLLM make a model with this `config` without its tower; return its engine's arguments.

    Of a model for text alone vLLM has its own, and there are no arguments.
    """
    whole_type = getattr(config, "whole_type", None)
    if whole_type is None:
        return {}
    from vllm import ModelRegistry

    name = VLLM_IMAGE_MODELS[whole_type]
    with _torchvision_unused():
        module = importlib.import_module(f"vllm.model_executor.models.{whole_type}")
    ModelRegistry.register_model(name, _without_tower(getattr(module, name)))
    # A limit of 0 leaves the tower out, and embeddings are what may come nevertheless.
    return {
        "limit_mm_per_prompt": {_IMAGE: 0, "video": 0},
        "enable_mm_embeds": True,
        "mm_processor_cache_gb": 0,  # features are kept by the tower
    }


def _without_tower(model: Any) -> type:
    """The class of vLLM's `model` that takes DeepStack's features without having the tower.

    vLLM adds them behind layers only where it has made them.
    """
    own = model._processor_factory
    processor: Any = own.processor
    info: Any = own.info

    class Processor(processor):
        requires_tokenizer = False  # which no prompt goes through

    class Info(info):
        """What vLLM asks before any prompt: an image has no more tokens than a prompt."""

        def get_supported_mm_limits(self) -> dict[str, int | None]:
            return {_IMAGE: None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: object) -> dict[str, int]:
            return {_IMAGE: seq_len}

    class WithoutTower(model):
        def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            levels = len(self.config.vision_config.deepstack_visual_indexes)
            size = vllm_config.scheduler_config.max_num_batched_tokens, self.visual_dim
            self.use_deepstack, self.deepstack_num_level = levels > 0, levels
            self.multiscale_dim = levels * self.visual_dim
            self.deepstack_input_embeds = [torch.zeros(size) for _ in range(levels)]
            self.deepstack_input_embeds_num_tokens = 0

    register: Any = MULTIMODAL_REGISTRY.register_processor(
        Processor, info=Info, dummy_inputs=own.dummy_inputs
    )
    registered: type = register(WithoutTower)
    return registered


@contextmanager
def _torchvision_unused() -> Iterator[None]:
    """Let vLLM's model be imported without torchvision, which its CPU build is installed without.

    Its module imports transformers' processors, and these torchvision. Nothing calls them here.
    """
    if is_torchvision_available():
        yield
        return
    name, modules = "", {}
    for level in ("torchvision", "transforms", "v2", "functional"):
        name = f"{name}.{level}".lstrip(".")
        modules[name] = ModuleType(name)
        modules[name].__spec__ = ModuleSpec(name, None)  # which `importlib.util.find_spec` reads
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
