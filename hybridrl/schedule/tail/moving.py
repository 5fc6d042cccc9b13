"""The tail of RLHFuse: the last samples migrate, and the freed instances score or train.

Inter-stage fusion (arXiv 2409.13221, section 4); wide instances: PAT (2605.23945).
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

from hybridrl.flow.executor import EarlyTrained, Parked, Resume
from hybridrl.flow.migration import MigrationPlan, gather
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.turns import OpenTurns
from hybridrl.schedule import StageSpan
from hybridrl.schedule.instances import Instance, Instances, InstanceStatus
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.tail import NoTail
from hybridrl.schedule.tail.early import StillDecoding, StreamedUpdate

logger = logging.getLogger(__name__)

_LEAVING, _TRAINING = InstanceStatus.LEAVING, InstanceStatus.TRAINING


class MovingTail(NoTail):
    """Moves the last samples of a round together, and lets the freed instances train.

    Migration: when at most `plan.threshold` samples are left, `gather` names the instances that
    keep theirs. The others are LEAVING: the next call parks their samples, and each parked sample
    resumes on the keeper with the most room. This happens once in a round, as the threshold's model
    assumes. A denser tail would be slower, and the instances that it frees would have nothing left
    to do.

    With a plan of a `width` above 1 the samples go to wide instances (`Instance`), from their
    members too. An instance that trains, or has died, cannot join; one that runs a pass joins after
    it.

    With `early` an instance without samples, and without passes to run, trains on groups that are
    whole (`StreamedUpdate`). Then it is given no sample any more. `converses` says whether samples
    have turns, so that what is left to decode follows from their waits, too.

    Example, threshold 4, instances A to D with 2, 1, 1, 0 samples left and room for 3: A and B
    keep. When C's call returns it parks c, whose tokens go to B. C and D run the forward passes of
    finished samples, their own first, then those of A and B.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        max_held: int,
        instances: Instances,
        stages: StreamedStages,
        turns: OpenTurns,
        early: StreamedUpdate | None = None,
        converses: bool = False,
    ) -> None:
        self.plan, self.max_held, self.width = plan, max_held, plan.width
        self.instances, self.stages, self.turns = instances, stages, turns
        self.early, self.converses = early, converses
        self.executor = stages.executor
        self._gathered = False  # the migration has begun

    @property
    def num_trained(self) -> int:  # type: ignore[override]
        """Samples whose gradient is there."""
        return 0 if self.early is None else self.early.num_trained

    @property
    def train_seconds(self) -> float:  # type: ignore[override]
        """Seconds that instances have trained early."""
        return 0.0 if self.early is None else self.early.seconds

    @property
    def spans(self) -> list[StageSpan]:  # type: ignore[override]
        """From the first start of the early backward to its last end."""
        return [] if self.early is None else self.early.spans

    # -- migration -----------------------------------------------------------------------------

    def gather(self, is_queue_empty: bool) -> None:
        """Begin the migration when few samples are left and some instance can be freed."""
        if self._gathered:
            self._dissolve_empty()
            return
        held = {i.number: len(i.held) for i in self.instances if i.held}
        waits = not is_queue_empty or self.turns.put_by or any(i.inbox for i in self.instances)
        if waits or sum(held.values()) > self.plan.threshold:
            return
        most = min(self.max_held, self.plan.cap)
        if self.width > 1:
            self._widen(held, most)
            return
        keepers = gather(held, most)
        if len(keepers) < len(held):
            self._gathered = True
            for number in held:
                self.instances[number].keeps = number in keepers
            leaving = held.keys() - keepers
            for number in leaving:
                self.instances[number].become(_LEAVING)
            num = sum(held[number] for number in leaving)
            names = sorted(leaving), sorted(keepers)
            logger.debug("migration of %d samples from instances %s to %s", num, *names)

    def _widen(self, held: Mapping[int, int], most: int) -> None:
        """Have wide instances take all samples, if there are any to be formed."""
        able = [i.number for i in self.instances.alive if i.status is not _TRAINING]
        table = self.executor.wide
        if not held or not (chosen := choose_wide(table, self.width, held, able, most)):
            return
        self._gathered = True
        progress = max(self.instances[number].progress for number in held)
        for number in held:
            self.instances[number].become(_LEAVING)
        for wide in chosen:
            wide.keeps, wide.progress = True, progress
            self.instances.add(wide)
            for member in wide.members:
                self.instances[member].join(wide.number)
        members = {wide.number: wide.members for wide in chosen}
        logger.debug("%d samples go to wide instances %s", sum(held.values()), members)

    def _dissolve_empty(self) -> None:
        """Wide instances without samples are none any more, unless samples are on their way."""
        wide = self.instances.wide
        if wide and not self.instances.migrating:
            for instance in wide:
                if not instance.held:
                    self._dissolve(instance)

    def _dissolve(self, wide: Instance) -> None:
        """Its members are instances of their own again."""
        self.instances.remove(wide)
        for member in wide.members:
            self.instances[member].join(None)

    def arrive(self, source: Instance, parked: Parked) -> Sequence[SampleId]:
        """Resume samples on the instances that keep theirs; gives those without a place."""
        keepers = [i for i in self.instances if i.keeps]
        arriving: dict[int, list[SampleId]] = defaultdict(list)
        left: list[SampleId] = []
        for id in parked.ids:
            room = [i for i in keepers if len(i.held) < self.max_held]
            if room:
                keeper = min(room, key=lambda i: (len(i.held), i.number))
                keeper.hold(id)
                arriving[keeper.number].append(id)
                self.num_migrated += source.joins != keeper.number
                self.num_widened += keeper.width > 1
            else:  # a keeper has died
                self.num_migrated += parked.width == 1
                left.append(id)
        for number, ids in arriving.items():
            self.instances[number].inbox.append(Resume(tuple(ids), parked))
        return left

    # -- training ------------------------------------------------------------------------------

    def use(self, instance: Instance, is_queue_empty: bool) -> bool:
        """Let an instance that is not needed for decoding train, while others decode.

        It is needed while samples wait for room, or are on their way to the instances that keep
        theirs. Once all are made the update trains the rest, on all ranks.
        """
        migrating = self.instances.migrating
        if self.early is None or not is_queue_empty or migrating or self.turns.put_by:
            return False
        if self.width > 1 and not self._gathered:  # it could not join any more
            return False
        decoding = [i for i in self.instances if i.held]
        if not decoding:
            return False
        rows = max(len(i.held) for i in decoding)
        width = min(i.width for i in decoding)
        progress = max(i.progress for i in decoding)
        left_s = None
        if self.converses:
            ids = [id for i in decoding for id in i.held]
            left_s = partial(self._conversations_left_s, ids, rows, width)
        if not self.early.start(instance, StillDecoding(rows, progress, width, left_s)):
            return False
        instance.become(_TRAINING)
        return True

    def _conversations_left_s(self, ids: Sequence[SampleId], rows: int, width: int) -> float:
        """Seconds until these have ended, which decode in batches of so many rows."""
        costs = self.stages.meter.costs()
        assert costs is not None, "seconds without costs"
        turn_s = self.turns.turn_tokens * float(costs.at_width(width).pace(rows))
        return self.turns.seconds_left(ids, turn_s, self.executor.clock.now())

    def awaits(self, instance: Instance) -> bool:
        """Tell whether the migration may begin, or a group become whole."""
        migrates = self.plan.moves and not self._gathered
        return migrates or (self.early is not None and len(instance.held) > 1)

    def touched(self, prompts: Iterable[int]) -> None:
        """Whole groups wait to be trained."""
        if self.early is not None:
            self.early.add(prompts)

    def trained(self, event: EarlyTrained) -> dict[int, None]:
        """An instance has computed gradients; gives the prompts of its samples."""
        assert self.early is not None, event
        return self.early.trained(event)

    # -- deaths --------------------------------------------------------------------------------

    def dies(self, instance: Instance) -> list[SampleId]:
        """A wide instance dies with any of its members; gives its samples."""
        if instance.joins is None:
            return []
        wide = self.instances[instance.joins]
        lost = wide.die()
        self._dissolve(wide)
        return lost

    def lost(self, instance: Instance, samples: Sequence[Sample]) -> None:
        """Finished samples begin anew, and the gradients that were on the instance."""
        if self.early is not None:
            for sample in samples:
                self.early.forget(sample)
            self.early.died(instance.number)


def choose_wide(
    table: Mapping[int, tuple[int, ...]],
    width: int,
    held: Mapping[int, int],
    able: Collection[int],
    most: int,
) -> list[Instance]:
    """The fewest wide instances of `width`, of a `table`, that take the `held` samples.

    Each takes `most`. None where too few have members that are all `able`. Those whose members hold
    most samples are taken, so that few move; of equal ones the first.
    """
    whole = {
        number: members
        for number, members in table.items()
        if len(members) == width and set(members) <= set(able)
    }
    order = sorted(whole, key=lambda n: (-sum(held.get(i, 0) for i in whole[n]), n))
    needed = -(-sum(held.values()) // most)
    chosen = order[:needed] if needed <= len(order) else []
    return [Instance(number, whole[number]) for number in sorted(chosen)]
