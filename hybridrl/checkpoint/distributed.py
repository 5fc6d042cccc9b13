"""Sharded checkpoints, written and read by all ranks under any layout (torch's DCP).

A checkpoint holds full tensors under the model's own names, each rank's shards in a separate file.
So another layout reads the boxes that it needs. Names are `model/PARAMETER`, `STATE/PARAMETER` for
the optimizer's tensors (`exp_avg`, `exp_avg_sq`, Muon's `momentum_buffer`), and of a moving average
`AVERAGE/average/PARAMETER`.
"""

import io
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

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
    with logged(logger, f"save to {folder}"):
        copy = StateCopy(folder, engine, kept)
        copy.write()
        copy.finish()


@dataclass(slots=True)
class HostCopies:
    """What one `StateCopy` leaves to the next: copies by the items of its plan, and this plan.

    `layout` says of which tensors the plan is; `metadata` is the first rank's alone.
    """

    tensors: NamedTensors = field(default_factory=dict)
    layout: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    plan: SavePlan | None = None
    metadata: Metadata | None = None


class StateCopy:
    """What `save` writes, in three steps: planned together, written by each rank, ended together.

    With `copies` it is what training has now, copied to host memory, and nothing here refers to the
    tensors of training, which may leave the device; without, `write` comes before anything changes.
    Where an earlier one has left `copies` of the same tensors, they are written over, so they take
    no new memory, and its plan holds: that one must be finished. See `checkpoint.parts.Part`.
    """

    def __init__(
        self,
        folder: Path,
        engine: TrainEngine,
        kept: NamedTensors,
        copies: HostCopies | None = None,
    ) -> None:
        """Plan which rank writes what. Collective; raises OSError as `save` does."""
        self.folder = folder
        self._error: OSError | None = None
        saver: Any = state_dict_saver  # whose collectives carry errors to all ranks
        self._ranks = saver._DistWrapper(None, True, 0)
        self._writer = FileSystemWriter(folder)
        state = kept | {name: dequantized(tensors[0]) for name, tensors in _tensors(engine)}
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=False)  # copies share the writing
        is_first = self._ranks.is_coordinator
        planner.set_up_planner(state, self._writer.storage_meta(), is_first)
        self._writer.set_up_storage_writer(is_first)
        self._planner: SavePlanner = planner
        self._plan: SavePlan
        self._metadata: Metadata | None
        if copies is None:
            self._plan, self._metadata = self._planned(planner)
            return
        layout = {name: _layout_of(tensor) for name, tensor in state.items()}
        holds = copies.plan is not None and copies.layout == layout
        if not all(self._ranks.all_gather_object(holds)):  # planning takes longer than the copy
            copies.plan, copies.metadata = self._planned(planner)
            copies.layout = layout
        assert copies.plan is not None
        self._plan, self._metadata = copies.plan, copies.metadata
        _copy_to_host(planner, self._plan, copies.tensors)
        self._planner = _CopiesPlanner(copies.tensors)

    def _planned(self, planner: DefaultSavePlanner) -> tuple[SavePlan, Metadata | None]:
        """What this rank writes, and on the first rank what all do. Collective."""
        metadata = None

        def agreed(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal metadata
            plans, metadata = planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(plans)

        def own_plan() -> SavePlan:
            return self._writer.prepare_local_plan(planner.create_local_plan())

        with _naming(self.folder):
            plan = self._ranks.reduce_scatter("plan", own_plan, agreed)
            return planner.finish_plan(plan), metadata

    def write(self) -> None:
        """Write this rank's file, and its checksum."""
        self._results: list[WriteResult] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._results = self._writer.write_data(self._plan, self._planner).wait()
            for file in {result.storage_data.relative_path for result in self._results}:
                note_sum(self.folder / file)
        except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
            self._error = OSError(*cause_of(error))  # causes do not travel between ranks

    def finish(self) -> list[str]:
        """Write the metadata, with its checksum, on the first rank."""

        def own_results() -> list[WriteResult]:
            if self._error is not None:
                raise self._error
            return self._results

        def end(results: list[list[WriteResult]]) -> None:
            assert self._metadata is not None, "another rank than the first ends the file"
            self._writer.finish(self._metadata, results)
            note_sum(self.folder / ".metadata")

        with _naming(self.folder):
            self._ranks.all_reduce("write", own_results, end)
        return []


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Raise the first rank's error of a step, which all of them have, as one of the folder."""
    try:
        yield
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


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on: two tensors that agree in it have the same boxes on each rank."""
    own = tuple(tensor.shape), tensor.dtype
    return (*own, tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else own


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _CopiesPlanner(DefaultSavePlanner):
    """Gives the tensors of a plan from copies in host memory, by the items' names."""

    def __init__(self, copies: NamedTensors) -> None:
        super().__init__()
        self._copies = copies

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor of an item."""
        return self._copies[str(write_item.index)]


def _copy_to_host(planner: SavePlanner, plan: SavePlan, copies: NamedTensors) -> None:
    """Let `copies` have the tensors of the plan's items alone, where it fits in its own memory."""
    wanted = {str(item.index): _tensor_of(planner, item) for item in plan.items}
    for key in copies.keys() - wanted.keys():
        del copies[key]
    pinned = torch.cuda.is_available()
    for key, tensor in wanted.items():
        held = copies.get(key)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            copies[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    if wanted:
        into = [copies[key] for key in wanted]
        torch._foreach_copy_(into, list(wanted.values()), non_blocking=True)
    if pinned:
        torch.cuda.current_stream().synchronize()


def _tensor_of(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor), f"{item.index} is no tensor"
    return tensor.detach()


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
