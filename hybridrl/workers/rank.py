"""What a rank is: one process that hosts every colocated role, its samples and its phases."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from hybridrl.checkpoint.hf import save_hf
from hybridrl.config import Config, ConfigError, OptimConfig
from hybridrl.data import Item
from hybridrl.flow.executor import Advanced, Command, Computed, Finished, Phase, Placed, Resume
from hybridrl.flow.graph import Graph, Stage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.actor import Actor, Reference
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.roles import RewardModel, Role, run_map
from hybridrl.workers.store import SampleStore, StoredSample


@dataclass(frozen=True, slots=True)
class Span:
    """What this rank did between two moments (Unix seconds)."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Reply:
    """A method's value and what the rank did meanwhile."""

    value: Any
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class UpdateShare:
    """This rank's part of an update.

    `mini_batches` lists the sample ids of each optimizer step, `scalars` the driver's fields of
    those samples, `parcels` the references of samples that other ranks made.
    """

    mini_batches: tuple[tuple[SampleId, ...], ...]
    scalars: dict[SampleId, dict[str, float]]
    parcels: tuple[Any, ...]


class RankWorker:
    """One rank of the colocated pool.

    States: made -> `setup` (process group, weights) -> `begin` (a recipe's roles) -> phases, any
    number of times. In GENERATE the rollout engine holds the actor's newest weights; in TRAIN the
    training shards and the optimizer are in place. Samples stay in `store` from the call that
    made them until `release`.
    """

    def __init__(
        self, rank: int, world_size: int, config: Config, model_path: str, data_plane: DataPlane
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.config, self.model_path, self.data_plane = config, model_path, data_plane
        self.store = SampleStore()
        self.roles: dict[str, Role] = {}
        self._spans: list[Span] = []

    # -- life --------------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def setup(self) -> Reply:
        """Join the process group and load the actor. Answers with what is worth logging."""
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(self.config.cluster.threads_per_rank)
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            rank=self.rank,
            world_size=self.world_size,
        )
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        with self._span("load"):
            self.actor = Actor(self.config, self.model_path, self.tokenizer, self.store, device)
        self.roles = {
            "actor": self.actor,
            "reward": RewardModel(self.config, self.tokenizer, self.store),
        }
        return self._reply(
            {
                "pid": os.getpid(),
                "node": os.uname().nodename,
                "log": _log_file(),
                **self.actor.describe(),
            }
        )

    @dispatch(Dispatch.SAME)
    def begin(self, graph: Graph, optim: OptimConfig, total_updates: int) -> Reply:
        """Make the roles that a recipe needs and start a fresh optimizer."""
        self.actor.train_engine.reset_optimizer(optim, total_updates)
        for name in graph.roles:
            if name in self.roles:
                continue
            copy = graph.copies.get(name)
            if name != "reference" and not (
                copy and copy.of == "actor" and copy.update == "frozen"
            ):
                known = ", ".join([*self.roles, "reference"])
                raise ConfigError("recipe", f"role {name}", f"roles that are built: {known}")
            self.roles[name] = Reference(self.actor, self.config, self.model_path)
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def close(self) -> Reply:
        """End child processes and leave the process group."""
        for role in self.roles.values():
            role.close()
        dist.destroy_process_group()
        return self._reply(None)

    # -- generation --------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def enter(self, phase: Phase) -> Reply:
        """Change phase; into GENERATE this is the weight switch. Answers with its accounting."""
        with self._span("switch" if phase is Phase.GENERATE else "to_train"):
            report = self.actor.enter(phase)
        return self._reply(report)

    @dispatch(Dispatch.SAME)
    def advance(self, instance: int, commands: Sequence[Command], num_decode_steps: int) -> Reply:
        """Take commands and decode for a bounded number of steps.

        What is parked goes into the data plane, and comes out of it where it resumes.
        """
        commands = [self._arrived(c) if isinstance(c, Resume) else c for c in commands]
        with self._span("generate"):
            finished, parked, steps = self.actor.advance(commands, num_decode_steps)
        finished = [replace(event, rank=self.rank) for event in finished]
        sent = [replace(event, state=self.data_plane.put(event.state)) for event in parked]
        value = Advanced(instance, self.actor.unfinished, steps, tuple(finished), tuple(sent))
        return self._reply(value)

    def _arrived(self, command: Resume) -> Resume:
        """With the parked samples themselves in place of their reference."""
        with self._span("fetch"):
            (state,) = self.data_plane.get([command.parked.state])
        return replace(command, parked=replace(command.parked, state=state))

    # -- per-sample stages -------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def place(self, stage: Stage, ids: tuple[SampleId, ...], items: tuple[Item, ...]) -> Reply:
        """Make the dataset's targets the responses of new samples (supervised training)."""
        if stage.options["column"] is not None:
            raise ConfigError("recipe", stage.name, "the dataset's answer as target")
        placed = []
        for id, item in zip(ids, items, strict=True):
            tokens = torch.tensor([*item.prompt_ids, *item.target_ids])
            num_prompt, num_target = len(item.prompt_ids), len(item.target_ids)
            self.store.add(id, StoredSample(num_target, item, {"tokens": tokens}))
            placed.append(Finished(id, self.rank, num_prompt, num_target, "stop", -1))
        return self._reply(Placed(stage.name, tuple(placed)))

    @dispatch(Dispatch.SAME)
    def compute(
        self, stage: Stage, ids: tuple[SampleId, ...], scalars: tuple[dict[str, Any], ...]
    ) -> Reply:
        """Run a per-sample stage on samples that live here; `scalars` are the driver's fields."""
        with self._span(stage.method or stage.name):
            if stage.method == "map":
                made, tensors = run_map(stage, self.store, ids, scalars)
            else:
                assert stage.role is not None
                made, tensors = self.roles[stage.role].compute(stage, ids)
        return self._reply(Computed(stage.name, ids, made, tensors))

    # -- training ----------------------------------------------------------------------------

    @dispatch(Dispatch.PER_RANK)
    def export(self, moves: tuple[tuple[SampleId, ...], ...], fields: tuple[str, ...]) -> Reply:
        """Write samples for other ranks into the data plane: one parcel per receiving rank."""
        with self._span("export"):
            parcels = [
                self.data_plane.put(self.store.take(ids, fields)) if ids else None for ids in moves
            ]
        return self._reply(parcels)

    @dispatch(Dispatch.PER_RANK)
    def update(self, stage: Stage, share: UpdateShare) -> Reply:
        """Train on this rank's share of every mini-batch; metrics are the same on all ranks."""
        with self._span("fetch"):
            for parcel in self.data_plane.get(list(share.parcels)):
                self.store.accept(parcel)
        with self._span("update"):
            metrics = self.actor.update(stage, share)
        return self._reply(metrics)

    # -- looking in --------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def texts(self, ids: tuple[SampleId, ...]) -> Reply:
        """Prompt and response texts of the samples that live here, for the record."""
        found = {}
        for id in ids:
            sample = self.store[id]
            prompt = sample.tensors["tokens"][: -sample.response_tokens or None]
            found[id] = (
                self.tokenizer.decode(prompt),
                self.tokenizer.decode(sample.response_ids, skip_special_tokens=True),
            )
        return self._reply(found)

    @dispatch(Dispatch.SAME)
    def release(self, ids: tuple[SampleId, ...]) -> Reply:
        """Forget samples that have left."""
        self.store.drop(ids)
        return self._reply(len(self.store))

    @dispatch(Dispatch.SAME)
    def save(self, path: str) -> Reply:
        """Write the actor as a Hugging Face directory (rank 0 writes, all ranks gather)."""
        with self._span("save"):
            dtype = self.config.model.compute_dtype
            save_hf(self.actor.train_engine, Path(path), self.tokenizer, dtype)
        return self._reply(path)

    # -- spans -------------------------------------------------------------------------------

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.time()))

    def _reply(self, value: Any) -> Reply:
        spans, self._spans = tuple(self._spans), []
        return Reply(value, spans)


def _log_file() -> str:
    """The file that this process's standard error goes to; empty where that is not known."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
