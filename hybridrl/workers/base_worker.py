"""A rank of any pool: one process that hosts roles, one of them on the device."""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from transformers.utils import logging as transformers_logging

from hybridrl.checkpoint import distributed
from hybridrl.checkpoint.distributed import HostCopies, Progress, StateCopy
from hybridrl.checkpoint.hf import Export, save_hf
from hybridrl.checkpoint.parts import BackgroundWriter
from hybridrl.config import Config
from hybridrl.costs.memory import PoolSizes
from hybridrl.engines.train.fused_update import FusedUpdate
from hybridrl.flow.executor import Computed
from hybridrl.flow.graph import Graph, Stage, StageMethod, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.layout.process_groups import warm_up
from hybridrl.models.load import TORCH_DTYPES, load_tokenizer
from hybridrl.system.activity import mark
from hybridrl.system.devices import prepare_gpu
from hybridrl.system.memory import MemoryReading, free_cached_memory
from hybridrl.system.node_info import NodeInfo, node_name, read_node_info
from hybridrl.system.peak_flops import measure_peak
from hybridrl.system.rendezvous import address_here, join_group, open_store
from hybridrl.system.short_tmpdir import shorten_tmpdir
from hybridrl.telemetry.digests import ShardDigest
from hybridrl.telemetry.trace import ThreadSlice, TimeSpan
from hybridrl.workers.answers import ModelDescription, ProcessDescription, RankDescription
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.device_residency import DeviceResidency, ResidentGroup
from hybridrl.workers.digests import digests_of_weights
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.role_factory import RoleFactory
from hybridrl.workers.scorers import InstanceScorer
from hybridrl.workers.staying_roles import StayingRoles, staying_roles
from hybridrl.workers.store import SampleStore
from hybridrl.workers.trainer import Trainer
from hybridrl.workers.training import (
    Training,
    UpdateShare,
    score,
    train,
)
from hybridrl.workers.value_model import runs_reversed

logger = logging.getLogger(__name__)
Value = TypeVar("Value")

_MAX_SLICES = 50_000
"""The longest operations of a rank and step that are kept; Perfetto is slow with many more."""
_MAX_ALLOCATIONS = 100_000


@dataclass(frozen=True, slots=True)
class Reply(Generic[Value]):
    """A method's value, the rank's time spans meanwhile, and its memory at changes of phase.

    `concurrent` is true of methods that run while the rank does other work.
    """

    value: Value
    spans: tuple[TimeSpan, ...]
    memory: tuple[MemoryReading, ...] = ()
    concurrent: bool = False


@dataclass(frozen=True, slots=True)
class Published(Generic[Value]):
    """An event, and a reference to the new tensors of its samples in the data plane.

    With it a sample can move without waiting for this rank, which may be decoding. `reference` is
    None where nothing is published.
    """

    event: Value
    reference: Any = None


