"""Gradients of parts of an update that is to come: calls to an instance, or to all that train."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridrl.config import TrainerConfig
from hybridrl.driver.async_calls import EventCalls, answers_of
from hybridrl.driver.load_balance import RankWork, deal, update_shares
from hybridrl.driver.sample_moves import Homes, SampleMoves, once
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import TRAINING_POOL, EarlyTrained
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import Sample


@dataclass(frozen=True, slots=True)
class EarlyTraining:
    """Each piece of work ends with one event: each rank has the gradient of its samples."""

    group: WorkerGroup
    moves: SampleMoves
    trainer: TrainerConfig

    def on_instance(
        self, stage: UpdateStage, instance: int, samples: Sequence[Sample]
    ) -> EventCalls:
        """Samples of other instances move there for good."""
        arriving, parcels = yield from self.moves.to_instance(instance, samples)
        members = self.group.instances[instance]
        ranks = [sample.rank for sample in samples]
        shares = update_shares(stage, samples, ranks, members, self.trainer)
        calls = {}
        for rank in members:
            share = replace(shares[rank], parcels=once(parcels[rank]))
            call = self.group.call_train_early(rank, stage, instance, share, arriving[rank])
            calls[call] = rank
        answers = yield from answers_of(calls)
        return [_event(stage, instance, samples, answers)]

    def in_pool(self, stage: UpdateStage, samples: Sequence[Sample], work: RankWork) -> EventCalls:
        """All ranks that train do so on copies, of groups whose samples all live until then."""
        pool, homes = self.group.actor_pool, Homes(samples, self.group)
        while samples := homes.living(samples, whole_groups=True):
            places = deal(samples, len(pool.ranks), stage.samples_per_row, work)
            ranks = [pool.ranks[i] for i in places]
            common = set.intersection(*(sample.tensors for sample in samples))
            with homes.may_die():
                yield from self.moves.copy(samples, ranks, common)
                break
        else:
            return [EarlyTrained(stage.name, TRAINING_POOL, (), 0.0)]
        shares = update_shares(stage, samples, ranks, pool.ranks, self.trainer)
        calls = {}
        for rank in pool.ranks:
            call = self.group.call_train_early(rank, stage, TRAINING_POOL, shares[rank], ())
            calls[call] = rank
        answers = yield from answers_of(calls)
        return [_event(stage, TRAINING_POOL, samples, answers)]


def _event(
    stage: UpdateStage, place: int, samples: Sequence[Sample], answers: Sequence[EarlyTrained]
) -> EarlyTrained:
    seconds = max(answer.seconds for answer in answers)
    return EarlyTrained(stage.name, place, tuple(sample.id for sample in samples), seconds)
