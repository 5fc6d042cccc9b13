"""A rank of an emulated device (`cluster=emulated`): a worker's calls without a model.

It takes and answers the calls of `ActorWorker` and `CriticWorker`. Work takes the seconds of a cost
model: a method says how many, `emulated_ranks.py` lets them pass. Lengths and scalars follow from
seed and identity of a sample.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Any, NamedTuple

from hybridrl.config import Config
from hybridrl.costs.instance import Costs
from hybridrl.costs.memory import PoolSizes
from hybridrl.data import Item
from hybridrl.flow.conversations import ModeledConversation
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Advanced,
    Command,
    Computed,
    EarlyTrained,
    Finished,
    LoadWeights,
    Parked,
    Phase,
    Resume,
    TargetsLoaded,
    TurnEnded,
    generated_tensors,
)
from hybridrl.flow.graph import AnswersStage, Graph, Stage, UpdateStage
from hybridrl.flow.modeled_instance import Advance, ModeledInstance, ModeledRow
from hybridrl.flow.sample import NO_VERSION, SampleId, TokenSpan
from hybridrl.flow.workload import Workload
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.weight_switch import SwitchStats
from hybridrl.system.node_info import NodeInfo, node_name, read_node_info
from hybridrl.workers.answers import (
    ActorDescription,
    EnteredPhase,
    InstanceDescription,
    ModelDescription,
    ProcessDescription,
    RankDescription,
)
from hybridrl.workers.base_worker import Published
from hybridrl.workers.data_plane import DataPlane, with_parked
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.emulation import (
    emulated_conversations,
    emulated_push,
    emulated_train_token_s,
    emulated_workload,
    pass_seconds,
    scaled_costs,
)
from hybridrl.workers.pushed_weights import PushedShare
from hybridrl.workers.roles import Scalars
from hybridrl.workers.training import Training, UpdateShare
from hybridrl.workers.turns import CONVERSATION_TENSORS, SampleTexts

EMULATED = "[emulated]"
"""In place of texts of a model."""


@dataclass(frozen=True, slots=True)
class Task:
    """A method's answer before its time has passed.

    `seconds` gives them from the `tokens` of all ranks that take part together, `value` the answer
    from the seconds. `span` names the work in the trace, where it is shown.
    """

    value: Callable[[float], Any]
    seconds: Callable[[float], float] = lambda tokens: 0.0
    tokens: int = 0
    span: str = ""


def _at_once(value: Any) -> Task:
    return Task(lambda seconds: value)


def _taking(seconds: float, value: Any, span: str) -> Task:
    return Task(lambda _: value, lambda tokens: seconds, 0, span)


class StoredLengths(NamedTuple):
    """What a rank keeps of a sample: tokens of prompt and response."""

    prompt: int
    response: int


LengthsById = dict[SampleId, StoredLengths]


class EmulatedInstance:
    """A generation instance whose ranks are in one process: they share the rows.

    All ranks get the same calls. The first one's call computes, the others' take its outcome.
    Several may be one, which is as wide as they are many (`layout.wide`).
    """

    def __init__(self, ranks: range, width: int = 1) -> None:
        self.ranks, self.width = ranks, width
        self.rows: ModeledInstance | None = None
        self._calls = 0
        self._outcome: Advance | None = None

    def advance(self, run: Callable[[ModeledInstance], Advance]) -> Advance:
        """The outcome of the call that all ranks are in."""
        assert self.rows is not None, "generation before the roles were made"
        if self._calls % len(self.ranks) == 0:
            self._outcome = run(self.rows)
        self._calls += 1
        assert self._outcome is not None
        return self._outcome


class EmulatedWorker:
    """One rank of any pool, with the calls of `ActorWorker` and `CriticWorker`.

    It keeps the lengths of its samples where a worker has their tensors, and puts and gets them
    through the same data plane. A rank's number is that of the run, `pool` its pool's name.
    `instance` is shared with the other ranks of its instance; None outside of the pool that
    generates.
    `wide` are the wide ones that the rank can be in, by their numbers.
    """

    def __init__(
        self,
        rank: int,
        pool: str,
        config: Config,
        data_plane: DataPlane,
        instance: EmulatedInstance | None,
        wide: Mapping[int, EmulatedInstance],
    ) -> None:
        self.wide = wide
        self.rank, self.pool, self.config = rank, pool, config
        self.data_plane, self.instance = data_plane, instance
        self.costs: Costs = scaled_costs(config)
        self._push_costs = emulated_push(config)
        self._train_token_s = emulated_train_token_s(config)
        self.store: LengthsById = {}
        self.publishes = False
        self.version = self.generating_version = 0
        self._generates = False
        self._num_updates = 1  # stages that train, in a step

    # -- life --------------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def listen(self) -> Task:
        """There is no process group."""
        return _at_once(("emulated", 0))

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int, sizes: PoolSizes | None) -> Task:
        """As a rank that is up."""
        process = ProcessDescription(pid=os.getpid(), node=node_name(), log="", peak_flops=1.0)
        layout, actor = self.config.rollout.layout, None
        if self.pool == "actor":
            actor = ActorDescription(
                parameters=0,
                trained_parameters=0,
                attention="emulated",
                device="emulated",
                train_layout=TrainAxes.of(self.config.trainer.layout),
            )
        if self.instance is None:
            return _at_once(RankDescription(process=process, actor=actor))
        instance = InstanceDescription(
            gen_layout={"pp": layout.pp, "tp": layout.tp},
            gen_grouping="emulated",
            instance=self._number,
            peers=list(self.instance.ranks),
            wide={number: list(wide.ranks) for number, wide in self.wide.items()},
        )
        return _at_once(RankDescription(process=process, actor=actor, instance=instance))

    @property
    def _number(self) -> int:
        """The number of the rank's instance."""
        assert self.instance is not None, "generation outside of its pool"
        first = self.config.cluster.pool_ranks[self.config.cluster.home].start
        return (self.instance.ranks.start - first) // len(self.instance.ranks)

    @dispatch(Dispatch.SAME)
    def node_info(self) -> Task:
        """The node that its process runs on."""
        return _at_once(_node_info())

    @dispatch(Dispatch.SAME)
    def begin(
        self,
        graph: Graph,
        training: dict[str, Training],
        publishes: bool,
        weights: tuple[Any, ...] = (),
    ) -> Task:
        """Know a recipe's stages; `training` says which roles would have optimizers."""
        self.publishes = publishes
        updates = [s for s in graph.stages.values() if isinstance(s, UpdateStage)]
        self._num_updates = max(1, len(updates))
        if self.instance is not None and self.instance.rows is None:
            workload = emulated_workload(self.config, graph.group_size)
            for instance in (self.instance, *self.wide.values()):
                instance.rows = instance.rows or self._rows(workload, instance.width)
        models: dict[str, ModelDescription] = {}
        return _at_once(models)

    def _rows(self, workload: Workload, width: int) -> ModeledInstance:
        conversations = emulated_conversations(self.config)

        def converse(id: SampleId) -> ModeledConversation:
            assert conversations is not None
            return conversations.of(id, workload.length_of(id))

        return ModeledInstance(
            self.costs.at_width(width),
            workload.length_of,
            workload.prompt_tokens_of,
            self.config.samples_held,
            self.config.schedule.entry.counts_tokens,
            None if conversations is None else converse,
        )

    @dispatch(Dispatch.SAME)
    def export_weights(self) -> Task:
        """There are none."""
        return _at_once(())

    @dispatch(Dispatch.SAME)
    def finish_records(self) -> Task:
        """No samples are written."""
        return _at_once(None)

    @dispatch(Dispatch.SAME)
    def close(self) -> Task:
        """There is nothing to end."""
        return _at_once(None)

    # -- generation --------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def enter(self, phase: Phase) -> Task:
        """Change phase, in the seconds that a switch takes."""
        self._generates = phase is Phase.GENERATE
        if phase is Phase.TRAIN:
            entered = EnteredPhase(version=self.generating_version)
            return _taking(self.costs.train_switch_s, entered, "to_train")
        self.generating_version = self.version
        seconds = self.costs.switch_s
        switch = SwitchStats(path="emulated", bytes_theory=0, seconds=seconds)
        entered = EnteredPhase(version=self.version, switch=switch)
        return _taking(seconds, entered, "switch")

    @dispatch(Dispatch.SAME)
    def advance(
        self,
        instance: int,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> Task:
        """Obey commands and decode for a bounded number of steps, with the instance's ranks."""
        assert self.instance is not None, "generation outside of its pool"
        load_s = 0.0
        for command in commands:
            if isinstance(command, LoadWeights):
                self.generating_version, load_s = command.version, self._push_costs.load_s
        shared, version = self.wide.get(instance, self.instance), self.generating_version
        place = own_place = self.rank - self.instance.ranks.start
        if shared is not self.instance:  # see `layout.wide`
            assert self.instance.rows is not None
            assert not self.instance.rows.unfinished, "a member decodes samples of its own"
            member = (self.instance.ranks.start - shared.ranks.start) // len(self.instance.ranks)
            place = own_place * shared.width + member

        def run(rows: ModeledInstance) -> Advance:
            fetched = [
                with_parked(c, place, self.data_plane) if isinstance(c, Resume) else c
                for c in commands
            ]
            return rows.advance(fetched, num_decode_steps, version, enough_turns)

        outcome = shared.advance(run)
        mine = self._of_rank(outcome.finished, shared.ranks)
        self.store |= {row.id: StoredLengths(row.prompt, row.num_generated) for row in mine}
        finished = tuple(self._finished(row) for row in mine)
        parked = tuple(self._export_parked(place, event) for event in outcome.parked)
        turns = tuple(
            TurnEnded(row.id, (), EMULATED, "stop", row.num_generated)
            for row in self._of_rank(outcome.turns, shared.ranks)
        )
        assert shared.rows is not None
        unfinished = shared.rows.unfinished
        work = replace(outcome.work, load_seconds=load_s)
        copies = tuple(self._export_parked(place, event) for event in outcome.copies)
        event = Advanced(
            instance, unfinished, finished, parked, work=work, turns=turns, copies=copies
        )
        ids = [f.id for f in finished]
        value = self._published(event, ids, generated_tensors(finished))
        span = outcome.work.name(wide=shared is not self.instance)
        return _taking(load_s + outcome.work.seconds, value, span)

    def _of_rank(self, rows: Sequence[ModeledRow], ranks: range) -> list[ModeledRow]:
        """Each sample's events are of one rank of the instance, as a worker's are."""
        owner = [ranks[(row.id.prompt + row.id.k) % len(ranks)] for row in rows]
        return [row for row, rank in zip(rows, owner, strict=True) if rank == self.rank]

    def _finished(self, row: ModeledRow) -> Finished:
        more = CONVERSATION_TENSORS if self.config.cluster.turns is not None else ()
        return Finished(
            row.id,
            self.rank,
            row.prompt,
            row.num_generated,
            row.finish,
            tuple(row.spans),
            scalars=row.scalars,
            more_tensors=more,
        )

    def _export_parked(self, place: int, event: Parked) -> Parked:
        """With references as a worker has them: by place in the instance, then by sample.

        A row with its cache has one of its own.
        """
        rows: dict[SampleId, tuple[ModeledRow, bool]] = event.state
        alone = any(with_kv for _, with_kv in rows.values())
        if alone:
            references = {id: self.data_plane.put({id: state}) for id, state in rows.items()}
        else:
            references = dict.fromkeys(rows, self.data_plane.put(rows)) if rows else {}
        places = range(place * event.width, (place + 1) * event.width)
        return replace(event, state=dict.fromkeys(places, references))

    @dispatch(Dispatch.SAME)
    def push(self, version: int | None = None) -> Task:
        """The seconds of a push, unless the weights are those of `version`."""
        seconds = 0.0 if version == self.version else self._push_costs.push_s
        return _taking(seconds, PushedShare(self.version, {}, 0, seconds), "push")

    # -- per-sample stages -------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def load_targets(
        self, stage: AnswersStage, ids: tuple[SampleId, ...], items: tuple[Item, ...]
    ) -> Task:
        """The dataset's targets as responses of their own lengths."""
        events = []
        for id, item in zip(ids, items, strict=True):
            target, _ = item.response(stage.column)
            lengths = StoredLengths(len(item.prompt_ids), len(target))
            self.store[id] = lengths
            spans = (TokenSpan(0, lengths.response, NO_VERSION),)
            events.append(Finished(id, self.rank, *lengths, "stop", spans))
        return _at_once(TargetsLoaded(stage.name, tuple(events)))

    @dispatch(Dispatch.SAME)
    def compute(self, stage: Stage, ids: tuple[SampleId, ...]) -> Task:
        """A stage of all ranks of the pool, which share the tokens among the instances."""
        instances = max(1, self.config.ranks_of(self.pool) // self.config.rollout.layout.ranks)
        task = self._pass(stage, ids, None, lambda tokens: tokens / instances)
        if self.instance is not None:
            return task
        published = self._published_later(task, ids)
        self._drop(ids)
        return published

    @dispatch(Dispatch.SAME)
    def infer(
        self,
        stage: Stage,
        instance: int,
        ids: tuple[SampleId, ...],
        arriving: tuple[SampleId, ...],
        parcels: tuple[Any, ...],
    ) -> Task:
        """A forward-only stage of the instance; `ids` are this rank's, some of them `arriving`."""
        self._accept(parcels, arriving)
        return self._published_later(self._pass(stage, ids, instance, lambda n: n), ids)

    def _pass(
        self,
        stage: Stage,
        ids: tuple[SampleId, ...],
        instance: int | None,
        share: Callable[[float], float],
    ) -> Task:
        scalars, tensors = self._outputs(stage, ids)

        def seconds(tokens: float) -> float:
            return pass_seconds(self.costs, stage, share(tokens)) if tokens else 0.0

        def value(seconds: float) -> Computed:
            return Computed(stage.name, ids, scalars, tensors, instance, seconds)

        return Task(value, seconds, self._tokens(ids), stage.name)

    def _published_later(self, task: Task, ids: tuple[SampleId, ...]) -> Task:
        computed: Computed = task.value(0.0)
        reference = self._published(None, ids, computed.tensors).reference
        return replace(task, value=lambda seconds: Published(task.value(seconds), reference))

    @dispatch(Dispatch.SAME, concurrent=True)
    def run_local_stage(
        self, stage: Stage, ids: tuple[SampleId, ...], scalars: tuple[dict[str, Any], ...]
    ) -> Task:
        """A verifier or a `map`: scalars drawn by identity."""
        cost = self.costs.compute(stage.name, self._tokens(ids))
        drawn, tensors = self._outputs(stage, ids)
        return _taking(cost, Computed(stage.name, ids, drawn, tensors, seconds=cost), stage.name)

    def _outputs(self, stage: Stage, ids: Sequence[SampleId]) -> tuple[Scalars, tuple[str, ...]]:
        """Scalars of a stage by field, aligned with `ids`, and the names of its tensors."""
        scalars: Scalars = {
            name: tuple(self._drawn(name, id) for id in ids) for name in stage.scalars
        }
        return scalars, tuple(name for name in stage.outputs if name not in scalars)

    def _drawn(self, name: str, id: SampleId) -> float | str:
        """A scalar of a sample.

        A status is ok. A score is 0 or 1, with a chance of its prompt's own; others are in (0, 1).
        """
        if name.endswith("_status"):
            return "ok"
        seed = self.config.run.seed
        own = uniform(seed, name, *id)
        if name in ("reward", "cost"):
            return float(own < uniform(seed, "chance", name, id.prompt))
        return own

    # -- moving samples ------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def export_samples(
        self, moves: dict[int, tuple[SampleId, ...]], fields: tuple[str, ...] | None, keep: bool
    ) -> Task:
        """Put samples into the data plane; references by receiver."""
        references = {}
        for receiver, ids in moves.items():
            references[receiver] = [self.data_plane.put({id: self.store[id] for id in ids})]
            if not keep:
                self._drop(ids)
        return _taking(0.0, references, "export")

    @dispatch(Dispatch.SAME)
    def fetch(self, parcels: tuple[tuple[Any, tuple[SampleId, ...]], ...]) -> Task:
        """Know copies of samples of other ranks."""
        for reference, ids in parcels:
            self._accept((reference,), ids)
        return _taking(0.0, None, "fetch")

    @dispatch(Dispatch.SAME, concurrent=True)
    def import_samples(self, ids: tuple[SampleId, ...], parcels: tuple[Any, ...]) -> Task:
        """Know samples that other ranks have exported."""
        self._accept(parcels, ids)
        return _taking(0.0, None, "fetch")

    def _accept(self, parcels: Sequence[Any], ids: Sequence[SampleId]) -> None:
        wanted = set(ids)
        for parcel in self.data_plane.get(list(parcels)) if parcels else ():
            self.store |= {id: lengths for id, lengths in parcel.items() if id in wanted}

    def _published(self, event: Any, ids: Sequence[SampleId], fields: Sequence[str]) -> Any:
        if not (self.publishes and ids and fields):
            return Published(event)
        return Published(event, self.data_plane.put({id: self.store[id] for id in ids}))

    # -- training ----------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def train_early(
        self, stage: UpdateStage, instance: int, share: UpdateShare, arriving: tuple[SampleId, ...]
    ) -> Task:
        """A part of an update on one instance, which first changes from generation to training."""
        self._accept(share.parcels, arriving)
        if self.instance is None:  # all ranks that train share the tokens of copies
            in_pool, of_share = self._train_token_s / self._num_updates, self._tokens(share.ids)
            self._drop(share.ids)
            return Task(
                lambda seconds: EarlyTrained(stage.name, instance, share.ids, seconds),
                lambda total: in_pool * total,
                of_share,
                "early backward",
            )
        num_instances = (
            len(self.config.cluster.pool_ranks["actor"]) // self.config.rollout.layout.ranks
        )
        per_token = num_instances * self.costs.train_token_s / self._num_updates
        switch_s = self.costs.train_switch_s if self._generates else 0.0
        self._generates = False

        def value(seconds: float) -> EarlyTrained:
            return EarlyTrained(stage.name, instance, share.ids, seconds - switch_s)

        tokens = self._tokens(share.ids)
        return Task(value, lambda total: switch_s + per_token * total, tokens, "early backward")

    @dispatch(Dispatch.PER_RANK)
    def update(self, stages: tuple[UpdateStage, ...], shares: tuple[UpdateShare, ...]) -> Task:
        """All ranks share the tokens of the batch; several roles of a step share its seconds."""
        ids = tuple(dict.fromkeys(id for share in shares for id in share.ids))
        self._accept(shares[0].parcels, ids)
        metrics = []
        for stage, share in zip(stages, shares, strict=True):
            epochs = stage.epochs or self.config.trainer.epochs
            steps = epochs * len(share.mini_batches)
            if stage.role == "actor":
                self.version += steps
            metrics.append({"loss": 0.0, "bad_steps": 0.0, "optimizer_steps": float(steps)})
        per_token = self._train_token_s / self._num_updates
        tokens = self._tokens(ids)
        if self.instance is None:  # these were copies
            self._drop(ids)
        return Task(lambda _: metrics, lambda total: per_token * total, tokens, "update")

    # -- looking in --------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def texts(self, ids: tuple[SampleId, ...]) -> Task:
        """Texts that say that there are none."""
        texts = {
            id: SampleTexts(EMULATED, f"{EMULATED} {self.store[id].response} tokens") for id in ids
        }
        return _at_once(texts)

    @dispatch(Dispatch.SAME)
    def release(self, ids: tuple[SampleId, ...]) -> Task:
        """Forget samples that have left."""
        self._drop(ids)
        return _at_once(len(self.store))

    def _tokens(self, ids: Sequence[SampleId]) -> int:
        return sum(sum(self.store[id]) for id in ids)

    def _drop(self, ids: Sequence[SampleId]) -> None:
        for id in ids:
            self.store.pop(id, None)


def uniform(*key: object) -> float:
    """A number in (0, 1) that depends on the key alone."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**64


@cache
def _node_info() -> NodeInfo:
    """Read once: many ranks share a process, and reading takes a tenth of a second."""
    return read_node_info()
