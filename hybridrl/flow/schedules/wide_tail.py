"""Instances that decode the last samples of a round as one."""

from collections.abc import Collection, Mapping

from hybridrl.flow.migration import MigrationPlan


class WideTail:
    """The wide instances of a round (`Executor.wide`), and who is in them.

    | an instance is | when                                                          |
    |----------------|---------------------------------------------------------------|
    | free           | it is in no wide instance                                     |
    | reserved       | it is to join: it parks its samples and begins no other work  |
    | joined         | all members are idle; the wide instance has a call in flight, |
    |                | or samples                                                    |

    Reserved and joined instances are the same to a schedule: `wide_of` has them. They become free
    when their wide instance has no more samples (`release`), or dies with one of them.

    Invariants: no instance is in two. A wide instance decodes only while its members have no call
    of their own in flight.

    Example: instances 0 to 3 and the pairs 4 = (0, 1), 5 = (2, 3). Two samples are left, on 1 and
    on 3, and a wide instance takes both. They need one pair, which is 4: 3 parks its sample for
    it. Instance 2 and, after its call, 3 are free.
    """

    def __init__(self, table: Mapping[int, tuple[int, ...]]) -> None:
        self._table = table
        self.members: dict[int, tuple[int, ...]] = {}  # of those that are formed, by number
        self.wide_of: dict[int, int] = {}
        self.num_widened = 0

    def reserve(
        self, plan: MigrationPlan, held: Mapping[int, int], able: Collection[int], most: int
    ) -> frozenset[int]:
        """Reserve the fewest wide instances that take the samples in `held`, `most` each.

        None where too few have members that are all `able`. Those that hold most samples are taken,
        so that few move; of equal ones the first.
        """
        whole = {
            number: members
            for number, members in self._table.items()
            if len(members) == plan.width and set(members) <= set(able)
        }
        order = sorted(whole, key=lambda n: (-sum(held.get(i, 0) for i in whole[n]), n))
        needed = -(-sum(held.values()) // most)
        chosen = order[:needed] if needed <= len(order) else []
        self.members = {number: whole[number] for number in sorted(chosen)}
        self.wide_of = {i: number for number, members in self.members.items() for i in members}
        return frozenset(self.members)

    def release(self, number: int) -> None:
        """Its members are instances of their own again."""
        for instance in self.members.pop(number, ()):
            del self.wide_of[instance]
