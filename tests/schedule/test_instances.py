"""The life of an instance in a round: what the table allows, and what follows from its work."""

import re
from itertools import product

import pytest

from hybridrl.flow.sample import SampleId
from hybridrl.schedule.instances import Instance, InstanceStatus
from hybridrl.schedule.tail.moving import choose_wide

FREE, DECODING, LEAVING, JOINED, SCORING, TRAINING, DEAD = InstanceStatus
PATHS = {
    FREE: [],
    DECODING: [DECODING],
    LEAVING: [DECODING, LEAVING],
    JOINED: [JOINED],
    SCORING: [SCORING],
    TRAINING: [TRAINING],
    DEAD: [DEAD],
}
A, B = SampleId(0), SampleId(1)


def table() -> set[tuple[InstanceStatus, InstanceStatus]]:
    """The transitions of the docstring."""
    rows = re.findall(r"^ *\| (\w+) +\| (\w+) +\|", str(Instance.__doc__), re.MULTILINE)
    assert rows[0] == ("from", "to")
    assert rows[-1] == ("any", "dead")
    changes = {(InstanceStatus(a), InstanceStatus(b)) for a, b in rows[1:-1]}
    assert len(changes) == len(rows) - 2
    return changes | {(status, DEAD) for status in InstanceStatus if status is not DEAD}


@pytest.mark.parametrize(("before", "after"), list(product(InstanceStatus, repeat=2)))
def test_a_status_changes_by_the_table_alone(before: InstanceStatus, after: InstanceStatus) -> None:
    instance = Instance(3)
    for step in PATHS[before]:
        instance.become(step)
    if before is after or (before, after) in table():
        instance.become(after)
        assert instance.status is after
    else:
        with pytest.raises(AssertionError, match=f"3 cannot be {after.value}: {before.value}"):
            instance.become(after)
        assert instance.status is before


def test_it_decodes_while_it_holds_samples() -> None:
    instance = Instance(0)
    instance.hold(A)
    instance.hold(B)
    assert instance.status is DECODING
    instance.lose(A)
    instance.become(LEAVING)
    instance.puts_by = True
    assert instance.status is LEAVING
    instance.lose(B)
    assert (instance.status, instance.puts_by) == (FREE, False)


@pytest.mark.parametrize(("joins", "after"), [(None, FREE), (4, JOINED)])
def test_a_pass_ends_before_anything_else_begins(joins: int | None, after: InstanceStatus) -> None:
    instance = Instance(0)
    instance.become(SCORING)
    instance.sent = 1.0
    instance.join(joins)
    assert instance.status is SCORING
    instance.sent = None
    instance.settle()
    assert instance.status is after


def test_samples_that_come_during_a_pass_decode_after_it() -> None:
    instance = Instance(0)
    instance.become(SCORING)
    instance.sent = 1.0
    instance.hold(A)
    assert instance.status is SCORING
    instance.sent = None
    instance.settle()
    assert instance.status is DECODING


def test_one_that_trains_or_is_dead_stays_so() -> None:
    instance = Instance(0)
    instance.become(TRAINING)
    instance.settle()
    assert instance.status is TRAINING
    assert instance.die() == []
    instance.join(None)
    assert instance.status is DEAD


def test_a_dead_one_gives_its_samples_back() -> None:
    instance = Instance(0, sent=1.0)
    instance.hold(A)
    assert instance.die() == [A]
    assert (instance.held, instance.inbox, instance.sent) == ({}, [], None)


TABLE = {4: (0, 1), 5: (2, 3), 6: (0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("width", "held", "able", "most", "chosen"),
    [
        (2, {1: 1, 3: 1}, (0, 1, 2, 3), 2, [4]),  # of equal ones the first
        (2, {1: 1, 3: 2}, (0, 1, 2, 3), 3, [5]),
        (2, {1: 1, 3: 1}, (0, 1, 2, 3), 1, [4, 5]),
        (2, {1: 1, 3: 1}, (1, 2, 3), 2, [5]),
        (2, {1: 1, 3: 1}, (1, 2, 3), 1, []),
        (4, {1: 1, 3: 1}, (0, 1, 2, 3), 2, [6]),
    ],
)
def test_the_fewest_wide_instances_are_chosen(
    width: int, held: dict[int, int], able: tuple[int, ...], most: int, chosen: list[int]
) -> None:
    wide = choose_wide(TABLE, width, held, able, most)
    assert [instance.number for instance in wide] == chosen
    assert all(instance.members == TABLE[instance.number] for instance in wide)
