"""Whose turn it is: training, or samples of one of the snapshots."""

from collections.abc import Mapping

TRAIN = 0
"""The place of training; every other place is the version of a snapshot."""


def next_place(
    present: int, waiting_since: Mapping[int, float], now: float, patience_s: float
) -> int:
    """The place where the ranks work next, of those with work in `waiting_since` (seconds).

    They stay while there is work, until that of another place has waited longer than `patience_s`.
    Then, and where there is no work left, the place whose work has waited longest is next.
    """
    others = {place: since for place, since in waiting_since.items() if place != present}
    longest = min(others, key=lambda place: (others[place], place), default=present)
    if present not in waiting_since:
        return longest
    return longest if others and now - others[longest] > patience_s else present
