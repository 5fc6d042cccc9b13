"""What `.ci/run` leaves to `.ci/run all`: further settings of what other tests show."""

from collections import defaultdict
from collections.abc import Iterable

import pytest


def breadth(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The tests among `items` that `--narrow` leaves out.

    They are those marked `wide`, and of more than three cases of a test marked `layouts` or `long`
    all but the first and the last. Where each shows its own thing, the mark `each` keeps them all.
    """
    left_out, cases = set(), defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "wide" in marks:
            left_out.add(item)
        elif marks & {"layouts", "long"} and "each" not in marks:
            cases[item.nodeid.split("[")[0]].append(item)
    return left_out.union(*(of_a_test[1:-1] for of_a_test in cases.values() if len(of_a_test) > 3))
