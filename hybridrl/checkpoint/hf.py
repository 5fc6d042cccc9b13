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
from contextlib import ExitStack
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
from hybridrl.checkpoint.parts import on_all_ranks, raise_on_all
from hybridrl.checkpoint.weight_shares import Conversion, WeightShare, weight_shares
from hybridrl.config import ConfigError, DType
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout.layout import Layout
from hybridrl.layout.process_groups import warm_up
from hybridrl.layout.transfer_rounds import BUCKET_BYTES
from hybridrl.models.hub_names import HubNames
from hybridrl.models.image_text import (
    PART_SETTINGS,
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
        export = Export(engine, path, tokenizer, dtype, ends)
        export.write()
        return export.finish()


class Export:
    """What `save_hf` writes, in three steps: gathered together, written by each rank, ended.

    With `copies` the weights are gathered into host memory at once, a rank's whole share, and
    training may go on. They are then written to the path itself, which is no checkpoint yet.
    Without, `write` gathers them file by file, so all ranks call it together, and `finish` replaces
    an earlier one. See `checkpoint.parts.Part`.
    """

    def __init__(
        self,
        engine: TrainEngine,
        path: Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: DType = DType.float32,
        ends: Sequence[int] = (),
        *,
        copies: bool = False,
    ) -> None:
        """Plan the ranks' shares; see `save_hf`. Collective, raises OSError as it does."""
        self.engine, self.path, self.tokenizer, self.ends = engine, path, tokenizer, ends
        # under NCCL no message may be its first operation
        warm_up([dist.group.WORLD], engine.device)
        self._temporary = path if copies else path.with_name(f".{path.name}.tmp")
        self._compute, self._first = TORCH_DTYPES[dtype], dist.get_rank() == 0
        self._error: OSError | None = None
        self._missing: list[str] = []
        self._opened = ExitStack()
        try:
            self._plan()
            self._tensors = self._gather()
            if copies:
                kept = [(name, tensor.clone()) for name, tensor in self._tensors]
                self._tensors = iter(kept)
        except BaseException:
            self._close()
            raise

    def _plan(self) -> None:
        """Deal the weights to the ranks, and make the folder."""
        engine, config = self.engine, self.engine.model.config
        buffers, classifier = engine.buffers(), head_name(engine.model) == "score"
        model, self._whole, kept = meta_model(config, classifier), None, KeptTensors({})
        with on_all_ranks(self.path):
            if not classifier and hasattr(config, "whole_type"):
                self._whole = _whole(config)
                kept = self._opened.enter_context(_stored(config)).kept()
        self._hub = HubNames(model, self._whole, kept)
        stored = buffers | kept.empty()
        self._shares = shares_of(self._hub, engine.shapes(), stored, engine.layout, self._compute)
        self._buffers = ChainMap(buffers, cast(Any, kept))
        # Each of these parts ends on all ranks, or fails on all: the next one has collectives.
        with on_all_ranks(self.path):
            if self._first:
                if self._temporary != self.path:
                    shutil.rmtree(self._temporary, ignore_errors=True)  # of a run that was killed
                self._temporary.mkdir(parents=True, exist_ok=True)

    def _gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's tensors, as they are written; the adapters of all are on the host now."""
        engine = self.engine
        self._adapters = {
            name: tensor.to("cpu")
            for adapter in engine.adapter_names()
            for name, tensor in engine.gather({adapter: 0}, torch.float32).items()
        }
        return _gathered(engine, self._shares, self._buffers, self._compute)

    def write(self) -> None:
        """Write this rank's share, and on the first rank all other files."""
        try:
            try:
                for share in self._shares:
                    if share.writer == dist.get_rank():
                        write_share(self._temporary, self._hub, share, self._tensors)
            finally:  # the others join the collectives, also after an error
                deque(self._tensors, maxlen=0)
            if self._first:
                self._write_others()
        except (OSError, SafetensorError) as error:
            self._error = write_error(error, self.path)

    def _write_others(self) -> None:
        write_index(self._temporary, self._shares)
        engine, whole = self.engine, self._whole
        files = _files_of(engine.model, whole, self._compute, self.tokenizer, self.ends)
        self._missing = write_side_files(self._temporary, files)
        if engine.adapter_config is not None:
            adapter = partial(_write_adapter, engine.adapter_config, self._adapters, whole)
            files |= {"adapter": adapter}
            del files[CONFIG_NAME]  # which is the base's
            self._missing += write_side_files(self._temporary / "adapter", files)

    def finish(self) -> list[str]:
        """Rename the folder once all ranks have written; gives what is left out."""
        try:
            raise_on_all(self._error)
            with on_all_ranks(self.path):
                if self._first and self._temporary != self.path:
                    replace(self._temporary, self.path)
        finally:
            self._close()
        return self._missing

    def _close(self) -> None:
        self._opened.close()
        if self._first and self._temporary != self.path:
            shutil.rmtree(self._temporary, ignore_errors=True)


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
    for name in PART_SETTINGS:  # of a value model, which is written alone
        vars(config).pop(name, None)
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
