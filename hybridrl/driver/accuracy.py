"""Estimates from judged responses, avg@k, pass@k and maj@k, and their 95 % intervals.

Pure functions. A prompt's responses count as equally likely draws, in any order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

_RESAMPLES = 1000
_SUBSETS = 1000


@dataclass(frozen=True, slots=True)
class JudgedPrompt:
    """The responses to one prompt: which are right, and their `answers`.

    An answer is what the judge reads of a response; empty where the judge has none to compare.
    """

    right: tuple[bool, ...]
    answers: tuple[str, ...] = ()


def accuracy_metrics(prompts: Sequence[JudgedPrompt], sizes: Sequence[int]) -> dict[str, float]:
    """`avg@n` of prompts with n responses each; of the k in `sizes` above 1 pass@k, maj@k as well.

    pass@1 is avg@n. maj@k is left out where there are no answers. Each is followed by the bounds of
    its interval, `KEY/low` and `KEY/high`.
    """
    if not prompts:
        return {}
    by_prompt = {f"avg@{len(prompts[0].right)}": [avg(p.right) for p in prompts]}
    for k in (k for k in sizes if k > 1):
        by_prompt[f"pass@{k}"] = [pass_at_k(len(p.right), sum(p.right), k) for p in prompts]
        if all(p.answers for p in prompts):
            by_prompt[f"maj@{k}"] = [maj_at_k(p.right, p.answers, k) for p in prompts]
    metrics: dict[str, float] = {}
    for key, values in by_prompt.items():
        low, high = interval(values)
        metrics |= {key: float(np.mean(values)), f"{key}/low": low, f"{key}/high": high}
    return metrics


def avg(right: Sequence[bool]) -> float:
    """The share that is right."""
    return sum(right) / len(right)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def maj_at_k(right: Sequence[bool], answers: Sequence[str], k: int) -> float:
    """The chance that the most frequent answer of k samples is right (arXiv 2203.11171).

    Where answers are equally frequent each has the same chance. Exact where there are at most a
    thousand choices of k samples; else estimated from a thousand draws, with a fixed seed.
    """
    n = len(right)
    distinct = list(dict.fromkeys(answers))
    is_answer = np.array([[answer == other for other in distinct] for answer in answers], float)
    share_right = is_answer.T @ np.array(right, float) / is_answer.sum(0)
    votes = _subsets(n, k) @ is_answer
    most = votes == votes.max(1, keepdims=True)
    return float(np.mean(most @ share_right / most.sum(1)))


@cache
def _subsets(n: int, k: int) -> npt.NDArray[np.float64]:
    """Choices of k of n samples, [choices, n], 1 where chosen: all, or a thousand random ones."""
    if comb(n, k) > _SUBSETS:
        order = np.random.default_rng(0).random((_SUBSETS, n)).argsort(1)
        return (order < k).astype(float)
    return np.array(
        [np.bincount(chosen, minlength=n) for chosen in combinations(range(n), k)], float
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the 95 % interval of the mean of `values`, one a prompt.

    Percentiles of the means of a thousand resamples of the prompts, from a fixed seed (Efron 1979).
    """
    n = len(values)
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), _RESAMPLES)
    low, high = np.percentile(counts @ np.array(values) / n, (2.5, 97.5))
    return float(low), float(high)
