"""Weights from safetensors into one rank's part of a model: each rank reads what it holds."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.config import ConfigError
from hybridrl.layout.box import Box
from hybridrl.models.shard import GenParallel, instance_layout

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def weight_files(path: str) -> dict[str, Path]:
    """The file of each tensor of the model at `path`, a directory or a hub name.

    Raises OSError or SafetensorError where there are none that can be read.
    """
    directory = Path(path)
    if not directory.is_dir():
        directory = Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    index = directory / _INDEX
    if index.is_file():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in names.items()}
    with safe_open(directory / _SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), directory / _SINGLE)


@torch.no_grad()
def load_local(
    model: PreTrainedModel,
    path: str,
    config: PretrainedConfig,
    parallel: GenParallel,
    *,
    classifier: bool = False,
    key: str = "model.path",
) -> None:
    """Fill `model` (`shard.local_model` of `config`) with its part of the weights at `path`.

    Nothing but the rank's own boxes is read; padded rows of a vocabulary become zeros. Raises
    ConfigError, which names `key`, for weights that are missing, damaged or of another shape.
    """
    layout = instance_layout(config, parallel.pp, parallel.tp, classifier)
    own = dict(model.named_parameters())
    try:
        files = weight_files(path)
        _check_names(layout.shapes, files, path, key)
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, parameter in own.items():
                # A tied head has the embedding's name on stages without an embedding too.
                file = files[name]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(file, "pt"))
                stored, shape = opened[file].get_slice(name), layout.shapes[name]
                if tuple(stored.get_shape()) != shape:
                    got = f"weights of the config's shapes ({name}: {stored.get_shape()})"
                    raise ConfigError(key, path, got)
                (held,) = layout.local(name, parallel.place)
                _fill(parameter.data, stored, held, shape)
    except (OSError, SafetensorError) as error:
        raise ConfigError(key, path, f"a model with *.safetensors ({error})") from error


def _check_names(
    wanted: Mapping[str, object], files: Mapping[str, Path], path: str, key: str
) -> None:
    missing = sorted(set(wanted) - set(files))
    if missing:
        raise ConfigError(key, path, f"complete weights; missing: {', '.join(missing)}")


def _fill(tensor: torch.Tensor, stored: Any, held: Box, shape: tuple[int, ...]) -> None:
    """Copy the box of a stored tensor of `shape`; of the box, what is padding becomes zeros."""
    part = held.intersect(Box.whole(shape))
    if part != held:
        tensor.zero_()
    if part is not None:
        tensor[part.slices(held)].copy_(stored[part.slices()])
