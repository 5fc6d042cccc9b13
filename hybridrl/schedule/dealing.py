"""Which instance gets which of the samples that wait."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hybridrl.flow.lengths import dispatch_groups
from hybridrl.flow.sample import SampleId
from hybridrl.schedule.groups import BegunPrompts
from hybridrl.schedule.instances import Instance, RoundLimits


class Dealt(NamedTuple):
    """Samples for an instance, to be made by the weights of a version; None: those that it has."""

    instance: Instance
    ids: Sequence[SampleId]
    version: int | None = None


class Dealer:
    """Deals samples to instances that have room, longest groups first, to where there is least.

    Groups stay together where they can. Their samples share a prompt and are about as long: spread
    out, they would keep every instance decoding as long as the longest.
    """

    def __init__(self, groups: BegunPrompts, limits: RoundLimits, num_alive: int) -> None:
        self.groups, self.limits, self.num_alive = groups, limits, num_alive

    def deal(
        self, queue: Sequence[SampleId], able: Sequence[Instance], version: int | None = None
    ) -> tuple[list[Dealt], list[SampleId]]:
        """What each instance gets of a queue, and what is left."""
        room = [self._room(i, len(queue)) for i in able]
        if not any(room):
            return [], list(queue)
        groups: dict[tuple[str, int], list[tuple[SampleId, float]]] = {}
        for id in queue:
            task = self.groups.task(id)
            groups.setdefault((task.stage.name, id.prompt), []).append((id, task.tokens))
        loads = [sum(self.groups.task(id).tokens for id in i.held) for i in able]
        dealt, left = dispatch_groups([*groups.values()], room, loads)
        return [Dealt(i, ids, version) for i, ids in zip(able, dealt, strict=True) if ids], left

    def deal_by_version(
        self, queue: Sequence[SampleId], able: Sequence[Instance]
    ) -> tuple[list[Dealt], list[SampleId]]:
        """As `deal`, batch by batch; an instance holds samples of one version of the weights alone.

        An instance is given samples of one batch at a time. Those whose weights are not there yet
        are left.
        """
        batches: dict[tuple[int, int], list[SampleId]] = defaultdict(list)
        left, all_dealt = list[SampleId](), list[Dealt]()
        for id in queue:
            group = self.groups[id.prompt]
            if group.version is None:
                left.append(id)
            else:
                batches[group.version, group.batch].append(id)
        free = [*able]
        for (version, _), ids in sorted(batches.items()):
            takes = [i for i in free if not i.held or i.version == version]
            dealt, rest = self.deal(ids, takes, version)
            left += rest
            all_dealt += dealt
            taken = {one.instance.number for one in dealt}
            free = [i for i in free if i.number not in taken]
        return all_dealt, left

    def _room(self, instance: Instance, num_queued: int) -> int:
        """Samples that an instance may be given: those that wait leave their rows to others.

        It holds at most twice as many as have rows, since those that wait keep their blocks. Those
        that rest until the round ends do not count, or others might never come. Beyond that it is
        given samples ahead (`_ahead`), which the engine begins when rows are free, within a call.
        """
        turns, most = self.groups.turns, self.limits.max_held
        held = [id for id in instance.held if not turns.rests(id)]
        going = sum(not turns.waits(id) for id in held)
        return max(0, min(most - going, 2 * most - len(held)) + self._ahead(num_queued))

    def _ahead(self, num_queued: int) -> int:
        """Half of an instance's share of the queue: the other half goes to whoever is done first.

        Guided self-scheduling (Polychronopoulos and Kuck, 1987).
        """
        return num_queued // (2 * self.num_alive) if self.limits.ahead else 0
