"""The ranks as the driver sees them: typed calls, one error for a dead worker."""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate

from hybridrl.config import Config
from hybridrl.costs.memory import PoolSizes
from hybridrl.driver.hang_watch import HangWatch
from hybridrl.driver.rank_failures import InstanceEnded, RankFailures
from hybridrl.driver.rank_pool import Pool
from hybridrl.flow.executor import (
    Advanced,
    Command,
    Computed,
    EarlyTrained,
    Phase,
    TargetsLoaded,
)
from hybridrl.flow.graph import AnswersStage, Graph, Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.preflight.node_crossing import crossing_warnings
from hybridrl.rewards import RewardInput
from hybridrl.runtime.launcher import POLL_S, CallFailed, Launcher
from hybridrl.system import activity
from hybridrl.system.memory import MemoryReading
from hybridrl.system.node_info import NodeInfo
from hybridrl.telemetry.digests import ShardDigest
from hybridrl.telemetry.trace import ThreadSlice, TimeSpan, rank_lane
from hybridrl.workers.actor_shards import ActorShards
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.answers import EnteredPhase, ModelDescription, RankDescription
from hybridrl.workers.base_worker import BaseWorker, Published, Reply
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.pending_samples import PendingRecord
from hybridrl.workers.pushed_weights import PushedShare
from hybridrl.workers.rank_calls import (
    Answer,
    Params,
    RankCalls,
    Reference,
    SharedIds,
    Worker,
)
from hybridrl.workers.sample_worker import SampleWorker
from hybridrl.workers.sample_writer import SampleFacts
from hybridrl.workers.trainer_worker import TrainerWorker
from hybridrl.workers.training import Training, UpdateShare
from hybridrl.workers.turns import SampleTexts
from hybridrl.workers.worker_factory import ClusterWorker, make_worker

if TYPE_CHECKING:
    from hybridrl.checkpoint.distributed import Progress

logger = logging.getLogger(__name__)

OnSpan = Callable[[str, TimeSpan, int], None]
"""Called with the lane of a rank, what it did, and the step of the run that asked for it."""

OnMemory = Callable[[int, MemoryReading], None]


