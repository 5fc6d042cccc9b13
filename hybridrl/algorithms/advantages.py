"""Advantages from rewards. Pure Python on scalars: they run in the driver, without torch.

Functions of one prompt's samples are for `Stream.by_group`, those of the whole batch for
`by_batch`. Each takes one list per input and gives one number a sample, which all its tokens have.
Other inputs (a greedy reward, a length, a weight) are scalars of the stream; for example,
`samples.map(len, ("log_probs",), scalars=("length",))` adds the length of a response.

A sample without a baseline has advantage 0: a group of one has no other samples. (verl uses its
reward.)
"""

import math
from collections.abc import Sequence
from typing import SupportsFloat

from hybridrl.algorithms.rewards import has_spread

Values = Sequence[SupportsFloat]


def group_relative(
    rewards: Values, *, std_normalize: bool = True, eps: float = 1e-6
) -> list[float]:
    """Advantage of every sample of one prompt: its reward less the group's mean.

    `rewards` [samples] are numbers or a tensor's elements; the result [samples] is one number for
    all tokens of a sample. With `std_normalize` it is divided by the group's sample standard
    deviation plus `eps` (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1); without, it is
    Dr.GRPO's (arXiv 2503.20783, section 3.2), which does not favor prompts of little spread.

    A group without spread, so also a group of one, has advantage 0 exactly, where the formula would
    divide rounding errors by `eps`. (verl gives a group of one its reward.)
    """
    values = [float(reward) for reward in rewards]
    if not has_spread(values):
        return [0.0] * len(values)
    centered = _less(values, math.fsum(values) / len(values))
    if not std_normalize:
        return centered
    std = math.sqrt(math.fsum(value * value for value in centered) / (len(values) - 1))
    return [value / (std + eps) for value in centered]


def leave_one_out(rewards: Values) -> list[float]:
    """RLOO: each reward less the mean of the group's other rewards, [samples].

    Ahmadian et al., "Back to Basics", arXiv 2402.14740 (the RLOO estimator). It is n / (n - 1)
    times `group_relative` without the division.
    """
    values = [float(reward) for reward in rewards]
    if not has_spread(values):
        return [0.0] * len(values)
    total, others = math.fsum(values), len(values) - 1
    return [value - (total - value) / others for value in values]


def greedy_baseline(rewards: Values, greedy_rewards: Values) -> list[float]:
    """ReMax: each reward less that of the greedy response to the same prompt, [samples].

    Li et al., arXiv 2310.10505 (the ReMax algorithm). Two streams make it:
    `samples.join(greedy, "greedy_").by_group(greedy_baseline, ("reward", "greedy_reward"))`, where
    `greedy` are scored samples of `generate(..., greedy=True, name="greedy")`.
    """
    return [float(x) - float(b) for x, b in zip(rewards, greedy_rewards, strict=True)]


def optimal_baseline(rewards: Values, lengths: Values) -> list[float]:
    """OPO: each reward less the group's mean reward weighted by length, [samples].

    Hao et al., "On-Policy RL with Optimal Reward Baseline", arXiv 2505.23585 ("Optimal
    Reward Baseline"): the baseline of least gradient variance is E[|g|^2 R] / E[|g|^2] for the
    score function g, and |g|^2 grows with the length of the response. `lengths` [samples] are
    tokens; with none in the whole group there is nothing to train, and the advantages are 0.
    """
    return minimum_variance(rewards, lengths, [1.0] * len(rewards))


