"""Sharded checkpoints, written and read by all ranks under any layout (torch's DCP).

A checkpoint holds full tensors under the model's own names, each rank's shards in a separate file.
So another layout reads the boxes that it needs. Names are `model/PARAMETER`, `STATE/PARAMETER` for
the optimizer's tensors (`exp_avg`, `exp_avg_sq`, Muon's `momentum_buffer`), and of a moving average
`AVERAGE/average/PARAMETER`.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from hybridrl.checkpoint.folder import cause_of, note_sum, write_error
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.optim import STATE, dequantized
from hybridrl.telemetry.log import logged

logger = logging.getLogger(__name__)

NamedTensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Progress:
    """Optimizer steps of a role: `version` over the run, `steps` of its present learning rate."""

    version: int
    steps: int


def progress_of(engine: TrainEngine) -> Progress:
    """The optimizer steps of an engine so far."""
    return Progress(engine.version, engine.lr_scheduler.last_epoch)


def save(folder: Path, engine: TrainEngine, kept: NamedTensors) -> None:
    """Write trained parameters, their moments, biases that move, and the tensors `kept`.

    All ranks call it. Raises OSError, on all of them, that names the folder.
    """
    state = kept | {name: dequantized(tensors[0]) for name, tensors in _tensors(engine)}
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=False)  # copies share the writing
    try:
        with logged(logger, f"save to {folder}"):
            state_dict_saver.save(state, storage_writer=_Writer(folder), planner=planner)
    except CheckpointException as error:
        raise write_error(next(iter(error.failures.values()))[0], folder) from None


def load(folder: Path, engine: TrainEngine, progress: Progress, kept: NamedTensors) -> None:
    """Restore a checkpoint of `save`, under any layout: every tensor is filled in place.

    The optimizer must be that of the phase (`TrainEngine.reset_optimizer`). All ranks call it.
    Raises ValueError, on all of them, for an unreadable checkpoint or one of another model.
    """
    try:
        known = FileSystemReader(folder).read_metadata().state_dict_metadata
        moments = any(name.startswith(tuple(f"{key}/" for key in STATE)) for name in known)
        engine.resume(progress.version, progress.steps, moments)
        copies = dict(_tensors(engine))
        state = kept | {name: dequantized(tensors[0]) for name, tensors in copies.items()}
        with logged(logger, f"load from {folder}"):
            planner = _AnyPadding(engine.vocabulary())
            state_dict_loader.load(state, checkpoint_id=folder, planner=planner)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise ValueError(f"{folder}: {' '.join(str(first).split())}") from error
    except (OSError, EOFError, ValueError, UnpicklingError) as error:
        raise ValueError(f"{folder}: {error}") from error
    for name, tensors in copies.items():
        for tensor in tensors:
            if tensor is not state[name]:  # the second of a tied one, or moments of 8 bits
                _local(tensor).copy_(_local(state[name]).to(tensor.device))


def named_average(tensors: Mapping[str, torch.Tensor], role: str) -> NamedTensors:
    """The tensors of the average `role`, under names for `save`."""
    return {f"{role}/average/{name}": tensor for name, tensor in tensors.items()}


def average_shards(kept: Mapping[str, torch.Tensor], role: str) -> NamedTensors:
    """The inverse of `named_average` for `role`: this rank's shards by name."""
    start = f"{role}/average/"
    return {x.removeprefix(start): _local(t) for x, t in kept.items() if x.startswith(start)}


def _tensors(engine: TrainEngine) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Names and tensors of what is trained; several if a rank has copies of a tied parameter."""
    engine.memory.settle()
    parameters_by_name: dict[str, list[torch.nn.Parameter]] = {}
    for chunk in engine.chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                parameters_by_name.setdefault(name, []).append(parameter)
    for name, buffer in engine.moving_buffers().items():
        yield f"model/{name}", [buffer]
    for name, parameters in parameters_by_name.items():
        yield f"model/{name}", [parameter.detach() for parameter in parameters]
        states = [engine.optimizer.state.get(parameter, {}) for parameter in parameters]
        for key, value in states[0].items():
            if value.ndim:
                yield f"{key}/{name}", [state[key] for state in states]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Writer(FileSystemWriter):
    """Every rank also writes the checksums of its files; an error here fails on all ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write as the default does, then the checksums."""
        try:
            written = super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            raise OSError(*cause_of(error)) from error  # causes do not travel between ranks
        for file in {result.storage_data.relative_path for result in written.wait()}:
            note_sum(Path(self.path) / file)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish as the default does, on the first rank, then write the metadata's checksum."""
        super().finish(metadata, results)
        note_sum(Path(self.path) / ".metadata")


class _AnyPadding(DefaultLoadPlanner):
    """Accepts a vocabulary that was padded to another multiple: only common rows are read.

    Rows after the saved ones are zeros already: `models.tensor_parallel.pad_vocabulary` sets them,
    and training does not change them. `vocabulary` are the parameters with a row for each token.
    """

    def __init__(self, vocabulary: Collection[str]) -> None:
        super().__init__()
        self._vocabulary = tuple(f"/{name}" for name in vocabulary)

    def create_local_plan(self) -> LoadPlan:
        """The default's plan, for this run's sizes of the tensors."""
        assert self.metadata is not None
        known = self.metadata.state_dict_metadata
        for name, tensor in self.state_dict.items():
            saved = known.get(name)
            if not name.endswith(self._vocabulary) or not isinstance(saved, TensorStorageMetadata):
                continue
            if saved.size[1:] == tensor.shape[1:]:
                known[name] = replace(saved, size=tensor.size())
        return super().create_local_plan()