class WorkerGroup:
    """All ranks, in pools: that of the actor first. Samples live in `home`, which generates.

    `call_*` start work and return references; `gather` waits for them. A failure ends every rank at
    once: a rank in a collective would otherwise wait for the dead one without end. But where
    instances have ranks of their own, a failure of one ends its instance (`InstanceEnded`), while
    another lives. What is asked of a whole pool is asked of the ranks that live. `instances`
    lists the ranks of each generation instance, `places` in the order of stage and tp, `wide` those
    of each wide one by its number, known after `setup`.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: Config,
        model_path: str,
        on_span: OnSpan,
        on_memory: OnMemory,
        current_step: Callable[[], int] = lambda: 0,
        serves: bool = False,
    ) -> None:
        """`current_step` is that of the run, to which spans belong.

        With `serves` the ranks' models are those of clients (`workers.serving`).
        """
        self.launcher, self.config = launcher, config
        self.on_span, self.on_memory, self.current_step = on_span, on_memory, current_step
        self.killed = False
        # Those of a run that is resumed are of its ranks.
        shutil.rmtree(Path(config.run.dir) / activity.FOLDER, ignore_errors=True)
        workers = launcher.start(
            ClusterWorker, make_worker, config, model_path, launcher.data_plane, serves
        )
        order = config.cluster.rank_order
        self.all_ranks = launcher.subgroup(workers, order) if order else workers
        self._all = RankCalls(self.all_ranks)
        self._ranks = [
            RankCalls(launcher.subgroup(self.all_ranks, [rank])) for rank in range(self.size)
        ]
        self.pools = {
            name: Pool(ranks, RankCalls(launcher.subgroup(self.all_ranks, ranks)), [name])
            for name, ranks in config.cluster.pool_ranks.items()
        }
        self.home, self.actor_pool = self.pools[config.cluster.home], self.pools["actor"]
        self.failures = RankFailures(self)
        self._first_rank_on: dict[str, int] = {}  # by node
        self.instances: list[list[int]] = []
        self.places: list[list[int]] = []
        self.wide: dict[int, list[int]] = {}
        self.writers: list[int] = []
        """The ranks that train, which write the state to resume from, as of the last one."""
        self.logs = Path(config.run.dir) / "logs"
        self.watch = HangWatch(config.cluster, Path(config.run.dir))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.config.cluster.ranks

    # -- waiting -------------------------------------------------------------------------------

    def value_of(self, rank: int, reference: Reference[Answer], step: int | None = None) -> Answer:
        """The value of a call that has ended; spans and memory go to telemetry.

        `step` began the call, if that is not the present one.
        """
        if rank in self.failures.dead:  # it may have answered before, and nobody wants that
            raise self.failures.ended_with(rank)
        try:
            reply: Reply[Answer] = self.launcher.get(reference)
        except CallFailed as error:
            raise self.failures.of(rank, error) from error
        done = ", ".join(span.name for span in reply.spans)
        logger.debug("rank %d answered%s", rank, f": {done}" if done else "")
        step = self.current_step() if step is None else step
        for span in reply.spans:
            self.on_span(rank_lane(rank, reply.concurrent), span, step)
        for memory in reply.memory:
            self.on_memory(rank, memory)
        return reply.value

    def gather(self, references: Sequence[Reference[Answer]], first: int = 0) -> list[Answer]:
        """Values of one call per rank from `first` on; the first failure is raised at once."""
        pending = {reference: rank for rank, reference in enumerate(references, first)}
        logger.debug("waiting for ranks %d to %d", first, first + len(references) - 1)
        values: dict[int, Answer] = {}
        while pending:
            for reference in self.wait(pending):
                rank = pending.pop(reference)
                values[rank] = self.value_of(rank, reference)
        return [values[rank] for rank in range(first, first + len(references))]

    def wait(
        self, calls: Mapping[Reference[Any], Any], timeout: float = POLL_S
    ) -> list[Reference[Any]]:
        """The ended ones of `calls`, each with its rank; none after `timeout` seconds without any.

        A rank that is stuck is treated as dead (`HangWatch`).
        """
        ended: list[Reference[Any]] = self.launcher.wait(list(calls), timeout)
        if not ended:
            self._end_stuck(calls.values())
        return ended

    def _watched_value(self, rank: int, call: Reference[Answer]) -> Answer:
        """Wait for a call of a rank; raises its failure, and that the rank is stuck."""
        while not self.wait({call: rank}):
            pass
        return self.value_of(rank, call)

    def _end_stuck(self, awaited: Iterable[int]) -> None:
        hang = self.watch.check(self.living(range(self.size)), awaited)
        if hang is None:
            return
        for line in hang.lines:
            logger.warning("%s", line)
        for rank in hang.stuck:
            if rank not in self.failures.dead:
                error = self.failures.of(rank, CallFailed(hang.reason, stuck=True))
                if not isinstance(error, InstanceEnded):
                    raise error

    def kill(self) -> None:
        """End every rank now."""
        self.killed = True
        self.launcher.kill(self.all_ranks)

    def _gather_living(self, calls: Mapping[Reference[Answer], int]) -> list[Answer]:
        """Values of calls, each with its rank, without those of instances that end."""
        values: dict[Reference[Answer], Answer] = {}
        pending = dict(calls)
        while pending:
            for call in self.wait(pending):
                with contextlib.suppress(InstanceEnded):
                    values[call] = self.value_of(pending.pop(call), call)
        return [values[call] for call in calls if call in values]

    def living(self, ranks: Iterable[int]) -> list[int]:
        """These ranks without those of instances that have ended."""
        return [rank for rank in ranks if rank not in self.failures.dead]

    # -- whole group, blocking -----------------------------------------------------------------

    def setup(self, sizes: Mapping[str, PoolSizes] = MappingProxyType({})) -> dict[str, Any]:
        """Process group and weights on every rank; answers with what they are, for the record.

        By the `sizes` of their pool ranks decide what stays on their devices.
        """
        calls: list[Reference[RankDescription]] = []
        for name, pool in self.pools.items():
            (listening,) = self._ranks[pool.ranks[0]].same(BaseWorker.listen)
            ((host, port),) = self.gather([listening], pool.ranks[0])
            calls += pool.calls.same(BaseWorker.setup, host, port, sizes.get(name))
        answers = self.gather(calls)
        processes = [answer.process for answer in answers]
        for rank, process in enumerate(processes):
            logger.info("rank %d is up on %s, pid %d", rank, process.node, process.pid)
        self.failures.locations = [
            (f"{process.node} (pid {process.pid})", self.launcher.log(process.log, self.logs))
            for process in processes
        ]
        for rank in reversed(range(self.size)):
            self._first_rank_on[processes[rank].node] = rank
        described = [answer.instance for answer in answers if answer.instance]
        peers = {instance.instance: instance.peers for instance in described}
        self.places = [ranks for _, ranks in sorted(peers.items())]
        self.instances = [sorted(ranks) for ranks in self.places]
        self.wide = {n: ranks for one in described for n, ranks in sorted(one.wide.items())}
        node_of = [process.node for process in processes]
        instances = [*peers.values()], [*self.wide.values()]
        for line in crossing_warnings(self.config, node_of, self.actor_pool.ranks, *instances):
            logger.warning("%s", line)
        if self.config.rollout.wide_tp is None and not self.wide:
            reason = "there are no instances that the model lets decode as one"
            if len(self.instances) == 1:
                reason = "all ranks are one instance"
            logger.warning("rollout.tail_tp=auto has no effect: %s", reason)
        return answers[self.home.ranks.start].record() | answers[0].record()

    def nodes(self) -> list[NodeInfo]:
        """Every node once, as the first of its ranks sees it."""
        firsts = sorted(self._first_rank_on.values())
        calls = {rank: self._ranks[rank].same(BaseWorker.node_info)[0] for rank in firsts}
        return [self._watched_value(rank, call) for rank, call in calls.items()]

    def begin(
        self, graphs: Mapping[str, Graph], training: Mapping[str, Training], publishes: bool
    ) -> dict[str, ModelDescription]:
        """Make a recipe's roles on the ranks, with fresh optimizers for those of `training`.

        `graphs` is by pool. Answers with a description of each new critic, by name. With
        `publishes` ranks put their results into the data plane at once: others will want them.
        """
        descriptions: dict[str, ModelDescription] = {}
        for name, pool in self.pools.items():
            graph, weights = graphs[name], tuple[Any, ...]()
            used = ["actor"] * (pool is self.actor_pool) + ["reward"] * (pool is self.home)
            used = ["rollout"] if pool is self.home and pool is not self.actor_pool else used
            pool.roles = list(dict.fromkeys([*used, *graph.roles])) or [name]
            trains = {role for role in training if role in graph.learned}
            if pool is self.actor_pool:
                trains |= {"actor"} & training.keys()
            elif pool is not self.home and {*graph.roles} - {*graph.judges}:
                # They may begin as the actor is now.
                weights = self.gather(self.actor_pool.calls.same(ActorShards.export_weights))[0]
            mine = {role: how for role, how in training.items() if role in trains}
            calls = self._same(pool, BaseWorker.begin, graph, mine, publishes, weights)
            descriptions |= self._gather_living(calls)[0]
        return descriptions

    def start_profile(self, ranks: Sequence[int]) -> None:
        """Let these ranks record torch's operations."""
        for rank in self.living(ranks):
            self._gather_living({self._ranks[rank].same(BaseWorker.start_profile)[0]: rank})

    def end_profile(self, ranks: Sequence[int], folder: Path) -> dict[int, list[ThreadSlice]]:
        """The operations by rank; snapshots of GPU memory go to files in `folder`."""
        slices = {}
        for rank in self.living(ranks):
            snapshot = str(folder / f"memory-rank-{rank}.pickle")
            calls = self._ranks[rank].same(BaseWorker.end_profile, snapshot)
            for of_rank in self._gather_living({calls[0]: rank}):
                slices[rank] = of_rank
        return slices

    def save_weights(self, path: str, background: bool = False) -> list[str]:
        """Write the actor as a Hugging Face directory, every critic as one in it.

        Answers with the files beside weights that could not be written, and why. What is written in
        the `background` is there after `finish_save`.
        """
        missing: list[str] = []
        for pool in self.pools.values():  # one after the other: the actor's folder takes its place
            calls = self._same(pool, BaseWorker.save_weights, path, background)
            missing += self._gather_living(calls)[0]
        return missing

    def save_state(self, path: str, background: bool = False) -> "dict[str, Progress]":
        """Write the state that training resumes from; answers with how far each role is.

        In the `background` each of the `writers` leaves a mark in `path` once it has written all.
        """
        progress: dict[str, Progress] = {}
        self.writers = []
        for pool in self.pools.values():
            calls = self._same(pool, BaseWorker.save_state, path, background)
            if of_pool := self._gather_living(calls)[0]:
                progress |= of_pool
                self.writers += pool.ranks
        return progress

    def finish_save(self) -> list[str]:
        """Wait for what is written in the background, and end it; answers as `save_weights`.

        Raises OSError for a write that has failed, once all have ended; the ranks live on.
        """
        missing: list[str] = []
        errors: list[OSError] = []
        for pool in self.pools.values():
            if pool is self.actor_pool or pool is not self.home:  # ranks that train
                answer = self._gather_living(self._same(pool, BaseWorker.finish_save))[0]
                if isinstance(answer, OSError):
                    errors.append(answer)
                else:
                    missing += answer
        if errors:
            raise errors[0]
        return missing

    def load(self, path: str, progress: "Mapping[str, Progress]") -> str:
        """Have every rank load `path`; answers with the error, if any."""
        wrong: list[str] = []
        for pool in self.pools.values():
            wrong += self._gather_living(self._same(pool, BaseWorker.load, path, dict(progress)))
        return next(filter(None, wrong), "")

    def load_weights(self, path: str) -> None:
        """Have the actor take the weights of another checkpoint of its model."""
        if self.home is self.actor_pool:
            self.gather(self.home.calls.same(ActorWorker.enter, Phase.TRAIN))
        self.gather(self.actor_pool.calls.same(ActorShards.load_weights, path))

    def save_pushed(self, path: str, by_version: Mapping[int, Sequence[PushedShare]]) -> None:
        """Have the actor's ranks write what they have pushed of these versions."""
        for rank in self.actor_pool.ranks:
            shares = {version: shares[rank] for version, shares in by_version.items()}
            self.gather(self._ranks[rank].same(TrainerWorker.save_pushed, path, shares), rank)

    def load_pushed(self, path: str) -> dict[int, list[PushedShare]]:
        """Have them put it back into the data plane; answers with the shares by version."""
        answers = self.gather(self.actor_pool.calls.same(TrainerWorker.load_pushed, path))
        return {version: [shares[version] for shares in answers] for version in answers[0]}

    def save_pending(
        self, path: str, shares: Mapping[int, tuple[PendingRecord, ...]]
    ) -> set[SampleId]:
        """Have ranks where samples live write their shares of the pending samples.

        Answers with those that they could not fetch, since instances that ended had them. Raises
        `InstanceEnded`.
        """
        calls = {
            rank: self._ranks[rank].per_rank(SampleWorker.save_pending, [path], [share])[0]
            for rank, share in shares.items()
        }
        answers = [self._watched_value(rank, call) for rank, call in calls.items()]
        return {id for lost in answers for id in lost}

    def load_pending(self, path: str, shares: Mapping[int, tuple[PendingRecord, ...]]) -> list[Any]:
        """Have them take up their shares; a reference to the parked ones of each, or None."""
        paths = [path] * len(shares)
        calls = self.home.calls.per_rank(SampleWorker.load_pending, paths, [*shares.values()])
        return self.gather(calls, self.home.ranks.start)

    def finish_records(self) -> None:
        """Wait until the ranks have written the samples of all steps; raises OSError."""
        self._gather_living(self._same(self.home, SampleWorker.finish_records))

    def save_tensors(self, folder: str, by_rank: Mapping[int, Iterable[SampleId]]) -> None:
        """Write all tensors of samples, each rank into a separate file."""
        calls = {
            rank: self._ranks[rank].same(SampleWorker.save_tensors, folder, tuple(ids))[0]
            for rank, ids in by_rank.items()
        }
        for rank, call in calls.items():
            self._watched_value(rank, call)

    def close(self) -> None:
        """End child processes and the ranks."""
        for pool in self.pools.values():
            self._gather_living(self._same(pool, BaseWorker.close))
        shutil.rmtree(Path(self.config.run.dir) / activity.FOLDER, ignore_errors=True)
        self.kill()

    # -- one rank, not blocking ----------------------------------------------------------------

    def call_advance(
        self, instance: int, commands: Sequence[Command], steps: int, enough_turns: int
    ) -> dict[Reference[Published[Advanced]], int]:
        """Start a bounded generation call on every rank of an instance; references and ranks."""
        advance, sent = SampleWorker.advance, list(commands)
        return {
            self._ranks[rank].same(advance, instance, sent, steps, enough_turns)[0]: rank
            for rank in self.wide.get(instance) or self.instances[instance]
        }

    def call_load(
        self, instance: int, commands: Sequence[Sequence[Command]], steps: int, enough_turns: int
    ) -> dict[Reference[Published[Advanced]], int]:
        """As `call_advance`, with the commands of each place of the instance (`places`)."""
        advance, limits = SampleWorker.advance, (steps, enough_turns)
        return {
            self._ranks[rank].same(advance, instance, own, *limits)[0]: rank
            for rank, own in zip(self.places[instance], commands, strict=True)
        }

    def call_push(self, version: int | None) -> dict[Reference[PushedShare], int]:
        """Have the actor's ranks push their weights, unless they are those of `version`."""
        return _by_rank(self.actor_pool, self.actor_pool.calls.same(TrainerWorker.push, version))

    def call_load_targets(
        self, rank: int, stage: AnswersStage, ids: tuple[SampleId, ...], items: tuple[Any, ...]
    ) -> Reference[TargetsLoaded]:
        """Start making samples of the dataset's targets on one rank."""
        return self._ranks[rank].same(SampleWorker.load_targets, stage, ids, items)[0]

    def call_load_tensors(
        self, rank: int, folder: str, share: Mapping[SampleId, tuple[int, Any]]
    ) -> Reference[None]:
        """Start loading samples that `save_tensors` wrote on one rank."""
        return self._ranks[rank].same(SampleWorker.load_tensors, folder, dict(share))[0]

    def call_compute(self, rank: int, stage: Stage, ids: Sequence[SampleId]) -> Reference[Computed]:
        """Start a stage that all ranks where samples live take part in on one of them."""
        return self._ranks[rank].same(ActorWorker.compute, stage, tuple(ids))[0]

    def call_compute_together(
        self, rank: int, stages: Sequence[Stage], ids: Sequence[SampleId]
    ) -> Reference[list[Computed]]:
        """Start stages of several trained roles as one, on one of the ranks where samples live."""
        call = self._ranks[rank].same
        return call(ActorWorker.compute_together, tuple(stages), tuple(ids))[0]

    def call_compute_copies(
        self, rank: int, stage: Stage, ids: Sequence[SampleId]
    ) -> Reference[Published[Computed]]:
        """Start a stage on one rank of another pool, which has copies of its samples."""
        return self._ranks[rank].same(CriticWorker.compute, stage, tuple(ids))[0]

    def call_compare(
        self, rank: int, stage: UpdateStage, ids: Sequence[SampleId]
    ) -> Reference[dict[str, float]]:
        """Compare the engines on copies of samples; all ranks of the actor's pool are called."""
        return self._ranks[rank].same(TrainerWorker.compare, stage, tuple(ids))[0]

    def call_local_stage(
        self, rank: int, stage: Stage, ids: tuple[SampleId, ...], scalars: tuple[Any, ...]
    ) -> Reference[Computed]:
        """Start a verifier or a `map` on one rank, concurrently with its other work."""
        return self._ranks[rank].same(SampleWorker.run_local_stage, stage, ids, scalars)[0]

    def call_reward_inputs(
        self, rank: int, ids: Sequence[SampleId]
    ) -> Reference[tuple[RewardInput, ...]]:
        """Ask one rank what a judge sees of its samples, concurrently with its other work."""
        return self._ranks[rank].same(SampleWorker.reward_inputs, tuple(ids))[0]

    def call_export_samples(
        self,
        rank: int,
        moves: Mapping[int, Sequence[SampleId]],
        fields: Sequence[str] | None,
        keep: bool,
    ) -> Reference[dict[int, list[Any]]]:
        """Have one rank's samples put into the data plane; references by receiver."""
        by_receiver = {receiver: tuple(ids) for receiver, ids in moves.items()}
        wanted = None if fields is None else tuple(fields)
        return self._ranks[rank].same(SampleWorker.export_samples, by_receiver, wanted, keep)[0]

    def call_import_samples(
        self, rank: int, ids: Sequence[SampleId], parcels: Sequence[Any]
    ) -> Reference[None]:
        """Have one rank store others' results for its samples, concurrently with its other work."""
        return self._ranks[rank].same(SampleWorker.import_samples, tuple(ids), tuple(parcels))[0]

    def call_fetch(
        self, rank: int, parcels: Sequence[tuple[Any, tuple[SampleId, ...]]]
    ) -> Reference[None]:
        """Have a rank of another pool take copies of samples, which its next call reads."""
        return self._ranks[rank].same(BaseWorker.fetch, tuple(parcels))[0]

    def call_infer(
        self,
        rank: int,
        stage: Stage,
        instance: int,
        ids: Sequence[SampleId],
        arriving: Sequence[SampleId],
        parcels: Sequence[Any],
    ) -> Reference[Published[Computed]]:
        """Start a forward-only stage on one rank of an instance; all of its ranks are called."""
        sent = tuple(ids), tuple(arriving), tuple(parcels)
        return self._ranks[rank].same(ActorWorker.infer, stage, instance, *sent)[0]

    def call_train_early(
        self,
        rank: int,
        stage: UpdateStage,
        instance: int,
        share: UpdateShare,
        arriving: Sequence[SampleId],
    ) -> Reference[EarlyTrained]:
        """Start a part of an update on one rank of an instance; all of its ranks are called."""
        call = self._ranks[rank].same
        return call(ActorWorker.train_early, stage, instance, share, tuple(arriving))[0]

    # -- many ranks, not blocking --------------------------------------------------------------

    def call_enter(
        self, instances: Sequence[int], phase: Phase
    ) -> dict[Reference[EnteredPhase], int]:
        """Start a change of phase on every rank of these instances."""
        ranks = sorted(rank for instance in instances for rank in self.instances[instance])
        return {self._ranks[rank].same(ActorWorker.enter, phase)[0]: rank for rank in ranks}

    def call_update(
        self, pool: Pool, stages: tuple[UpdateStage, ...], shares: list[tuple[UpdateShare, ...]]
    ) -> dict[Reference[list[dict[str, float]]], int]:
        """Start a pass over the mini-batches of one update, or of several together.

        The metrics of each, but for `mfu`, are equal on all ranks.
        """
        calls = pool.calls.per_rank(BaseWorker.update, [stages] * len(shares), shares)
        return _by_rank(pool, calls)

    def call_record_samples(
        self, step: int, phase: str, by_rank: Mapping[int, Iterable[SampleFacts]]
    ) -> dict[Reference[None], int]:
        """Start to have the ranks that hold samples write them to files."""
        record = SampleWorker.record_samples
        return {
            self._ranks[rank].same(record, step, phase, tuple(by_rank[rank]))[0]: rank
            for rank in self.living(by_rank)
        }

    def call_texts(
        self, by_rank: Mapping[int, Iterable[SampleId]]
    ) -> dict[Reference[dict[SampleId, SampleTexts]], int]:
        """Ask ranks for prompts, responses and turns of samples that they hold."""
        texts = SampleWorker.texts
        living = self.living(by_rank)
        return {self._ranks[rank].same(texts, tuple(by_rank[rank]))[0]: rank for rank in living}

    def call_digest_samples(
        self, by_rank: Mapping[int, Iterable[SampleId]]
    ) -> dict[Reference[dict[SampleId, dict[str, ShardDigest]]], int]:
        """Ask ranks for digests of all tensors of samples that they hold."""
        digests = SampleWorker.digest_samples
        living = self.living(by_rank)
        return {self._ranks[rank].same(digests, tuple(by_rank[rank]))[0]: rank for rank in living}

    def call_digest_weights(self) -> dict[Reference[dict[str, dict[str, ShardDigest]]], int]:
        """Ask ranks that train for digests of their shards of weights, by role and parameter."""
        calls: dict[Reference[dict[str, dict[str, ShardDigest]]], int] = {}
        for pool in self.pools.values():
            if pool is self.home and pool is not self.actor_pool:
                continue
            calls |= self._same(pool, BaseWorker.digest_weights)
        return calls

    def call_release(self, ids: tuple[SampleId, ...]) -> dict[Reference[int], int]:
        """Start to have every rank forget samples."""
        calls: dict[Reference[int], int] = {}
        for pool in self.pools.values():
            calls |= self._same(pool, BaseWorker.release, SharedIds(ids))
        return calls

    def _same(
        self,
        pool: Pool,
        method: Callable[Concatenate[Worker, Params], Reply[Answer]],
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> dict[Reference[Answer], int]:
        """Start a method of all ranks of a pool that live; references and ranks."""
        if self.failures.dead.isdisjoint(pool.ranks):
            return _by_rank(pool, pool.calls.same(method, *args, **kwargs))
        living = self.living(pool.ranks)
        return {self._ranks[rank].same(method, *args, **kwargs)[0]: rank for rank in living}


def _by_rank(pool: Pool, references: Sequence[Reference[Answer]]) -> dict[Reference[Answer], int]:
    return dict(zip(references, pool.ranks, strict=True))
