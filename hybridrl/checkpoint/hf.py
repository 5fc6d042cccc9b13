"""Writes a model as a Hugging Face directory, atomically, by all ranks."""

import copy
import errno
import itertools
import json
import logging
import os
import re
import shutil
from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from hybridrl.checkpoint.folder import replace, write_error
from hybridrl.checkpoint.weight_shares import Conversion, WeightShare, weight_shares
from hybridrl.config import ConfigError, DType
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout.layout import Layout
from hybridrl.layout.process_groups import warm_up
from hybridrl.layout.transfer_rounds import BUCKET_BYTES
from hybridrl.models.hub_names import HubNames
from hybridrl.models.image_text import (
    PROCESSORS,
    KeptTensors,
    copy_processor_file,
    whole_config,
    whole_model,
    whole_name,
)
from hybridrl.models.load import TORCH_DTYPES, generation_config, load_config
from hybridrl.models.parallel import meta_model
from hybridrl.models.stages import head_name
from hybridrl.models.stored_weights import StoredWeights
from hybridrl.models.weight_files import INDEX
from hybridrl.telemetry.log import logged

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**30
"""Bytes of one weight file; its writer holds at most one in memory."""
LEAST_SHARE_BYTES = 2**30
"""A rank writes as much, or nothing: hundreds of small files are slow to open."""


def save_hf(
    engine: TrainEngine,
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: DType = DType.float32,
    ends: Sequence[int] = (),
) -> list[str]:
    """Write the engine's model to the directory `path`, for transformers.

    `AutoModelForSequenceClassification` reads a model with a value head, `AutoModelForCausalLM`
    others. Adapters are merged, and also written to `adapter/`, for peft
    (`PeftModel.from_pretrained(base, path / "adapter")`). The tokens `ends` end a response in both
    folders' `generation_config.json`. An actor that is the text part of a checkpoint for images and
    text is written as the whole of it, with the tower and what else does not train as it was.

    All ranks call it, and all nodes share the directory. A model above `MAX_FILE_BYTES` is written
    by all ranks, each with its share of the weights (`checkpoint.weight_shares`); a smaller one by
    rank 0, to one file. A parameter goes to its writer alone. Where the engine is offloaded, it
    stays in host memory: the rollout engine may have the device. An existing checkpoint is replaced
    at the end, by a rename. Raises OSError, on all ranks, that names the path.

    The weights come first. Another file that cannot be written is left out: the first rank answers
    with a line for each.
    """
    with logged(logger, f"export to {path}"):
        return _save_hf(engine, path, tokenizer, dtype, ends)


def _save_hf(
    engine: TrainEngine,
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: DType,
    ends: Sequence[int],
) -> list[str]:
    warm_up([dist.group.WORLD], engine.device)  # under NCCL no message may be its first operation
    temporary, compute = path.with_name(f".{path.name}.tmp"), TORCH_DTYPES[dtype]
    first, buffers, missing = dist.get_rank() == 0, engine.buffers(), list[str]()
    config, classifier = engine.model.config, head_name(engine.model) == "score"
    model, whole, kept = meta_model(config, classifier), None, KeptTensors({})
    opened = ExitStack()
    try:
        with _on_all_ranks(path):
            if not classifier and hasattr(config, "whole_type"):
                whole = _whole(config)
                kept = opened.enter_context(_stored(config)).kept()
        hub = HubNames(model, whole, kept)
        shares = shares_of(hub, engine.shapes(), buffers | kept.empty(), engine.layout, compute)
        # Each of these parts ends on all ranks, or fails on all: the next one has collectives.
        with _on_all_ranks(path):
            if first:
                shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
                temporary.mkdir(parents=True)
        with _on_all_ranks(path):
            tensors = _gathered(engine, shares, ChainMap(buffers, cast(Any, kept)), compute)
            adapters = {
                name: tensor.to("cpu")
                for adapter in engine.adapter_names()
                for name, tensor in engine.gather({adapter: 0}, torch.float32).items()
            }
            try:
                for share in [share for share in shares if share.writer == dist.get_rank()]:
                    write_share(temporary, hub, share, tensors)
            finally:  # the others join the collectives, also after an error
                deque(tensors, maxlen=0)
        with _on_all_ranks(path):
            if first:
                write_index(temporary, shares)
                files = _files_of(engine.model, whole, compute, tokenizer, ends)
                missing += write_side_files(temporary, files)
                if engine.adapter_config is not None:
                    adapter = partial(_write_adapter, engine.adapter_config, adapters, whole)
                    files |= {"adapter": adapter}
                    del files[CONFIG_NAME]  # which is the base's
                    missing += write_side_files(temporary / "adapter", files)
                replace(temporary, path)
    finally:
        opened.close()
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
    return missing