class BaseWorker:
    """One rank of a pool, whose ranks are one process group.

    States: made -> `setup` (process group, weights) -> `begin` (a recipe's roles) -> calls.
    `residency` says which role has its weights on the device: the one that computed last.
    """

    build: RoleFactory
    residency: DeviceResidency
    staying: StayingRoles

    def __init__(
        self, rank: int, size: int, config: Config, model_path: str, data_plane: DataPlane
    ) -> None:
        """`rank` of `size` in the pool."""
        self.rank, self.size = rank, size
        self.config, self.model_path, self.data_plane = config, model_path, data_plane
        self.store = SampleStore()
        self.trained: dict[str, Trainer] = {}
        self.scorers: dict[str, InstanceScorer] = {}
        self.publishes = False
        self._store: Any = None
        self._spans: list[TimeSpan] = []
        self._memory: list[MemoryReading] = []
        self._profile: StepProfile | None = None
        self._early_s = 0.0  # seconds of gradients for an update that is to come
        self._together: dict[tuple[str, ...], FusedUpdate] = {}  # by roles
        self._copies: dict[str, HostCopies] = {}  # of the last state copy, by role

    # -- life --------------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def listen(self) -> Reply[tuple[str, int]]:
        """Open the rendezvous of the process group on this rank; answers with host and port.

        This process binds the port at once: a port that is looked up first and bound later may
        belong to another job by then.
        """
        host = address_here(os.environ["MASTER_ADDR"])
        self._store = open_store(host, 0, listens=True)
        return self._reply((host, self._store.port))

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int, sizes: PoolSizes | None = None) -> Reply[RankDescription]:
        """Join the process group, whose first rank listens on `port` of `host`; load the models.

        By `sizes`, those of the memory plan, ranks decide what stays on their devices.
        """
        raise NotImplementedError

    def _join(self, host: str, port: int, sizes: PoolSizes | None) -> ProcessDescription:
        """Do what `setup` does, without the models."""
        transformers_logging.disable_progress_bar()
        shorten_tmpdir()  # on other nodes than the driver's
        cluster = self.config.cluster
        torch.set_num_threads(cluster.threads_per_rank or 1)
        store = self._store or open_store(host, port, listens=False)
        strict = self.config.strict
        self.device = join_group(self.rank, self.size, store, host, cluster, strict)
        self._writer = BackgroundWriter(self.device)
        warm_up([dist.group.WORLD], self.device)
        if self.device.type == "cuda":
            prepare_gpu(self.device, cluster.threads_per_rank)
        self.tokenizer = load_tokenizer(self.model_path, self.config.data.chat_template)
        peak = self._measure_peak()
        self.staying = staying_roles(sizes, self.device)
        return ProcessDescription(
            pid=os.getpid(), node=node_name(), log=_log_file(), peak_flops=peak
        )

    def _measure_peak(self) -> float:
        """This device's operations a second in large products; those of the pool are kept."""
        peak = measure_peak(self.device, TORCH_DTYPES[self.config.model.compute_dtype])
        free_cached_memory(self.device)
        total = torch.tensor(peak, device=self.device)
        dist.all_reduce(total)
        self._pool_peak = float(total)
        return peak

    @dispatch(Dispatch.SAME)
    def node_info(self) -> Reply[NodeInfo]:
        """The node that this rank runs on."""
        return self._reply(read_node_info())

    @dispatch(Dispatch.SAME)
    def begin(
        self,
        graph: Graph,
        training: dict[str, Training],
        publishes: bool,
        weights: tuple[Any, ...] = (),
    ) -> Reply[dict[str, ModelDescription]]:
        """Make the roles that a recipe needs; those of `training` start with a fresh optimizer.

        `graph` has the stages of this pool. A frozen copy, and a value model without its own path,
        start with the actor's present weights. `weights` holds them where the actor is in another
        pool: names, and references to whole parameters. With `publishes` a rank puts new tensors
        into the data plane at once, since other ranks will read them. Answers with a description of
        each new value model, by name.
        """
        self.publishes = publishes
        self.residency.activate(None)
        descriptions = {}
        with self._span("load"):
            for name in graph.learned:
                if name not in self.trained:
                    reverse = self.config.trainer.fuses and runs_reversed(name, graph)
                    start, stays = self._actor_weights(weights), name in self.staying.names
                    model = self.build.value_model(name, start, reverse, stays)
                    self.trained[name], descriptions[name] = model, model.describe()
                    logger.debug("value model %s made", name)
            for name in graph.judges:
                self._add_judge(name)
            self._add_scorers(graph, weights)
        for name, how in training.items():
            self.trained[name].train_engine.reset_optimizer(how.optim, how.total_updates)
        return self._reply(descriptions)

    def _actor_weights(
        self, references: Sequence[Any]
    ) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The actor's trained weights; None where they are those of its file."""
        raise NotImplementedError

    def _add_judge(self, name: str) -> None:
        raise NotImplementedError

    def _add_scorers(self, graph: Graph, weights: Sequence[Any]) -> None:
        """Make the forward-only roles of `graph` that are no judges; `weights` as in `begin`."""

    @dispatch(Dispatch.SAME)
    def save_weights(self, path: str, background: bool = False) -> Reply[list[str]]:
        """Write the actor as a Hugging Face directory; every other trained role as one inside it.

        All ranks write (`checkpoint.hf`), in the `background` from copies, until `finish_save`. The
        first rank answers with a line for each file besides the weights that could not be written.
        """
        missing = []
        self._finish_records()
        with self._span("save"):
            dtype = self.config.model.compute_dtype
            for name, role in self.trained.items():
                folder = Path(path) if name == "actor" else Path(path) / name
                ends = role.end_ids
                what = role.train_engine, folder, self.tokenizer, dtype, ends
                if background:
                    self._writer.begin(Export(*what, copies=True))
                else:
                    missing += save_hf(*what)
        return self._reply(missing)

    @dispatch(Dispatch.SAME)
    def save_state(self, path: str, background: bool = False) -> Reply[dict[str, Progress]]:
        """Write the state that training resumes from into `path`, a folder for each role.

        Answers with each role's progress. In the `background` it is written from copies: a rank
        that trains leaves a mark once that is done, and `finish_save` ends it.
        """
        with self._span("save"):
            for name, role in self.trained.items():
                what = Path(path) / name, role.train_engine, self._averages(name)
                if background:
                    copies = self._copies.setdefault(name, HostCopies())
                    self._writer.begin(StateCopy(*what, copies))
                else:
                    distributed.save(*what)
        if background and self.trained:
            self._writer.mark(Path(path))
        progress = {
            x: distributed.progress_of(role.train_engine) for x, role in self.trained.items()
        }
        return self._reply(progress)

    @dispatch(Dispatch.SAME)
    def finish_save(self) -> Reply[list[str] | OSError]:
        """Wait until what is written in the background is there, and end it; as `save_weights`.

        Answers with the error of a write that has failed: raised, it would end all ranks, and the
        driver has something more to write.
        """
        with self._span("finish save"):
            try:
                return self._reply(self._writer.finish())
            except OSError as error:
                return self._reply(error)

    def _finish_records(self) -> None:
        """Write the records of all steps so far: a run that resumes here makes none of them."""

    @dispatch(Dispatch.SAME)
    def load(self, path: str, progress: dict[str, Progress]) -> Reply[str]:
        """Resume from the files that `save` wrote to `path`; answers with the error, if any."""
        with self._span("load"):
            for name in [name for name in progress if name in self.trained]:
                engine, averages = self.trained[name].train_engine, self._averages(name)
                try:
                    distributed.load(Path(path) / name, engine, progress[name], averages)
                except ValueError as error:
                    return self._reply(str(error))
                self._restore_averages(averages)
        return self._reply("")

    def _averages(self, role: str) -> distributed.NamedTensors:
        """Moving averages of a role's weights, saved with its parameters and moments."""
        return {}

    def _restore_averages(self, averages: distributed.NamedTensors) -> None:
        """Resume from the tensors of `_averages`, which `load` has filled."""

    @dispatch(Dispatch.SAME)
    def close(self) -> Reply[None]:
        """Leave the process group."""
        if dist.is_initialized():  # vLLM ends it with itself
            dist.destroy_process_group()
        return self._reply(None)

    # -- work --------------------------------------------------------------------------------

    def _run_stage(self, stage: Stage, ids: tuple[SampleId, ...]) -> Reply[Computed]:
        """Run a stage that is collective over the pool on this rank's samples, or copies."""
        assert stage.role is not None
        if stage.method is not StageMethod.SCORE and stage.role in self.trained:
            (event,) = self._score([stage], ids)
            return self._reply(event)
        start = time.perf_counter()
        with self._span(stage.name, len(ids)):
            scorer = self.scorers[stage.role]
            self.residency.activate(scorer)
            scalars, tensors = scorer.compute(stage, ids)
        seconds = time.perf_counter() - start
        return self._reply(Computed(stage.name, ids, scalars, tensors, seconds=seconds))

    def _score(self, stages: Sequence[Stage], ids: tuple[SampleId, ...]) -> list[Computed]:
        """Forward-only stages of trained roles on this rank's samples, as one pipeline plan.

        Each takes an equal share of the seconds. Collective.
        """
        roles = {stage.role: self.trained[stage.role] for stage in stages if stage.role}
        start = time.perf_counter()
        with self._span(" and ".join(stage.name for stage in stages), len(ids)):
            together = self._activate(roles)
            scorings = [
                role.scoring(x, ids) for x, role in zip(stages, roles.values(), strict=True)
            ]
            results = score(scorings, together)
        seconds = (time.perf_counter() - start) / len(stages)
        return [
            Computed(stage.name, ids, *of_stage, seconds=seconds)
            for stage, of_stage in zip(stages, results, strict=True)
        ]

    def _activate(self, roles: Mapping[str, Trainer]) -> FusedUpdate | None:
        """Have these roles on the device; gives what makes one plan of several. Collective."""
        (first, *others) = (role.train_engine for role in roles.values())
        together = self._fused(tuple(roles)) if others else None
        self.residency.activate(ResidentGroup((first, *others)) if others else first)
        return together

    @dispatch(Dispatch.PER_RANK)
    def update(
        self, stages: tuple[UpdateStage, ...], shares: tuple[UpdateShare, ...]
    ) -> Reply[list[dict[str, float]]]:
        """Train on this rank's shares of every mini-batch: one role, or several together.

        Metrics are the same on all ranks, but for `mfu`, which is over this rank's own time. Roles
        that train together each have that of their own operations in the time of all.
        """
        ids = dict.fromkeys(id for share in shares for id in share.ids)
        self._fetch(shares[0].parcels, tuple(ids))
        roles = {stage.role: self.trained[stage.role] for stage in stages if stage.role}
        with self._span("update", len(ids)):
            together = self._activate(roles)
            start = time.perf_counter()
            each = zip(roles.values(), stages, shares, strict=True)
            metrics = train([r.update_steps(stage, share) for r, stage, share in each], together)
            seconds = time.perf_counter() - start + self._early_s
            self._early_s = 0.0
            for of_role in metrics:
                of_role["mfu"] = of_role["flops"] / seconds / self._pool_peak
        return self._reply(metrics)

    def _fused(self, roles: tuple[str, ...]) -> FusedUpdate:
        """What trains or scores these roles together, made once. Collective."""
        if roles not in self._together:
            engines = [self.trained[role].train_engine for role in roles]
            self._together[roles] = FusedUpdate(engines)
        return self._together[roles]

    @dispatch(Dispatch.SAME)
    def fetch(self, parcels: tuple[tuple[Any, tuple[SampleId, ...]], ...]) -> Reply[None]:
        """Take copies of samples of other ranks, in place of those of a call that came to nothing.

        Of each parcel these samples are wanted. Raises SamplesLost where a rank that had put some
        has ended.
        """
        wanted = [ids for _, ids in parcels]
        with self._span("fetch", sum(map(len, wanted))):
            self.store.drop({id for ids in wanted for id in ids})
            values = self.data_plane.get([reference for reference, _ in parcels])
            for parcel, ids in zip(values, wanted, strict=True):
                self.store.accept(parcel, frozenset(ids))
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def digest_weights(self) -> Reply[dict[str, dict[str, ShardDigest]]]:
        """Digests of this rank's shards of all trained weights, by role and parameter."""
        with self._span("digest"):
            engines = {name: role.train_engine for name, role in self.trained.items()}
            return self._reply({name: digests_of_weights(x) for name, x in engines.items()})

    @dispatch(Dispatch.SAME)
    def release(self, ids: tuple[SampleId, ...]) -> Reply[int]:
        """Forget samples that have left."""
        self.store.drop(ids)
        return self._reply(len(self.store))

    @dispatch(Dispatch.SAME)
    def start_profile(self) -> Reply[None]:
        """Record torch's operations until `end_profile`."""
        self._profile = StepProfile(self.device)
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def end_profile(self, snapshot: str) -> Reply[list[ThreadSlice]]:
        """The operations since `start_profile`; a GPU's memory goes to the file `snapshot`."""
        assert self._profile is not None
        profile, self._profile = self._profile, None
        return self._reply(profile.end(Path(snapshot)))

    def _fetch(self, parcels: Sequence[Any], ids: Sequence[SampleId]) -> None:
        """Store those of `ids` that are in `parcels`, where there are any."""
        if parcels:
            with self._span("fetch", len(ids)):
                self._accept(parcels, ids)

    def _accept(self, parcels: Sequence[Any], ids: Sequence[SampleId]) -> None:
        for parcel in self.data_plane.get(list(parcels)):
            self.store.accept(parcel, frozenset(ids))

    def _published(
        self, event: Value, ids: Sequence[SampleId], fields: Sequence[str], with_items: bool = False
    ) -> Published[Value]:
        if not (self.publishes and ids and fields):
            return Published(event)
        return Published(event, self.data_plane.put(self.store.pack(ids, fields, with_items)))

    # -- spans and replies -------------------------------------------------------------------

    @contextmanager
    def _span(self, name: str, num_samples: int | None = None) -> Iterator[None]:
        """Time one piece of a call and log its start; the launcher logs the call's ends.

        `num_samples` is None where it is not about samples. `_name_last_span` can name it anew.
        """
        logger.debug("%s%s", name, "" if num_samples is None else f", samples: {num_samples}")
        mark(name)
        start = time.time()
        try:
            yield
        finally:
            self._spans.append(TimeSpan(name, start, time.time()))

    def _name_last_span(self, name: str) -> None:
        """Give the span that has ended last the name that its work turned out to have."""
        self._spans[-1] = replace(self._spans[-1], name=name)

    def _on_reading(self, reading: MemoryReading) -> None:
        self._memory.append(reading)

    def _reply(self, value: Value) -> Reply[Value]:
        spans, self._spans = tuple(self._spans), []
        memory, self._memory = tuple(self._memory), []
        return Reply(value, spans, memory)


