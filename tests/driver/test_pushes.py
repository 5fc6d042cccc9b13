"""Which references an instance's ranks are sent: deltas where these begin with what it has."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hybridrl.driver.pushes import Pushes
from hybridrl.flow.executor import ENOUGH_TURNS, Command, FetchWeights, LoadWeights
from hybridrl.workers.pushed_weights import PushedShare


class Group:
    """One instance of two ranks; notes what these are sent."""

    def __init__(self) -> None:
        self.launcher = SimpleNamespace(data_plane=SimpleNamespace(has_transfers=True))
        self.places = [[2, 3]]
        self.sent: list[list[Command]] = []

    def call_load(self, instance: int, commands: Sequence[list[Command]], *more: int) -> Any:
        self.sent = list(commands)
        return {}

    def call_advance(self, instance: int, commands: Sequence[Command], *more: int) -> Any:
        self.sent = [list(commands)] * 2
        return {}


def whole(version: int, rank: int, place: int) -> str:
    return f"v{version} of {rank} for {place}"


def delta(version: int, rank: int, place: int) -> str:
    return f"changes to {whole(version, rank, place)}"


def pushed(newest: int) -> tuple[Pushes, Group]:
    """Versions up to `newest` of two training ranks; what the second sends to place 1 has none."""
    group: Any = Group()
    pushes = Pushes(group)
    for version in range(newest + 1):
        shares = []
        for rank in range(2):
            arrays = {place: whole(version, rank, place) for place in range(2)}
            with_delta = [p for p in range(2) if version and not (rank and p)]
            deltas = {place: delta(version, rank, place) for place in with_delta}
            base = version - 1 if deltas else -1
            shares.append(PushedShare(version, arrays, 1, 0.0, base=base, deltas=deltas))
        pushes._shares[version] = shares
    pushes._newest = newest
    return pushes, group


def load(pushes: Pushes, version: int) -> None:
    pushes.call_advance(0, [LoadWeights(version)], 8, ENOUGH_TURNS)


def test_deltas_go_to_an_instance_that_has_the_version_before() -> None:
    pushes, group = pushed(4)
    deltas_of = [(delta(1, 0, 0), delta(1, 1, 0)), (delta(1, 0, 1), None)]
    wholes = [(whole(1, 0, place), whole(1, 1, place)) for place in range(2)]
    load(pushes, 1)  # it has none yet
    first = [command for (command,) in group.sent]
    assert [command.arrays for command in first] == wholes
    assert [command.deltas for command in first] == [(None, None)] * 2
    load(pushes, 0)  # after an evaluation, say
    load(pushes, 1)
    again = [command for (command,) in group.sent]
    assert [command.arrays for command in again] == wholes
    assert [command.deltas for command in again] == deltas_of
    load(pushes, 3)  # it has skipped one
    assert [command.deltas for (command,) in group.sent] == [(None, None)] * 2


def test_what_an_instance_begins_to_fetch_is_what_it_will_load() -> None:
    pushes, group = pushed(2)
    load(pushes, 1)
    pushes.call_advance(0, [], 8, ENOUGH_TURNS)
    assert group.sent == [
        [FetchWeights((delta(2, 0, 0), delta(2, 1, 0)))],
        [FetchWeights((delta(2, 0, 1), whole(2, 1, 1)))],
    ]
    load(pushes, 0)
    pushes.call_advance(0, [], 8, ENOUGH_TURNS)
    skipping = [[FetchWeights((whole(2, 0, p), whole(2, 1, p)))] for p in range(2)]
    assert group.sent == skipping
    load(pushes, 2)
    pushes.call_advance(0, [], 8, ENOUGH_TURNS)
    assert group.sent == [[], []]
