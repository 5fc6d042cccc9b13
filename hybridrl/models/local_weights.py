"""Weights from safetensors into one rank's part of a model: each rank reads what it holds."""

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
from hybridrl.models.shard import GenParallel, instance_layout


def weight_files(path: str) -> dict[str, Path]:
    """The file of each tensor of the model at `path`, a directory or a hub name.

    Raises OSError where there are none that can be read.
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
    """A file of a directory or of a hub's model, which is fetched once; None where it has none."""
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _required(path: str, name: str) -> Path:
    found = _optional(path, name)
    if found is None:
        raise OSError(f"{name} is missing")
    return found


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
                    opened[file] = stack.enter_context(_open(file))
                stored, shape = opened[file].get_slice(name), layout.shapes[name]
                if tuple(stored.get_shape()) != shape:
                    got = f"weights of the config's shapes ({name}: {stored.get_shape()})"
                    raise ConfigError(key, path, got)
                (held,) = layout.local(name, parallel.instance_rank)
                _fill(parameter.data, stored, held, shape)
    except OSError as error:
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
