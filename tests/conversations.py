"""Turns of responses of known length, for several files of tests."""

import random
from collections.abc import Callable

from hybridrl.flow import SampleId


def of_turns(length_of: Callable[[SampleId], int], most: int) -> Callable[[SampleId], list[int]]:
    """Where turns and replies of a response end, in turn; the last one is a turn, at its length.

    There are at most `most` turns, in the number and the places that a sample's identity says.
    """

    def turns_of(id: SampleId) -> list[int]:
        length, draw = length_of(id), random.Random(f"{id} turns")
        if not length:
            return [0]
        replies = draw.randrange(min(most, (length + 1) // 2))
        return [*sorted(draw.sample(range(1, length), 2 * replies)), length]

    return turns_of