class StepProfile:
    """torch's own record of a step, from its creation to `end`, on all threads of the process."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_gpu]
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=kinds, experimental_config=every_thread)
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        self._profiler.start()

    def end(self, snapshot: Path) -> list[ThreadSlice]:
        """The longest operations by start; on a GPU its allocations go to the file `snapshot`."""
        self._profiler.stop()
        if self._on_gpu:
            snapshot.parent.mkdir(parents=True, exist_ok=True)
            partial = snapshot.with_name(f".{snapshot.name}")
            torch.cuda.memory._dump_snapshot(str(partial))
            partial.replace(snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
        assert self._profiler.profiler is not None
        results = self._profiler.profiler.kineto_results
        assert results is not None
        events = sorted(results.events(), key=lambda event: -event.duration_ns())[:_MAX_SLICES]
        slices = [
            ThreadSlice(
                event.name(),
                event.start_ns() / 1e9,
                event.end_ns() / 1e9,
                thread=f"stream {event.device_resource_id()}"
                if event.device_type() == DeviceType.CUDA
                else f"thread {event.start_thread_id()}",
            )
            for event in events
        ]
        return sorted(slices, key=lambda one: (one.start, -one.end))


def _log_file() -> str:
    """The file that this process's standard error goes to; empty where it goes to none."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""  # a pipe, a terminal
