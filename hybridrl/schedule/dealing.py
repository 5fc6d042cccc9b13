"""Which instance gets which of the samples that wait."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridrl.flow.lengths import dispatch_groups
from hybridrl.flow.sample import SampleId
from hybridrl.schedule.groups import BegunPrompts
from hybridrl.schedule.instances import Instance, RoundLimits

VersionOf = Callable[[SampleId], int | None]
"""Gives the weights that make a sample's next tokens, once instances may load them."""


class Dealt(NamedTuple):
    """Samples for an instance, to be made by the weights of a version; None: those that it has."""

    instance: Instance
    ids: Sequence[SampleId]
    version: int | None = None


Deals = Callable[
    ["Dealer", Sequence[SampleId], Sequence[Instance]], tuple[list[Dealt], list[SampleId]]
]
"""Gives what each instance gets of a queue, and what is left of it."""


class Dealer:
    """Deals samples to instances that have room, longest groups first, to where there is least.

    Groups stay together where they can. Their samples share a prompt and are about as long: spread
    out, they would keep every instance decoding as long as the longest. A dealer deals once: what
    an instance holds is counted when it is first asked for.
    """

    def __init__(self, groups: BegunPrompts, limits: RoundLimits, num_alive: int) -> None:
        self.groups, self.limits, self.num_alive = groups, limits, num_alive
        self._counts: dict[int, tuple[int, int]] = {}

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

    def deal_by_batch(
        self,
        queue: Sequence[SampleId],
        able: Sequence[Instance],
        version_of: VersionOf,
        in_flight: bool,
    ) -> tuple[list[Dealt], list[SampleId]]:
        """As `deal`, batch by batch; an instance is given samples of one batch at a time.

        Those are left for which `version_of` gives None: their weights are not there yet. Unless
        instances take new weights `in_flight`, one holds samples of one version alone.
        """
        batches: dict[tuple[int, int], list[SampleId]] = defaultdict(list)
        left, all_dealt = list[SampleId](), list[Dealt]()
        for id in queue:
            version = version_of(id)
            if version is None:
                left.append(id)
            else:
                batches[self.groups[id.prompt].batch, version].append(id)
        free = [*able]
        for (_, version), ids in sorted(batches.items()):
            takes = [i for i in free if in_flight or not i.held or i.version == version]
            dealt, rest = self.deal(ids, takes, None if in_flight else version)
            left += rest
            all_dealt += dealt
            taken = {one.instance.number for one in dealt}
            free = [i for i in free if i.number not in taken]
        return all_dealt, left

    def deal_in_order(
        self,
        groups: Sequence[Sequence[SampleId]],
        able: Sequence[Instance],
        begins: Callable[[Instance, Sequence[SampleId]], bool],
    ) -> tuple[dict[int, list[SampleId]], list[SampleId]]:
        """Each group in turn to instances with room that have least; what is left.

        `begins` says whether an instance may be given these samples of a group, which it then has.
        It has all of the group where one has room for it.
        """
        num = sum(map(len, groups))
        room = {i.number: self._room(i, num) for i in able}
        loads = {i.number: sum(self.groups.task(id).tokens for id in i.held) for i in able}
        dealt: dict[int, list[SampleId]] = defaultdict(list)
        left = list[SampleId]()
        for group in groups:
            rest = [*group]
            places = [i for i in able if room[i.number] > 0]
            places.sort(key=lambda i: (room[i.number] < len(group), loads[i.number]))
            for instance in places:
                some, number = rest[: room[instance.number]], instance.number
                if some and begins(instance, some):
                    dealt[number] += some
                    room[number] -= len(some)
                    loads[number] += sum(self.groups.task(id).tokens for id in some)
                    rest = rest[len(some) :]
            left += rest
        return dealt, left

    def _room(self, instance: Instance, num_queued: int) -> int:
        """Samples that an instance may be given: those that wait leave their rows to others.

        It holds at most twice as many as have rows, since those that wait keep their blocks. Those
        that rest until the round ends do not count, or others might never come. Beyond that it is
        given samples ahead (`_ahead`), which the engine begins when rows are free, within a call.
        """
        most = self.limits.max_held
        if instance.number not in self._counts:
            turns = self.groups.turns
            held = [id for id in instance.held if not turns.rests(id)]
            self._counts[instance.number] = sum(not turns.waits(id) for id in held), len(held)
        going, num_held = self._counts[instance.number]
        return max(0, min(most - going, 2 * most - num_held) + self._ahead(num_queued))

    def _ahead(self, num_queued: int) -> int:
        """Half of an instance's share of the queue: the other half goes to whoever is done first.

        Guided self-scheduling (Polychronopoulos and Kuck, 1987).
        """
        return num_queued // (2 * self.num_alive) if self.limits.ahead else 0
