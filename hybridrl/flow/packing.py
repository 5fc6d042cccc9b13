"""Which prompts of several steps share a step, by the lengths of their responses.

Tail batching (RollPacker, arXiv 2509.21009, section 3). Lengths are tokens, and what is chosen
depends on them alone, never on the order in which samples finish.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_DEVIATIONS = 1.5


@dataclass(frozen=True, slots=True)
class Choice:
    """The prompts that a step takes, in order, and those before the last of them that it puts off.

    Until it `is_final`, some taken ones may yet be put off, and later ones taken.
    """

    taken: tuple[int, ...]
    put_off: tuple[int, ...]
    is_final: bool


def choose(order: Sequence[int], num_wanted: int, fits: Mapping[int, bool]) -> Choice:
    """The first `num_wanted` prompts of `order` that fit, as far as `fits` tells.

    As many may be put off as there are more prompts than wanted. Past these, a prompt is taken
    whether it fits or not.

    Invariants: with more known, no prompt that was put off is taken, and no taken one that fits is
    put off. The final choice does not depend on the order in which `fits` became known.

    Example, 2 of a, b, c, d wanted. Nothing is known: a and b. Then b does not fit: a and c. Nor
    does c: a and d, since two are put off, which is all that may be. d is taken, whatever it is.
    """
    allowed = len(order) - num_wanted
    taken: list[int] = []
    put_off: list[int] = []
    num_open = 0  # taken ones that may yet be put off
    for position in order:
        if len(taken) == num_wanted:
            break
        fit = fits.get(position)
        if fit is False and len(put_off) + num_open < allowed:
            put_off.append(position)
            continue
        taken.append(position)
        num_open += fit is not True and len(put_off) < allowed
    is_final = not num_open and all(position in fits for position in taken)
    return Choice(tuple(taken), tuple(put_off), is_final)


def limit_of(longest: Sequence[int], num_steps: int, num_prompts: int) -> int | None:
    """The length that all prompts of a cycle but one in `num_steps` keep to; None: none is known.

    `longest` has the longest response of each prompt of earlier steps, of which (num_steps - 1) /
    num_steps keep to the length. The `num_prompts` of a cycle may have more long ones. A step that
    finds too few short ones begins more prompts late, and so takes twice the time. So the share is
    1.5 standard deviations higher: those of the earlier prompts and of these ones together.

    Example: with 4 steps of 16 prompts, and the lengths 1 to 64, the share is
    0.75 + 1.5 sqrt(0.75 x 0.25 x (1/64 + 1/64)) = 0.865, and the limit 56.
    """
    lengths = sorted(longest)
    if not lengths:
        return None
    share = (num_steps - 1) / num_steps
    deviation = math.sqrt(share * (1 - share) * (1 / len(lengths) + 1 / num_prompts))
    kept = math.ceil(len(lengths) * min(1.0, share + _DEVIATIONS * deviation))
    return lengths[kept - 1]
