"""Rewards made of other scalars. Pure Python: they run in the driver, without torch.

Each takes one list per input; but for `has_spread` it gives one reward a sample, for
`Stream.by_group`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import SupportsFloat


def has_spread(rewards: Sequence[SupportsFloat]) -> bool:
    """Whether the rewards of one prompt's samples differ, so that there is something to learn.

    For `Stream.filter`; DAPO's dynamic sampling (arXiv 2503.14476, section 3.2, equation 11).
    """
    values = [float(reward) for reward in rewards]
    return bool(values) and min(values) < max(values)


def majority_vote(answers: Sequence[str]) -> list[float]:
    """TTRL: 1 for the samples of a prompt that give its most frequent answer, else 0.

    Zuo et al., "TTRL: Test-Time Reinforcement Learning", arXiv 2504.16084, section 2.2 (majority
    voting reward). `answers` [samples] are what was extracted from the responses, in one spelling.
    An empty answer has no vote and no reward. Of equally frequent ones that of the first sample
    wins, so the result depends on the order alone.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return [0.0] * len(answers)
    ((winner, _),) = votes.most_common(1)
    return [float(answer == winner) for answer in answers]


def overlong_shaped(
    rewards: Sequence[SupportsFloat],
    lengths: Sequence[SupportsFloat],
    *,
    max_tokens: int,
    buffer_tokens: int,
    penalty: float = 1.0,
) -> list[float]:
    """DAPO's soft overlong punishment on top of the rewards, [samples].

    arXiv 2503.14476, section 3.4, equation 13: nothing up to `max_tokens` - `buffer_tokens`
    response tokens, from there a straight line to -`penalty` at `max_tokens`, and that beyond.
    Raises ValueError for a buffer that is not within 1 to `max_tokens`.

    Example: of 100 tokens with a buffer of 20, a response of 90 loses 0.5.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"{buffer_tokens=}: wanted 1 to max_tokens={max_tokens}")
    free = max_tokens - buffer_tokens
    return [
        float(reward) - penalty * min(max((float(length) - free) / buffer_tokens, 0.0), 1.0)
        for reward, length in zip(rewards, lengths, strict=True)
    ]
