"""What a rank is: one process that hosts every colocated role, its samples and its phases."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from hybridrl.checkpoint.hf import save_hf
from hybridrl.config import Config
from hybridrl.data import Item
from hybridrl.flow.executor import Advanced, Command, Computed, Finished, Phase, Placed, Resume
from hybridrl.flow.graph import Graph, Stage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.actor import Actor, ParkedSample, grown
from hybridrl.workers.build import RoleBuilder
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.machine import look_around
from hybridrl.workers.meeting import meeting_place
from hybridrl.workers.memory import Memory, measure_memory
from hybridrl.workers.roles import Role, run_map
from hybridrl.workers.scorers import InstanceScorer, ReferenceScorer
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.training import Training, UpdateShare
from hybridrl.workers.value_model import ValueModel


@dataclass(frozen=True, slots=True)
class Span:
    """What this rank did between two moments (Unix seconds); `beside` the rest."""

    name: str
    start: float
    stop: float
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """A method's value, what the rank did meanwhile, and what it held at changes of phase."""

    value: Any
    spans: tuple[Span, ...]
    memory: tuple[Memory, ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """An event, and a reference to the tensors that its samples got, for whom they move to.

    So a move need not wait for this rank, which may be decoding. None where nothing is published.
    """

    event: Any
    reference: Any = None


class Holder(Protocol):
    """What may have weights on the device."""

    def onload(self) -> None:
        """Bring them there."""
        ...

    def offload(self) -> None:
        """Free the device of them."""
        ...


class RankWorker:
    """One rank of the colocated pool.

    States: made -> `setup` (process group, weights) -> `begin` (a recipe's roles) -> phases, any
    number of times. Samples stay in `store` from the call that made them until `release`.

    In GENERATE the rollout engine holds the actor's newest weights. Beside it, and in TRAIN, at
    most one role has its weights on the device, with its optimizer if it is trained: the one that
    computed last (`holder`).

    Within GENERATE an instance goes its own way: it decodes; when it holds no sample it may give up
    its KV cache and take up a forward-only role's weights (`infer`); and it may decode again. No
    call needs another instance.
    """

    def __init__(
        self, rank: int, world_size: int, config: Config, model_path: str, data_plane: DataPlane
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.config, self.model_path, self.data_plane = config, model_path, data_plane
        self.store = SampleStore()
        self.roles: dict[str, Role] = {}
        self.trained: dict[str, Actor | ValueModel] = {}
        self.scorers: dict[str, InstanceScorer] = {}
        self.holder: Holder | None = None
        self.publishes = False
        self._store: Any = None
        self._spans: list[Span] = []
        self._memory: list[Memory] = []

    # -- life --------------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def listen(self) -> Reply:
        """Let the others of the process group meet here; answers with host and port.

        The port is free and stays this process's own: one that is looked up first and bound later
        may be another job's by then.
        """
        host = os.environ["MASTER_ADDR"]
        self._store = meeting_place(host, 0, listens=True)
        return self._reply((host, self._store.port))

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int) -> Reply:
        """Join the process group, whose first rank listens on `port` of `host`; load the actor.

        Answers with what is worth logging.
        """
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(self.config.cluster.threads_per_rank)
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=self._store or meeting_place(host, port, listens=False),
            rank=self.rank,
            world_size=self.world_size,
        )
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        with self._span("load"):
            actor = Actor(self.config, self.model_path, self.tokenizer, self.store, device)
            place = (self.model_path, self.tokenizer, self.store)
            self.actor, self.build = actor, RoleBuilder(self.config, *place, actor)
            self.trained["actor"] = actor
            if old_policy := self.build.old_policy():
                self.scorers["actor"] = old_policy
            for name in self.config.judges_of("reward"):  # of evaluation, whatever the recipe has
                self._add_judge(name)
        return self._reply(
            {
                "pid": os.getpid(),
                "node": os.environ.get("SLURMD_NODENAME", os.uname().nodename),
                "log": _log_file(),
                **self.actor.describe(),
            }
        )

    @dispatch(Dispatch.SAME)
    def machine(self) -> Reply:
        """What this rank runs on."""
        return self._reply(look_around())

    @dispatch(Dispatch.SAME)
    def begin(self, graph: Graph, training: dict[str, Training], publishes: bool) -> Reply:
        """Make the roles that a recipe needs; those of `training` start with a fresh optimizer.

        A frozen copy, and a value model without a path of its own, has the actor's weights of this
        moment. With `publishes` a rank puts what it makes into the data plane at once, since
        samples may move. Answers with what is worth logging, by value model.
        """
        self.publishes = publishes
        self._take_up(None)
        made = {}
        with self._span("load"):
            for name in graph.learned:
                if name not in self.trained:
                    self.trained[name] = model = self.build.value_model(name)
                    made[name] = model.describe()
            for name in graph.judges:
                self._add_judge(name)
            for name in graph.roles:
                if name not in {**self.trained, **self.roles, **self.scorers}:
                    self.scorers[name] = self.build.scorer(name, graph)
        for name, how in training.items():
            self.trained[name].train_engine.reset_optimizer(how.optim, how.total_updates)
        return self._reply(made)

    def _add_judge(self, name: str) -> None:
        if name in self.roles or name in self.scorers:
            return
        if self.build.is_neural(name):
            self.scorers[name] = self.build.neural_judge(name)
        else:
            self.roles[name] = self.build.verifier(name)

    @dispatch(Dispatch.SAME)
    def close(self) -> Reply:
        """End child processes and leave the process group."""
        self.actor.close()
        for role in self.roles.values():
            role.close()
        if dist.is_initialized():  # vLLM ends it with itself
            dist.destroy_process_group()
        return self._reply(None)

    # -- generation --------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def enter(self, phase: Phase) -> Reply:
        """Change phase; into GENERATE this is the weight switch. Answers with its accounting."""
        with self._span("switch" if phase is Phase.GENERATE else "to_train"):
            switches = phase is Phase.GENERATE and self.actor.phase is Phase.TRAIN
            if switches:
                self._refresh()
            self._take_up(self.actor.train_engine if switches else None)
            with self._measured():
                report = self.actor.enter(phase)
            self.holder = None  # the switch has sent the actor's shards away
        return self._reply(report)

    @dispatch(Dispatch.SAME)
    def advance(self, instance: int, commands: Sequence[Command], num_decode_steps: int) -> Reply:
        """Take commands and decode for a bounded number of steps.

        What is parked goes into the data plane, each rank's part under its place in the instance,
        and comes out of it where it resumes.
        """
        self._take_up(None)
        start = time.perf_counter()
        commands = [self._arrived(c) if isinstance(c, Resume) else c for c in commands]
        fetch_s = time.perf_counter() - start
        with self._span("generate"):
            finished, parked, work = self.actor.advance(commands, num_decode_steps)
        start = time.perf_counter()
        sent = [replace(event, state=self._departing(event.state)) for event in parked]
        put_s = time.perf_counter() - start
        kv_tokens = work.kv_tokens + sum(kv_tokens_of(c) for c in commands)
        if kv_tokens:
            kv_seconds = work.kv_seconds + fetch_s + put_s
            seconds = work.seconds + fetch_s + put_s
            work = replace(work, seconds=seconds, kv_tokens=kv_tokens, kv_seconds=kv_seconds)
        value = Advanced(instance, self.actor.unfinished, tuple(finished), tuple(sent), work=work)
        made = [event.id for event in finished]
        return self._reply(self._published(value, made, ("tokens", "log_probs"), with_items=True))

    def _published(
        self, event: Any, ids: Sequence[SampleId], fields: Sequence[str], with_items: bool = False
    ) -> Published:
        if not (self.publishes and ids and fields):
            return Published(event)
        return Published(event, self.data_plane.put(self.store.pack(ids, fields, with_items)))

    def _departing(self, samples: dict[SampleId, ParkedSample]) -> dict[int, dict[SampleId, Any]]:
        """References by place and sample: one each where keys and values go along."""
        place = self.actor.parallel.place
        if any(sample.request.kv is not None for sample in samples.values()):
            return {place: {id: self.data_plane.put({id: s}) for id, s in samples.items()}}
        return {place: dict.fromkeys(samples, self.data_plane.put(samples)) if samples else {}}

    def _arrived(self, command: Resume) -> Resume:
        """With the parked samples themselves in place of their references."""
        of_place = command.parked.state[self.actor.parallel.place]
        references = [of_place[sample] for sample in command.ids]
        wanted = {id(reference): reference for reference in references}
        with self._span("fetch"):
            found = self.data_plane.get(list(wanted.values()))
        state = {key: sample for part in found for key, sample in part.items()}
        return replace(command, parked=replace(command.parked, state=state))

    # -- per-sample stages -------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def place(self, stage: Stage, ids: tuple[SampleId, ...], items: tuple[Item, ...]) -> Reply:
        """Make the dataset's targets the responses of new samples (supervised training)."""
        column = stage.options["column"]
        placed = []
        for id, item in zip(ids, items, strict=True):
            target = item.target_ids if column is None else item.columns[column]
            tokens = torch.tensor([*item.prompt_ids, *target])
            num_prompt, num_target = len(item.prompt_ids), len(target)
            self.store.add(id, StoredSample(num_target, item, {"tokens": tokens}))
            spans = grown((), num_target, -1)
            placed.append(Finished(id, self.rank, num_prompt, num_target, "stop", spans))
        return self._reply(Placed(stage.name, tuple(placed)))

    @dispatch(Dispatch.SAME)
    def compute(
        self, stage: Stage, ids: tuple[SampleId, ...], scalars: tuple[dict[str, Any], ...]
    ) -> Reply:
        """Run a stage that all ranks take part in on the samples that live here."""
        assert stage.role is not None
        start = time.perf_counter()
        with self._span(stage.name):
            role = self.trained[stage.role]
            self._take_up(role.train_engine)
            made, tensors = role.compute(stage, ids)
        seconds = time.perf_counter() - start
        return self._reply(Computed(stage.name, ids, made, tensors, seconds=seconds))

    @dispatch(Dispatch.SAME, beside=True)
    def judge(
        self, stage: Stage, ids: tuple[SampleId, ...], scalars: tuple[dict[str, Any], ...]
    ) -> Reply:
        """Run a verifier or a `map` on samples that live here, beside what else the rank does.

        `scalars` are the driver's fields.
        """
        start = time.time()
        if stage.method == "map":
            made, tensors = run_map(stage, self.store, ids, scalars)
        else:
            assert stage.role is not None
            made, tensors = self.roles[stage.role].compute(stage, ids)
        stop = time.time()
        value = Computed(stage.name, ids, made, tensors, seconds=stop - start)
        return Reply(value, (Span(stage.name, start, stop, beside=True),))

    @dispatch(Dispatch.SAME)
    def send(self, moves: dict[int, tuple[SampleId, ...]]) -> Reply:
        """Put whole samples into the data plane for other ranks: references for each."""
        with self._span("export"):
            sent = {
                rank: [self.data_plane.put(parcel) for parcel in self.store.take_whole(ids)]
                for rank, ids in moves.items()
            }
        return self._reply(sent)

    @dispatch(Dispatch.SAME)
    def infer(
        self,
        stage: Stage,
        instance: int,
        ids: tuple[SampleId, ...],
        arriving: tuple[SampleId, ...],
        parcels: tuple[Any, ...],
    ) -> Reply:
        """Run a forward-only stage with the other ranks of the instance; `ids` are this rank's.

        Those of them that are `arriving` from other instances are, among others, in `parcels`.
        """
        if parcels:
            with self._span("fetch"):
                for parcel in self.data_plane.get(list(parcels)):
                    self.store.accept(parcel, frozenset(arriving))
        assert stage.role is not None
        start = time.perf_counter()
        with self._span(stage.name):
            self.actor.leave_generation()
            self._take_up(self.scorers[stage.role])
            made, tensors = self.scorers[stage.role].compute(stage, ids)
        seconds = time.perf_counter() - start
        value = Computed(stage.name, ids, made, tensors, instance, seconds)
        return self._reply(self._published(value, ids, tensors))

    def _refresh(self) -> None:
        """Give scorers whose weights are averages what these have become. Collective."""
        for name, average in self.actor.averages.items():
            if average.moved:
                scorer = self.scorers[name]
                assert isinstance(scorer, ReferenceScorer)
                self._take_up(scorer)
                dtype = self.config.model.compute_dtype
                self.actor.copy_weights(scorer.parameters(), dtype, average.shards)
                average.moved = False

    def _take_up(self, holder: Holder | None) -> None:
        """Have one role's weights in place, or none beside the rollout engine's."""
        if holder is self.holder:
            return
        with self._measured():
            if self.holder is not None:
                self.holder.offload()
            if holder is not None:
                holder.onload()
            self.holder = holder

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
        assert stage.role is not None
        with self._span("update"):
            role = self.trained[stage.role]
            self._take_up(role.train_engine)
            metrics = role.update(stage, share)
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
        """Write the actor as a Hugging Face directory; other trained roles, by name, as one in it.

        Rank 0 writes, all ranks gather.
        """
        with self._span("save"):
            dtype = self.config.model.compute_dtype
            for name, role in self.trained.items():
                folder = Path(path) if name == "actor" else Path(path) / name
                save_hf(role.train_engine, folder, self.tokenizer, dtype)
        return self._reply(path)

    # -- spans and memory --------------------------------------------------------------------

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.time()))

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Note what the rank holds before and after a change of phase."""
        self._memory.append(measure_memory(self.actor.device))
        yield
        self._memory.append(measure_memory(self.actor.device))

    def _reply(self, value: Any) -> Reply:
        spans, self._spans = tuple(self._spans), []
        memory, self._memory = tuple(self._memory), []
        return Reply(value, spans, memory)


def kv_tokens_of(command: Command) -> int:
    """Tokens whose keys and values come with a command."""
    if not isinstance(command, Resume):
        return 0
    requests = [command.parked.state[sample].request for sample in command.ids]
    return sum(len(r.prompt_ids) + len(r.response_ids) for r in requests if r.kv is not None)


def _log_file() -> str:
    """The file that this process's standard error goes to; empty where that is not known."""
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