def minimum_variance(rewards: Values, square_norms: Values, ratios: Values) -> list[float]:
    """VCPO's off-policy baseline of least variance: each reward less b, [samples].

    b = sum(w^2 |g|^2 R) / sum(w^2 |g|^2) over the group ("Stable Asynchrony: Variance-Controlled
    Off-Policy RL for LLMs", arXiv 2602.17616, the closed form of OPOB). `ratios` [samples] are w,
    the probability of the whole response now over that under the policy that generated it;
    `square_norms` [samples] are |g|^2, the squared gradient norm of the response's log-probability,
    or what grows with it: its length (as in OPO, which this is where all ratios are equal).

    Ratios are taken relative to the group's largest, which changes nothing but keeps their squares
    finite. A group of one, or one without weight, has advantage 0.
    """
    values = [float(reward) for reward in rewards]
    largest = max((abs(float(ratio)) for ratio in ratios), default=0.0) or 1.0
    weights = [
        (float(ratio) / largest) ** 2 * float(norm)
        for ratio, norm in zip(ratios, square_norms, strict=True)
    ]
    assert len(weights) == len(values)
    total = math.fsum(weights)
    if not has_spread(values) or not total:
        return [0.0] * len(values)
    return _less(values, math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total)


def mean_normalized(rewards: Values, *, eps: float = 1e-6) -> list[float]:
    """MaxRL: each reward less the group's mean, over the mean plus `eps`, [samples].

    Tajwar, Zeng et al., "Maximum Likelihood Reinforcement Learning", arXiv 2602.02710. Let p
    be the probability of a right response, whose reward is 1, others' 0. The expected step is then
    along the gradient of log p, by the first terms of its series: one less than the group has
    samples. A group whose mean is not above 0 has no advantage.
    """
    values = [float(reward) for reward in rewards]
    mean = math.fsum(values) / max(len(values), 1)
    if not has_spread(values) or mean <= 0:
        return [0.0] * len(values)
    return [value / (mean + eps) for value in _less(values, mean)]


def standardized_sum(
    *advantages: Values, weights: Sequence[float], eps: float = 1e-6
) -> list[float]:
    """GDPO: the weighted sum of advantages by several rewards, standardized over the batch.

    Liu et al., arXiv 2601.05242. Each of `advantages` [samples] is one reward's, compared within
    the group (`group_relative`), `weights` has one number each. Of the sum the mean over all
    samples is taken off; it is divided by their sample standard deviation plus `eps`.
    """
    columns = zip(advantages, weights, strict=True)
    weighted = [[weight * float(a) for a in column] for column, weight in columns]
    return group_relative([math.fsum(row) for row in zip(*weighted, strict=True)], eps=eps)


def entropy_reshaped(advantages: Values, entropies: Values) -> list[float]:
    """ETTRL: advantages of one group weighed by how sure the policy was of each response.

    A_i (1 + (mean H - H_i) / mean H), where H_i is the mean entropy of the response's tokens, nats,
    and the mean is the group's (Liu et al., "ETTRL", arXiv 2508.11356, entropy-based advantage
    reshaping). An unsure response has less weight, down to a sign change past twice the mean. A
    group without entropy keeps its advantages.
    """
    values = [float(entropy) for entropy in entropies]
    mean = math.fsum(values) / max(len(values), 1)
    if mean == 0:
        return [float(a) for a in advantages]
    return [float(a) * (2 - h / mean) for a, h in zip(advantages, values, strict=True)]


def novelty_sharpened(
    advantages: Values, likelihoods: Values, *, weight: float, bound: float
) -> list[float]:
    """XRPO: right responses of one group gain for being less likely than the group's.

    A_i + min(max(weight (1 - exp(s_i - mean s)), 0), bound A_i) where A_i > 0, with `likelihoods`
    s_i the mean log-probability of a response's tokens (Bamba et al., "XRPO", arXiv 2510.06672,
    novelty-guided advantage sharpening; the formula is from a public implementation). Others keep
    their advantage: the bonus is for right responses.
    """
    s = [float(value) for value in likelihoods]
    mean = math.fsum(s) / max(len(s), 1)

    def gain(a: float, likelihood: float) -> float:
        # The exponent is bounded before exp; beyond 0 nothing is gained anyway.
        novelty = 1 - math.exp(min(likelihood - mean, 0.0))
        return min(weight * novelty, bound * a) if a > 0 else 0.0

    return [float(a) + gain(float(a), x) for a, x in zip(advantages, s, strict=True)]


def _less(values: Sequence[float], baseline: float) -> list[float]:
    return [value - baseline for value in values]
