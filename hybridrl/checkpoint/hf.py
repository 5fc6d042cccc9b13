"""Writes a model as a Hugging Face directory, atomically."""

import copy
import errno
import itertools
import json
import logging
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridrl.checkpoint.folder import replace
from hybridrl.config import DType
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.models.hub_names import HubNames
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.models.parallel import meta_model
from hybridrl.models.stages import head_name
from hybridrl.telemetry.log import logged

logger = logging.getLogger(__name__)

Adapter = tuple[Any, Iterable[tuple[str, torch.Tensor]]]
"""peft's config of a model's adapters, and its trained tensors, by plain names."""

MAX_SHARD_BYTES = 4 * 2**30
"""Bytes of one weight file; the writer holds at most one in memory."""


def save_hf(
    engine: TrainEngine,
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: DType = DType.float32,
) -> None:
    """Write the engine's model to the directory `path`, for transformers.

    `AutoModelForSequenceClassification` reads a model with a value head, `AutoModelForCausalLM`
    others. Adapters are merged, and also written to `adapter/`, for peft
    (`PeftModel.from_pretrained(base, path / "adapter")`).

    All ranks call it; rank 0 writes, and parameters are gathered one by one. Those of an engine
    that is offloaded stay in host memory: the rollout engine may have the device. An existing
    checkpoint is replaced at the end, by a rename. Raises OSError, on all ranks, that names the
    path.
    """
    with logged(logger, f"export to {path}"):
        _save_hf(engine, path, tokenizer, dtype)


def _save_hf(
    engine: TrainEngine, path: Path, tokenizer: PreTrainedTokenizerBase | None, dtype: DType
) -> None:
    device, error = engine.shards_device(), None
    weights, adapters = engine.weights(device), engine.adapter_weights(device)
    buffers = engine.buffers()
    adapter = None if engine.adapter_config is None else (engine.adapter_config, adapters)
    if dist.get_rank() == 0:
        try:
            compute = TORCH_DTYPES[dtype]
            shapes = engine.shapes()
            write_hf(path, engine.model, weights, shapes, compute, tokenizer, adapter, buffers)
        except OSError as caught:
            error = caught
    # The other ranks, and rank 0 after an error, must join the collectives; nothing is kept.
    deque(itertools.chain(weights, adapters), maxlen=0)
    errors = [error]
    dist.broadcast_object_list(errors, src=0)
    if errors[0] is not None:
        raise errors[0]


def write_hf(
    path: Path,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    adapter: Adapter | None = None,
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `weights` in `dtype` with the model's config and the tokenizer.

    Names and shapes are those of the family's hub checkpoints (`models.hub_names`).
    The `adapter`, merged into the weights, is also written to a separate directory, in float32. In
    the same directory transformers would add it to the weights.

    `weights` yields every parameter of `shapes` once, in its order; `buffers` keep their dtype. A
    hidden directory in the same parent replaces `path` once it is complete; an earlier checkpoint
    at `path` stays until then. Raises OSError with the path if anything cannot be written, and
    removes the hidden directory.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed while it wrote
        temporary.mkdir(parents=True)
        _write_weights(temporary, model, weights, shapes, dtype, buffers, max_shard_bytes)
        _write_config(temporary, model, dtype)
        if adapter is not None:
            _write_adapter(temporary / "adapter", *adapter)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        replace(temporary, path)
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as its own error
        code = getattr(error, "errno", None) or errno.EIO
        raise OSError(code, f"the checkpoint could not be written: {error}", str(path)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_weights(
    directory: Path,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    buffers: Mapping[str, torch.Tensor],
    max_bytes: int,
) -> None:
    hub = HubNames(meta_model(model.config, classifier=head_name(model) == "score"))
    names = [*shapes, *buffers]

    # The file of each tensor, from their shapes.
    empty = [
        (name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape in shapes.items()
    ]
    empty += [(name, buffer.to("meta")) for name, buffer in buffers.items()]
    shards = _shards(hub.converted(names, empty), max_bytes)

    # The tensors, one file after the other.
    on_host = itertools.chain(_on_host(weights, dtype), buffers.items())
    stream = hub.converted(names, on_host)
    files: dict[str, str] = {}
    total = 0
    for number, wanted in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        tensors = {
            name: tensor.contiguous() for name, tensor in itertools.islice(stream, len(wanted))
        }
        assert list(tensors) == wanted, "weights and shapes differ in order"
        total += sum(tensor.nbytes for tensor in tensors.values())
        files |= dict.fromkeys(tensors, file)
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _on_host(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        on_host = tensor.to("cpu", dtype)
        del tensor  # before the next one is made
        yield name, on_host


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> list[list[str]]:
    """Names of each file, in order; a tensor that exceeds the bound has a separate file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    return shards


def _write_adapter(
    directory: Path, config: Any, weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write as `PeftModel.save_pretrained` does; a value head is trained and saved in full."""
    tensors = {name: tensor.to("cpu").contiguous() for name, tensor in weights}
    heads = [name.rpartition(".")[0] for name in tensors if ".lora_" not in name]
    config = copy.copy(config)
    config.modules_to_save, config.inference_mode = heads or None, True
    config.save_pretrained(directory)
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _write_config(directory: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    before = model.config.dtype, model.config.architectures
    # FSDP renames the class of a module that it shards; the config must carry transformers' name.
    name = next(c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    model.config.dtype, model.config.architectures = dtype, [name]
    try:
        model.config.save_pretrained(directory)
        generation = getattr(model, "generation_config", None)  # a classifier has none
        if generation is not None:
            generation.save_pretrained(directory)
    finally:
        model.config.dtype, model.config.architectures = before