def _whole(config: PretrainedConfig) -> PreTrainedModel:
    """The image model whose text part trains; raises OSError where it is gone."""
    whole = whole_model(config.name_or_path)
    if whole is None:
        problem = f"{config.name_or_path} is no {config.whole_type} any more"
        raise OSError(errno.ENOENT, problem)
    return whole


def _stored(config: PretrainedConfig) -> StoredWeights:
    """The weights that a run of the model began with; raises OSError where they are gone."""
    try:
        return StoredWeights(config.name_or_path, config)
    except ConfigError as error:
        raise OSError(errno.ENOENT, str(error)) from error


def _files_of(
    model: PreTrainedModel,
    whole: PreTrainedModel | None,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    ends: Sequence[int],
) -> dict[str, Callable[[Path], object]]:
    if whole is not None:
        path, generation = model.config.name_or_path, model.generation_config
        return _files_of_whole(path, whole.config, generation, dtype, tokenizer, ends)
    # FSDP renames the class of a module that it shards; the config must carry transformers' name.
    name = next(c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers."))
    generation = getattr(model, "generation_config", None)  # a classifier has none
    return side_files(model.config, name, generation, dtype, tokenizer, ends)


def _files_of_whole(
    path: str,
    config: PretrainedConfig,
    generation: GenerationConfig,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None,
    ends: Sequence[int] = (),
) -> dict[str, Callable[[Path], object]]:
    """The files of a model for images and text, with those of the one at `path` for its images."""
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__
    files = side_files(config, name, generation, dtype, tokenizer, ends)
    return files | {name: partial(copy_processor_file, path, name) for name in PROCESSORS}


@contextmanager
def _on_all_ranks(path: Path) -> Iterator[None]:
    """Wait until the body has ended on all ranks; raise an error of one of them on all."""
    error: OSError | None = None
    try:
        yield
    except (OSError, SafetensorError) as caught:
        error = write_error(caught, path)
    errors: list[OSError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for error in errors:
        if error is not None:
            raise error


def shares_of(
    hub: HubNames,
    shapes: Mapping[str, torch.Size],
    buffers: Mapping[str, torch.Tensor],
    layout: Layout,
    dtype: torch.dtype,
) -> list[WeightShare]:
    """The share of each rank of `layout` in parameters of `dtype`, and in buffers as they are.

    Precise parameters are in float32.

    Every rank has the buffers; those of the first pipeline stage write them.
    """
    empty = [
        (name, torch.empty(shape, dtype=_stored_dtype(layout, name, dtype), device="meta"))
        for name, shape in shapes.items()
    ]
    empty += [(name, buffer.to("meta")) for name, buffer in buffers.items()]
    conversions = [
        Conversion(
            tuple(names),
            {name: tensor.nbytes for name, tensor in results.items()},
            next((layout.rules[name].stages[0] for name in names if name in shapes), 0),
        )
        for names, results in hub.conversions([*shapes, *buffers], empty)
    ]
    return weight_shares(
        conversions,
        layout.mesh.grid().reshape(layout.mesh.extent("pp"), -1).tolist(),
        most=MAX_FILE_BYTES,
        least=LEAST_SHARE_BYTES,
        turn=BUCKET_BYTES,
    )


def _gathered(
    engine: TrainEngine,
    shares: Sequence[WeightShare],
    buffers: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of this rank's share, in its order, on the host. Every rank exhausts it."""
    rank = dist.get_rank()
    for turns in itertools.zip_longest(*(share.turns for share in shares), fillvalue=()):
        by_writer = {share.writer: names for share, names in zip(shares, turns, strict=True)}
        owners = {name: writer for writer, names in by_writer.items() for name in names}
        parameters = {name: owner for name, owner in owners.items() if name not in buffers}
        own = engine.gather(parameters, dtype)
        for name in by_writer.get(rank, ()):
            if name in buffers:
                yield name, buffers[name]
            else:
                yield name, own.pop(name).to("cpu", _stored_dtype(engine.layout, name, dtype))


def _stored_dtype(layout: Layout, name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name in layout.precise else dtype


def write_share(
    directory: Path,
    hub: HubNames,
    share: WeightShare,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write the files of a share from its `tensors` on the host, one file after the other.

    Names and shapes are those of the family's hub checkpoints (`models.hub_names`). Raises OSError,
    also for a directory that rank 0 has made and this rank's node does not see.
    """
    if not directory.is_dir():
        problem = f"rank {share.writer} does not see {directory}, which rank 0 has made"
        raise OSError(errno.ENOENT, f"{problem}: all nodes must share the run directory")
    stream = hub.converted(share.names, tensors)
    for file in share.files:
        converted = itertools.islice(stream, len(file.tensors))
        contents = {name: tensor.contiguous() for name, tensor in converted}
        assert tuple(contents) == file.tensors, "weights and shapes differ in order"
        save_file(contents, directory / file.name, metadata={"format": "pt"})


def write_index(directory: Path, shares: Sequence[WeightShare]) -> None:
    """Write which file has which tensor, where there are several files."""
    files = [file for share in shares for file in share.files]
    if len(files) > 1:
        size = sum(file.size for file in files)
        names = {name: file.name for file in files for name in file.tensors}
        index = {"metadata": {"total_size": size}, "weight_map": names}
        (directory / INDEX).write_text(json.dumps(index, indent=2))


def side_files(
    config: PretrainedConfig,
    architecture: str,
    generation: GenerationConfig | None,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ends: Sequence[int] = (),
) -> dict[str, Callable[[Path], object]]:
    """The functions that write the files of a model besides its weights, by their names.

    Configs are written as they were read, also with values that transformers' `save_pretrained`
    refuses, such as a `temperature` without `do_sample`.
    """
    files: dict[str, Callable[[Path], object]] = {}
    files[CONFIG_NAME] = partial(_write_config, config, dtype, architecture)
    if generation is not None:
        files[GENERATION_CONFIG_NAME] = partial(_write_generation, generation, ends)
    if tokenizer is not None:
        files["tokenizer"] = tokenizer.save_pretrained
    return files


def check_side_files(path: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write what a run of the model at `path` writes besides its weights, once, below `folder`.

    Raises ConfigError for what cannot be written: at the end of a run that would be too late.
    """
    generation, dtype = generation_config(path), torch.float32
    whole = whole_config(path)
    if whole is None:
        files = side_files(load_config(path), "", generation, dtype, tokenizer)
    else:
        files = _files_of_whole(path, whole, generation, dtype, tokenizer)
    with TemporaryDirectory(prefix=".probe", dir=folder) as directory:
        if missing := write_side_files(Path(directory), files):
            full = map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
            if any(reason in missing[0] for reason in full):
                allowed = f"a directory with room for a model ({missing[0]})"
                raise ConfigError("run.dir", folder, allowed)
            raise ConfigError("model.path", path, f"a model that can be written ({missing[0]})")


def write_side_files(directory: Path, files: Mapping[str, Callable[[Path], object]]) -> list[str]:
    """Write `files` into `directory`; answers with a line for each that cannot be written."""
    missing = []
    for name, write in files.items():
        try:
            directory.mkdir(exist_ok=True)
            write(directory)
        except Exception as error:  # whatever a library raises, the weights are there
            (directory / name).unlink(missing_ok=True)
            reason = " ".join(str(error).split())[:300]
            missing.append(f"{name}: {type(error).__name__}: {reason}")
    return missing


def _write_config(
    config: PretrainedConfig, dtype: torch.dtype, architecture: str, directory: Path
) -> None:
    config = copy.deepcopy(config)
    config.dtype, config.architectures = dtype, [architecture]
    vars(config).pop("transformers_weights", None)  # where the weights were, in the model's folder
    vars(config).pop("whole_type", None)  # of a value model, which is written alone
    config.to_json_file(directory / CONFIG_NAME)


def _write_generation(config: GenerationConfig, ends: Sequence[int], directory: Path) -> None:
    config = copy.deepcopy(config)
    if ends:
        config.eos_token_id = ends[0] if len(ends) == 1 else list(ends)
    config.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def _write_adapter(
    config: Any,
    weights: Mapping[str, torch.Tensor],
    whole: PreTrainedModel | None,
    directory: Path,
) -> None:
    """Write as `PeftModel.save_pretrained` does; a value head is trained and saved in full.

    Of a text part it is an adapter of the whole model, beside whose tower peft must pass.
    """
    heads = [name.rpartition(".")[0] for name in weights if ".lora_" not in name]
    config = copy.copy(config)
    config.modules_to_save, config.inference_mode = heads or None, True
    if whole is not None:
        weights = {whole_name(name): tensor for name, tensor in weights.items()}
        modules = {name.partition(".lora_")[0] for name in weights}
        config.target_modules = "|".join(re.escape(name) for name in sorted(modules))
    named = {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
