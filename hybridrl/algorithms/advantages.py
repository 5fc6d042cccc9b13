"""Advantages from rewards. Pure Python on scalars: they run in the driver, without torch."""

import math
from collections.abc import Sequence
from typing import SupportsFloat


def group_relative(
    rewards: Sequence[SupportsFloat], *, std_normalise: bool = True, eps: float = 1e-6
) -> list[float]:
    """Advantage of every sample of one prompt: its reward less the group's mean.

    `rewards` [samples] are numbers or a tensor's elements; the result [samples] is one number for
    all tokens of a sample. With `std_normalise` it is divided by the group's sample standard
    deviation plus `eps` (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1); without, it is
    Dr.GRPO's (arXiv 2503.20783, section 3.2), which does not favour prompts of little spread.

    A group without spread, so also a group of one, has advantage 0 exactly, where the formula would
    divide rounding errors by `eps`. (verl gives a group of one its reward.)
    """
    values = [float(reward) for reward in rewards]
    if not values:
        return []
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    centred = [value - mean for value in values]
    if not std_normalise:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(values) - 1))
    return [value / (std + eps) for value in centred]
