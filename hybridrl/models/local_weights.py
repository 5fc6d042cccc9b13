"""Loads one rank's shards of a model from safetensors, without reading other elements."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from hybridrl.config import ConfigError
from hybridrl.layout.box import Box
from hybridrl.layout.local import LocalTensor
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.shard import GenParallel, instance_layout


def weight_files(path: str) -> dict[str, Path]:
    """The file of each tensor of the model at `path`, a directory or a hub name.

    Raises OSError if none can be read.
    """
    index = _optional(path, "model.safetensors.index.json")
    if index is None:
        single = _required(path, "model.safetensors")
        with _open(single) as opened:
            return dict.fromkeys(opened.keys(), single)
    names: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {file: _required(path, file) for file in set(names.values())}
    return {name: files[file] for name, file in names.items()}


def _optional(path: str, name: str) -> Path | None:
    """A file of a directory or of a hub's model, which is fetched once; None if it is missing."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def _required(path: str, name: str) -> Path:
    file = _optional(path, name)
    if file is None:
        raise OSError(f"{name} is missing")
    return file


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise OSError(f"{file.name}: {error}") from error


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
    """Fill `model` (`shard.local_model` of `config`) with its shards of the weights at `path`.

    Only the rank's boxes are read; padded rows of a vocabulary become zeros. Raises ConfigError,
    which names `key`, for weights that are missing, damaged or of another shape.
    """
    layout = instance_layout(config, parallel.pp, parallel.tp, classifier, parallel.ep)
    parameters = dict(model.named_parameters())
    try:
        files = weight_files(path)
        _check_names(layout.shapes, files, path, key)
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, parameter in parameters.items():
                # A tied head has the embedding's name even on stages without an embedding.
                file = files[name]
                if file not in opened:
                    opened[file] = stack.enter_context(_open(file))
                stored, shape = opened[file].get_slice(name), layout.shapes[name]
                if tuple(stored.get_shape()) != shape:
                    got = f"weights of the config's shapes ({name}: {stored.get_shape()})"
                    raise ConfigError(key, path, got)
                held = LocalTensor(layout.local(name, parallel.instance_rank))
                _fill(parameter.data, stored, held, shape)
        load_buffers(model, path, key)
    except OSError as error:
        raise ConfigError(key, path, f"a model with *.safetensors ({error})") from error


@torch.no_grad()
def load_buffers(model: PreTrainedModel, path: str, key: str = "model.path") -> None:
    """Fill the persistent buffers of `model` from the weights at `path`; others stay.

    Every rank has all of those of its layers. Raises ConfigError, which names `key`, where the
    weights lack one or have it under another name; OSError for weights that cannot be read.
    """
    buffers = persistent_buffers(model)
    if not buffers:
        return
    files = weight_files(path)
    _check_names(buffers, files, path, key)
    for name, buffer in buffers.items():
        with _open(files[name]) as opened:
            buffer.copy_(opened.get_tensor(name))


def _check_names(
    wanted: Mapping[str, object], files: Mapping[str, Path], path: str, key: str
) -> None:
    missing = sorted(set(wanted) - set(files))
    if missing:
        raise ConfigError(key, path, f"complete weights; missing: {', '.join(missing)}")


def _fill(tensor: torch.Tensor, stored: Any, held: LocalTensor, shape: tuple[int, ...]) -> None:
    """Copy the boxes `held` of a stored tensor of `shape`; padding in them becomes zeros."""
    for box in held.boxes:
        unpadded = box.intersect(Box.whole(shape))
        if unpadded != box:
            tensor[held.slices(box)].zero_()
        if unpadded is not None:
            tensor[held.slices(unpadded)].copy_(stored[unpadded.slices()])
