"""Updates, and parts of them that begin early: calls to ranks that train."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hybridrl.config import Config
from hybridrl.driver.async_calls import Calling, EventCalls, answers_of
from hybridrl.driver.load_balance import RankWork, assign_ranks, deal, joint_work, update_shares
from hybridrl.driver.rank_failures import InstanceEnded
from hybridrl.driver.rank_pool import Pool
from hybridrl.driver.sample_moves import Homes, SampleMoves, once
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import TRAINING_POOL, Compared, EarlyTrained, UpdateDone, UpdateRefused
from hybridrl.flow.graph import Stage, UpdateStage
from hybridrl.flow.sample import LOSS_MASK, TRAINED, Sample, SampleId
from hybridrl.workers.training import UpdateShare


class TrainingCalls:
    """Pieces of work for `Rounds`; the samples move, or are copied, to the ranks that train them.

    `early` has by update the samples whose gradient is on some rank, or on its way.
    """

    def __init__(
        self,
        group: WorkerGroup,
        moves: SampleMoves,
        config: Config,
        pool_of: Callable[[Stage], Pool],
        work_of: Callable[[Stage], RankWork],
    ) -> None:
        self.group, self.moves, self.config = group, moves, config
        self._pool_of, self._work_of = pool_of, work_of
        self.fields_of_role: dict[str, set[str]] = defaultdict(set)
        """Fields that each role outside of the actor's pool has made; its update may read them."""
        self.early: dict[str, set[SampleId]] = defaultdict(set)

    def train_early(
        self, stage: UpdateStage, instance: int, samples: Sequence[Sample]
    ) -> EventCalls:
        """One event: the gradient is there. The pool that trains passes over groups that died."""
        ids = {sample.id for sample in samples}
        self.early[stage.name] |= ids
        if instance != TRAINING_POOL:
            return [(yield from self._on_instance(stage, instance, samples))]
        event = yield from self._in_pool(stage, samples)
        self.early[stage.name] -= ids - {*event.ids}
        return [event]

    def _on_instance(
        self, stage: UpdateStage, instance: int, samples: Sequence[Sample]
    ) -> Calling[EarlyTrained]:
        """Samples of other instances move there for good."""
        arriving, parcels = yield from self.moves.to_instance(instance, samples)
        members = self.group.instances[instance]
        ranks = [sample.rank for sample in samples]
        shares = update_shares(stage, samples, ranks, members, self.config.trainer)
        shares = {rank: replace(shares[rank], parcels=once(parcels[rank])) for rank in members}
        return (yield from self._begin_early(stage, instance, samples, shares, arriving))

    def _in_pool(self, stage: UpdateStage, samples: Sequence[Sample]) -> Calling[EarlyTrained]:
        """All ranks that train do so on copies, of groups whose samples all live until then."""
        pool, homes = self.group.actor_pool, Homes(samples, self.group)
        while samples := homes.living(samples, whole_groups=True):
            work = self._work_of(stage)
            places = deal(samples, len(pool.ranks), stage.samples_per_row, work)
            ranks = [pool.ranks[i] for i in places]
            common = set.intersection(*(sample.tensors for sample in samples))
            with homes.may_die():
                yield from self.moves.copy(samples, ranks, common)
                break
        else:
            return EarlyTrained(stage.name, TRAINING_POOL, (), 0.0)
        shares = update_shares(stage, samples, ranks, pool.ranks, self.config.trainer)
        arriving: dict[int, list[SampleId]] = {rank: [] for rank in pool.ranks}
        return (yield from self._begin_early(stage, TRAINING_POOL, samples, shares, arriving))

    def _begin_early(
        self,
        stage: UpdateStage,
        place: int,
        samples: Sequence[Sample],
        shares: Mapping[int, UpdateShare],
        arriving: Mapping[int, Sequence[SampleId]],
    ) -> Calling[EarlyTrained]:
        """Each rank computes the gradient of its share, of which some samples are `arriving`."""
        calls = {
            self.group.call_train_early(rank, stage, place, share, arriving[rank]): rank
            for rank, share in shares.items()
        }
        answers = yield from answers_of(calls)
        seconds = max(answer.seconds for answer in answers)
        return EarlyTrained(stage.name, place, tuple(sample.id for sample in samples), seconds)

    def compare(self, stage: UpdateStage, samples: Sequence[Sample]) -> EventCalls:
        """One event: the actor's ranks have compared both engines on copies of samples."""
        ranks = self.group.actor_pool.ranks
        receivers = [ranks[i] for i in deal(samples, len(ranks), work=self._work_of(stage))]
        try:
            fields = set.intersection(*(sample.tensors for sample in samples))
            yield from self.moves.copy(samples, receivers, fields)
        except InstanceEnded:
            return [Compared({})]
        ids: dict[int, list[SampleId]] = {rank: [] for rank in ranks}
        for sample, rank in zip(samples, receivers, strict=True):
            ids[rank].append(sample.id)
        calls = {self.group.call_compare(rank, stage, ids[rank]): rank for rank in ranks}
        answers = yield from answers_of(calls)
        return [Compared(answers[0])]

    def update(self, updates: Sequence[tuple[UpdateStage, Sequence[Sample]]]) -> EventCalls:
        """One event for each stage. A sample of several has one rank, by the work of all roles.

        Where an instance has died before its samples were copied, no rank has begun.
        """
        stages = [stage for stage, _ in updates]
        early = {stage.name: self.early.get(stage.name, set()) for stage in stages}
        batches = []
        for stage, samples in updates:
            done = early[stage.name]
            assert done <= {sample.id for sample in samples}, "trained early, and not of the batch"
            batches.append([sample for sample in samples if sample.id not in done])
        pool, samples_per_row = self._pool_of(stages[0]), stages[0].samples_per_row
        work = joint_work([self._work_of(stage) for stage in stages])
        samples = list({sample.id: sample for batch in batches for sample in batch}.values())
        parcels = dict[int, list[object]]()
        if pool is self.group.home:
            move = self.config.strict
            ranks = assign_ranks(samples, len(pool.ranks), samples_per_row, move, work)
            parcels = yield from self.moves.to_ranks(samples, ranks)
        else:
            places = deal(samples, len(pool.ranks), samples_per_row, work)
            ranks = [pool.ranks[i] for i in places]
            common = set.intersection(*(x.tensors for x in samples)) if samples else set()
            read = {LOSS_MASK, TRAINED}
            for stage in stages:
                read |= {*stage.inputs, *self.fields_of_role[stage.role or ""]}
            if pool is self.group.actor_pool:  # also what the engines' gap is measured by
                read = common
            try:
                yield from self.moves.copy(samples, ranks, common & read)
            except InstanceEnded:
                return [UpdateRefused(stage.name) for stage in stages]
        rank_of = {sample.id: rank for sample, rank in zip(samples, ranks, strict=True)}
        shares: dict[int, list[UpdateShare]] = {rank: [] for rank in pool.ranks}
        for stage, batch in zip(stages, batches, strict=True):
            self.early.pop(stage.name, None)
            ranks = [rank_of[sample.id] for sample in batch]
            of_stage = update_shares(stage, batch, ranks, pool.ranks, self.config.trainer)
            for rank, share in of_stage.items():
                first = () if shares[rank] else once(parcels.get(rank, ()))
                own = replace(share, parcels=first, num_early=len(early[stage.name]))
                shares[rank].append(own)
        filled = [tuple(shares[rank]) for rank in pool.ranks]
        answers = yield from answers_of(self.group.call_update(pool, tuple(stages), filled))
        return [UpdateDone(s.name, metrics) for s, metrics in zip(stages, answers[0], strict=True)]
