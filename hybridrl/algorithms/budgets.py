"""Budgets of further samples for each prompt, from the rewards of its samples so far.

Pure Python: they run in the driver, without torch. Each takes one list of rewards a prompt (for
`Stream.by_batch(..., grouped=True)`) and gives one list a prompt. The number is the same at each of
its samples, as `ActorHandle.generate_more` reads it. A prompt without samples gets no number.
"""

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import SupportsFloat

ValueGroups = Sequence[Sequence[SupportsFloat]]


def equal_treatment(rewards: ValueGroups, *, max_samples: int) -> list[list[int]]:
    """DARS-ET: hard prompts are sampled until they weigh as much as one that is solved half of the
    time.

    A prompt of accuracy u weighs |A| summed over its N samples: N S(u) with S(u) = 2 u (1 - u) for
    advantages R - u, at most N / 2. Below u = 1/2 it gets ceil((N / 2 - N S(u)) / S(u)) more, up to
    `max_samples` in all; from there none. Where nothing was right, u is taken as 1 / (2 N). Yang et
    al., "Depth-Breadth Synergy in RLVR", arXiv 2508.13755 (equal-treatment schedule; the bounds are
    those of the authors' code). Rewards are accuracies, 0 to 1.

    Example: of 8 samples 1 right gives 11 more, 2 right give 3 more (with 32 in all allowed).
    """
    return [_rebalanced(group, max_samples, hardness=False) for group in rewards]


def hardness_weighted(rewards: ValueGroups, *, max_samples: int) -> list[list[int]]:
    """DARS-HW: as `equal_treatment`, but towards 2 (1 - u) N / 2: harder prompts weigh more.

    arXiv 2508.13755 (hardness-weighted schedule). Example: of 8 samples 1 right gives 24 more.
    """
    return [_rebalanced(group, max_samples, hardness=True) for group in rewards]


def _rebalanced(rewards: Sequence[SupportsFloat], max_samples: int, hardness: bool) -> list[int]:
    n = len(rewards)
    if not n:
        return []
    # Exact: a rounding just above a whole number would be one sample too many.
    u = sum(Fraction(float(reward)) for reward in rewards) / n or Fraction(1, 2 * n)
    if 2 * u >= 1:
        return [0] * n
    weight = 2 * u * (1 - u)
    target = n * (1 - u) if hardness else Fraction(n, 2)
    more = math.ceil((target - n * weight) / weight)
    return [max(0, min(more, max_samples - n))] * n


def by_uncertainty(
    rewards: ValueGroups,
    *,
    budget: int,
    max_samples: int,
    confidence: float = 0.95,
    exploration: float = 0.1,
) -> list[list[int]]:
    """XRPO: `budget` more samples, one by one to the prompt with the highest priority.

    The priority of a prompt with n samples, of standard deviation s, is

        h(n) - h(n + 1) + exploration sqrt(log(1 + T) / n),  h(n) = t(n - 1) s / sqrt(n)

    with t(n - 1) Student's two-sided quantile at `confidence`. It says how much one more sample
    narrows the confidence interval of the mean reward, with a bonus for prompts seen less (Bamba et
    al., "XRPO", arXiv 2510.06672, section on adaptive rollout allocation; h is from a review of the
    paper, the rest from a public implementation). T are the samples of all prompts so far, the
    clock of upper confidence bounds. While the budget is dealt, n grows and s stays. No prompt gets
    beyond `max_samples`; of equals the first is served. A prompt with one sample has no s: its
    interval is taken as infinite, so it is served first.

    XRPO's seeding of unsolved prompts with solved ones in their context is not part of it.
    """
    n = [len(group) for group in rewards]
    spread = [_deviation(group) for group in rewards]
    more = [0] * len(n)
    total = sum(n)
    for _ in range(budget):
        open_ = [i for i in range(len(n)) if n[i] > 0 and n[i] + more[i] < max_samples]
        if not open_:
            break
        bonus = exploration * math.sqrt(math.log1p(total))

        def priority(i: int, bonus: float = bonus) -> float:
            have = n[i] + more[i]
            gain = math.inf if have < 2 else _half_width(have, spread[i], confidence)
            if have >= 2:
                gain -= _half_width(have + 1, spread[i], confidence)
            return gain + bonus / math.sqrt(have)

        more[max(open_, key=priority)] += 1
        total += 1
    return [[count] * len(group) for count, group in zip(more, rewards, strict=True)]


def _deviation(rewards: Sequence[SupportsFloat]) -> float:
    """Sample standard deviation; 0 of less than two."""
    values = [float(reward) for reward in rewards]
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


@functools.cache
def _quantile(degrees: int, confidence: float) -> float:
    from scipy.stats import t  # a second, which runs without it need not pay

    return float(t.ppf((1 + confidence) / 2, degrees))


def _half_width(n: int, deviation: float, confidence: float) -> float:
    """Half of the confidence interval of a mean of `n` samples."""
    return _quantile(n - 1, confidence) * deviation / math.sqrt(n)
