"""What each recipe trains on, against its paper's formula.

The recipe's own graph runs under the serial schedule. Its maps, groups, batches, filters, pairs and
joins compute for real. Its loss gets tokens and their weights as from the train engine. Only what
engines and models would say of a response is given (`bench`). The formulas are written out here
once more, over the bench's responses; they read nothing that a recipe has made.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor

Bench = Response = TrainedBatch = Any  # classes of conftest.py
Group = list[Response]


def test_no_recipe_is_left_out(recipe_names: set[str]) -> None:
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    assert set(re.findall(r'bench\.run\("(\w+)"', "".join(texts))) == recipe_names


# -- What formulas share ---------------------------------------------------------------------------


def flat(groups: Iterable[Iterable[Response]]) -> Group:
    return [response for group in groups for response in group]


def varied(groups: list[Group]) -> list[Group]:
    """Groups whose rewards differ; there are others."""
    kept = [group for group in groups if len(set(rewards(group))) > 1]
    assert 0 < len(kept) < len(groups)
    return kept


def rewards(group: Group) -> list[float]:
    return [r.reward for r in group]


def less_mean(values: Sequence[float]) -> list[float]:
    return [value - fmean(values) for value in values]


def standardised(values: Sequence[float]) -> list[float]:
    """(R - mean) / deviation: GRPO, arXiv 2402.03300, section 4.1.2."""
    deviation = torch.tensor(values, dtype=torch.float64).std().item()
    return [value / deviation for value in less_mean(values)]


def set_advantages(
    groups: list[Group],
    of: Callable[[Group], Sequence[float]] = lambda group: standardised(rewards(group)),
) -> Group:
    """All responses, each with its `advantage` by its group."""
    for group in groups:
        for response, advantage in zip(group, of(group), strict=True):
            response.advantage = advantage
    return flat(groups)


def set_whitened(responses: Group, raw: list[Tensor]) -> None:
    """Advantages of tokens: `raw` less the mean of all tokens, over their deviation."""
    tokens = torch.cat(raw)
    for response, x in zip(responses, raw, strict=True):
        response.advantage = (x - tokens.mean()) / tokens.std()


def surrogate(r: Response, low: float, high: float, old: Tensor | None = None) -> Tensor:
    """PPO's clipped objective (arXiv 1707.06347, equation 7), negated, per token."""
    ratio = (r.new_log_probs - (r.log_probs if old is None else old)).exp()
    return -torch.min(ratio * r.advantage, ratio.clamp(1 - low, 1 + high) * r.advantage)


def token_mean(terms: list[Tensor]) -> Tensor:
    """One mean over all tokens: DAPO, arXiv 2503.14476, equation 8."""
    return torch.cat(terms).mean()


def response_mean(terms: list[Tensor]) -> Tensor:
    """The mean over responses of their tokens' mean: GRPO, arXiv 2402.03300, equation 3."""
    return torch.stack([term.mean() for term in terms]).mean()


def response_sum(terms: list[Tensor]) -> Tensor:
    """Sums over tokens / longest response: Dr.GRPO, arXiv 2503.20783, section 3.2."""
    return torch.stack([term.sum() / 10 for term in terms]).mean()


def policy_gradient(responses: Group) -> Tensor:
    """REINFORCE: -A log p(response)."""
    return response_sum([-r.advantage * r.new_log_probs for r in responses])


def clipped(responses: Group, low: float = 0.2, high: float = 0.2) -> Tensor:
    """PPO's objective under DAPO's mean, which most recipes have."""
    return token_mean([surrogate(r, low, high) for r in responses])


# -- Groups compared with themselves ---------------------------------------------------------------


def test_grpo(bench: Bench) -> None:
    """By default section 4.1.2 under DAPO's mean."""
    responses = set_advantages(varied(bench.groups(8)))
    bench.run("grpo").agrees(responses, clipped(responses))


def test_grpo_as_its_paper_has_it(bench: Bench) -> None:
    """Equations 3 and 4: a mean of means, and the KL term q / p - log(q / p) - 1."""
    responses = set_advantages(varied(bench.groups(8)))

    def terms(r: Response) -> Tensor:
        log_ratio = r.reference_log_probs - r.new_log_probs
        return surrogate(r, 0.2, 0.2) + 0.04 * (log_ratio.exp() - log_ratio - 1)

    loss = response_mean([terms(r) for r in responses])
    bench.run("grpo", kl_coef=0.04, normalize="sequence").agrees(responses, loss)


def test_grpo_with_its_other_settings(bench: Bench) -> None:
    """Without deviation; equal groups stay; dual clip (arXiv 1912.09729, section 5.3); entropy."""
    bench.drift = 1.5
    responses = set_advantages(bench.groups(8), lambda group: less_mean(rewards(group)))

    def terms(r: Response) -> Tensor:
        bounded = surrogate(r, 0.1, 0.3)
        if r.advantage < 0:
            bounded = bounded.clamp(max=-3 * r.advantage)
        return bounded - 0.01 * r.entropy

    keys = {"std_normalize": False, "skip_equal_groups": False, "normalize": "constant"}
    keys |= {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0, "entropy_coef": 0.01}
    loss = response_sum([terms(r) for r in responses])
    bench.run("grpo", **keys).agrees(responses, loss)


def test_grpo_with_the_baseline_of_least_variance(bench: Bench) -> None:
    """VCPO (arXiv 2602.17616): b = sum(W^2 n R) / sum(W^2 n), W of the whole response, n tokens."""

    def least(group: Group) -> list[float]:
        weights = [
            (r.old_log_probs - r.log_probs).sum().exp().item() ** 2 * r.length for r in group
        ]
        weighed = sum(w * r.reward for w, r in zip(weights, group, strict=True))
        return [r.reward - weighed / sum(weights) for r in group]

    responses = set_advantages(varied(bench.groups(8)), least)
    loss = token_mean([surrogate(r, 0.2, 0.2, old=r.old_log_probs) for r in responses])
    keys = {"std_normalize": False, "correction": {"old_log_probs": "trainer"}}
    bench.run("grpo", baseline="minimum_variance", **keys).agrees(responses, loss)


@pytest.mark.parametrize("old", ["trainer", "ewma"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rule", ["truncate", "mask"])
def test_the_decoupled_objective(bench: Bench, old: str, level: str, rule: str) -> None:
    """AReaL (arXiv 2505.24298, equation 5): clipped around the old policy, weighed from there to
    the one that sampled; the weight is bounded.
    """
    bench.drift = 1.0
    responses = set_advantages(varied(bench.groups(8)))

    def terms(r: Response) -> Tensor:
        log_weight = r.old_log_probs - r.log_probs
        weight = (log_weight if level == "token" else log_weight.sum()).exp()
        inside = (weight >= 1 / 1.5) & (weight <= 1.5)
        weight = weight.clamp(max=1.5) if rule == "truncate" else weight * inside
        return weight * surrogate(r, 0.2, 0.2, old=r.old_log_probs)

    loss = token_mean([terms(r) for r in responses])
    correction = {"old_log_probs": old, "weights": rule, "level": level, "bound": 1.5}
    bench.run("grpo", correction=correction).agrees(responses, loss)


def test_dr_grpo(bench: Bench) -> None:
    """Section 3.2: neither deviation nor length divides, and equal groups count."""
    responses = set_advantages(bench.groups(8), lambda group: less_mean(rewards(group)))
    loss = response_sum([surrogate(r, 0.2, 0.2) for r in responses])
    bench.run("dr_grpo").agrees(responses, loss)


@pytest.mark.parametrize(
    ("penalty", "keys"),
    [(1.0, {}), (0.0, {"overlong_share": 0.0}), (0.0, {"overlong_penalty": 0.0})],
)
def test_dapo(bench: Bench, penalty: float, keys: dict[str, float]) -> None:
    """Equations 8 and 9, less the punishment of equation 13 for the last 2 of 10 tokens. Prompts
    are sampled until as many groups as the step wants meet equation 11.
    """
    groups = varied([bench.group(prompt, 8) for prompt in range(8)])[:4]

    def shaped(group: Group) -> list[float]:
        return standardised([r.reward - penalty * max(0, r.length - 8) / 2 for r in group])

    responses = set_advantages(groups, shaped)
    assert {9, 10} <= {r.length for r in responses}
    bench.run("dapo", **keys).agrees(responses, clipped(responses, 0.2, 0.28))


def test_gspo(bench: Bench) -> None:
    """Equations 5 to 7: the ratio s of a response is the root of its likelihoods' ratio."""
    bench.drift = 1.5e-3  # so that some are beyond the bounds of section 5.1, some within
    responses = set_advantages(varied(bench.groups(8)))

    def term(r: Response) -> Tensor:
        s = ((r.new_log_probs.sum() - r.log_probs.sum()) / r.length).exp()
        return -torch.min(s * r.advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * r.advantage)

    loss = torch.stack([term(r) for r in responses]).mean()
    bench.run("gspo").agrees(responses, loss)


def test_sapo(bench: Bench) -> None:
    """The gate sigmoid(tau (r - 1)) 4 / tau, of a tau for each sign of the advantage."""
    responses = set_advantages(varied(bench.groups(8)))

    def terms(r: Response) -> Tensor:
        tau = 1.0 if r.advantage > 0 else 1.05
        ratio = (r.new_log_probs - r.log_probs).exp()
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * r.advantage

    bench.run("sapo").agrees(responses, response_mean([terms(r) for r in responses]))


def test_gmpo(bench: Bench) -> None:
    """The geometric mean of ratios within e^-0.4 and e^0.4, on the side that PPO clips."""
    responses = set_advantages(varied(bench.groups(8)))

    def term(r: Response) -> Tensor:
        x = r.new_log_probs - r.log_probs
        clipped = x.clamp(max=0.4) if r.advantage > 0 else x.clamp(min=-0.4)
        return -(clipped.exp().prod() ** (1 / r.length)) * r.advantage

    bench.run("gmpo").agrees(responses, torch.stack([term(r) for r in responses]).mean())


def set_covariances(responses: Group) -> None:
    """(log p - mean log p) (A - mean A) of each token, means over all of them."""
    advantages = [torch.full((r.length,), float(r.advantage)).double() for r in responses]
    means = torch.cat([r.log_probs for r in responses]).mean(), torch.cat(advantages).mean()
    for r, a in zip(responses, advantages, strict=True):
        r.covariance = (r.log_probs - means[0]) * (a - means[1])


def test_clip_cov(bench: Bench) -> None:
    """With a ratio of 1 all tokens between the bounds are left out; by default one of them."""
    responses = set_advantages(varied(bench.groups(8)))
    set_covariances(responses)

    def terms(r: Response) -> Tensor:
        return surrogate(r, 0.2, 0.2) * ~((r.covariance > 0.3) & (r.covariance < 0.9))

    bounds = {"cov_low": 0.3, "cov_high": 0.9, "seed": 1}
    batch = bench.run("clip_cov", cov_ratio=1.0, **bounds)
    batch.agrees(responses, token_mean([terms(r) for r in responses]))
    assert sum(batch.scalar("num_left_out")) == sum(batch.scalar("candidates")) > 10
    batch = bench.run("clip_cov", **bounds)
    assert sum(batch.scalar("num_left_out")) == 1


@pytest.mark.parametrize("ratio", [2e-4, 0.2])
def test_kl_cov(bench: Bench, ratio: float) -> None:
    """The tokens of the largest covariances pay for |log r|; nothing is clipped."""
    responses = set_advantages(varied(bench.groups(8)))
    set_covariances(responses)
    every = torch.cat([r.covariance for r in responses]).sort(descending=True).values
    least = every[max(1, int(ratio * len(every))) - 1]

    def terms(r: Response) -> Tensor:
        x = r.new_log_probs - r.log_probs
        return -x.exp() * r.advantage + 0.5 * x.abs() * (r.covariance >= least)

    batch = bench.run("kl_cov", cov_ratio=ratio, cov_kl_coef=0.5)
    batch.agrees(responses, token_mean([terms(r) for r in responses]))


def test_gdpo(bench: Bench) -> None:
    """Each reward standardized in its group, their weighted sum over the batch."""
    weights = {"right": 1.0, "form": -0.5}

    def joined(group: Group) -> list[float]:
        by_reward = [
            [weight * a for a in standardised([getattr(r, f"reward_{name}") for r in group])]
            for name, weight in weights.items()
        ]
        return [sum(column) for column in zip(*by_reward, strict=True)]

    responses = set_advantages(bench.groups(8), joined)
    for r, a in zip(responses, standardised([r.advantage for r in responses]), strict=True):
        r.advantage = a
    parts = {name: {"weight": weight} for name, weight in weights.items()}
    batch = bench.run("gdpo", parts=parts | {"told": {"weight": 0.0}})
    batch.agrees(responses, clipped(responses))


def test_gdpo_of_one_reward(bench: Bench) -> None:
    """Without parts the reward itself; equal groups stay, at 0."""
    responses = set_advantages(bench.groups(8), lambda g: standardised_or_zero(rewards(g)))
    for r, a in zip(responses, standardised([r.advantage for r in responses]), strict=True):
        r.advantage = a
    bench.run("gdpo").agrees(responses, clipped(responses))


def standardised_or_zero(values: Sequence[float]) -> list[float]:
    return standardised(values) if len(set(values)) > 1 else [0.0] * len(values)


def test_maxrl(bench: Bench) -> None:
    """(R - mean) / mean; the estimator of the mean score function of right responses."""
    responses = set_advantages(
        varied(bench.groups(8)), lambda g: [x / fmean(rewards(g)) for x in less_mean(rewards(g))]
    )
    bench.run("maxrl").agrees(responses, clipped(responses))


def test_cispo(bench: Bench) -> None:
    """Equations 4 and 5: sg(clip(ratio)) A log p; ScaleRL (arXiv 2510.13786) allows 5."""
    bench.drift = 3.0
    responses = set_advantages(varied(bench.groups(8)))

    def terms(r: Response) -> Tensor:
        weight = (r.new_log_probs - r.log_probs).exp().clamp(max=5.0).detach()
        return -weight * r.advantage * r.new_log_probs

    bench.run("cispo").agrees(responses, token_mean([terms(r) for r in responses]))


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_rloo(bench: Bench, kl_coef: float) -> None:
    """R less the mean R of the others, R being the reward less beta log(p / q)."""

    def leave_one_out(group: Group) -> list[float]:
        log_ratios = [(r.log_probs - r.reference_log_probs).sum().item() for r in group]
        returns = [r.reward - kl_coef * x for r, x in zip(group, log_ratios, strict=True)]
        others = (returns[:i] + returns[i + 1 :] for i in range(len(returns)))
        return [x - fmean(rest) for x, rest in zip(returns, others, strict=True)]

    responses = set_advantages(bench.groups(4), leave_one_out)
    bench.run("rloo", kl_coef=kl_coef).agrees(responses, policy_gradient(responses))


@pytest.mark.parametrize("num_samples", [1, 3])
def test_remax(bench: Bench, num_samples: int) -> None:
    """Algorithm 1: R less the greedy response's R."""
    greedy = rewards(flat(bench.groups(1, branch="greedy")))
    responses = set_advantages(
        bench.groups(num_samples), lambda group: [r.reward - greedy[r.id.prompt] for r in group]
    )
    bench.run("remax", num_samples=num_samples).agrees(responses, policy_gradient(responses))


def test_opo(bench: Bench) -> None:
    """The optimal baseline is sum(length R) / sum(length)."""

    def optimal(group: Group) -> list[float]:
        baseline = sum(r.length * r.reward for r in group) / sum(r.length for r in group)
        return [r.reward - baseline for r in group]

    responses = set_advantages(bench.groups(8), optimal)
    bench.run("opo").agrees(responses, policy_gradient(responses))


# -- Groups whose size or rewards are the recipe's -------------------------------------------------


@pytest.mark.parametrize("rebalancing", ["equal_treatment", "hardness_weighted"])
def test_dars(bench: Bench, rebalancing: str) -> None:
    """|A| of N responses to a prompt of accuracy u sums to N S(u), where S(u) = 2 u (1 - u).

    A prompt with u below a half gets (target - N S) / S more responses. A is R - u; u counts as
    1 / (2 N) where it is 0.
    """
    right = (1, 4, 8, 0)
    bench.reward_of = lambda id: float(id.k % 2 if id.branch else id.k < right[id.prompt])

    def more(u: float, n: int = 8) -> int:
        u = u or 1 / (2 * n)
        s = 2 * u * (1 - u)
        target = n / 2 if rebalancing == "equal_treatment" else n * (1 - u)
        return 0 if u >= 0.5 else min(math.ceil((target - n * s) / s), 33 - n)

    groups = bench.groups(8)
    counts = [more(fmean(rewards(group))) for group in groups]
    assert counts == ([11, 0, 0, 25] if rebalancing == "equal_treatment" else [24, 0, 0, 25])
    for i, count in enumerate(counts):
        groups[i] += bench.group(i, count, "more")
    responses = set_advantages(varied(groups), lambda group: less_mean(rewards(group)))
    batch = bench.run("dars", rebalancing=rebalancing, max_samples=33)
    batch.agrees(responses, clipped(responses))


def dealt(groups: list[Group], budget: int, most: int, bonus: float) -> list[int]:
    """XRPO: more samples, one by one to the prompt of the highest

    h(n) - h(n + 1) + bonus sqrt(log(1 + T) / n), h(n) = t(n - 1) s / sqrt(n).
    """
    sizes = [len(group) for group in groups]
    deviations = [torch.tensor(rewards(group), dtype=torch.float64).std() for group in groups]

    def half_width(n: int, i: int) -> float:
        return student.ppf(0.975, n - 1) * deviations[i].item() / math.sqrt(n)

    def priority(i: int) -> float:
        gain = half_width(sizes[i], i) - half_width(sizes[i] + 1, i)
        return gain + bonus * math.sqrt(math.log(1 + sum(sizes)) / sizes[i])

    for _ in range(budget):
        sizes[max((i for i in range(4) if sizes[i] < most), key=priority)] += 1
    return [size - len(group) for size, group in zip(sizes, groups, strict=True)]


# With 8 samples a round a prompt's turn hangs on every digit of T; at most 6 binds.
@pytest.mark.parametrize(("budget", "most"), [(8, 32), (4, 6)])
@pytest.mark.parametrize(("weight", "bound"), [(0.5, 0.5), (2.0, 0.2), (0.0, 0.5)])
def test_xrpo(bench: Bench, budget: int, most: int, weight: float, bound: float) -> None:
    """Two rounds of allocation, and right responses that were unlikely gain; formulas as cited in
    `by_uncertainty` and `novelty_sharpened`.
    """
    groups = bench.groups(4)
    for branch in ("more1", "more2"):
        for prompt, count in enumerate(dealt(groups, budget, most, 0.5)):
            groups[prompt] += bench.group(prompt, count, branch=branch)

    def sharpened(group: Group) -> list[float]:
        likelihoods = [r.log_probs.mean().item() for r in group]
        gains = [weight * max(0.0, 1 - math.exp(s)) for s in less_mean(likelihoods)]
        plain = zip(standardised(rewards(group)), gains, strict=True)
        return [a + min(gain, bound * a) if a > 0 else a for a, gain in plain]

    responses = set_advantages(varied(groups), sharpened)
    keys = {"round_samples": budget, "max_samples": most, "exploration": 0.5}
    batch = bench.run("xrpo", novelty=weight, novelty_bound=bound, **keys)
    batch.agrees(responses, clipped(responses))


@pytest.mark.parametrize("reshaping", [False, True])
def test_ttrl(bench: Bench, reshaping: bool) -> None:
    """Section 2.2: the reward is to agree with the majority. ETTRL (arXiv 2508.11356): A times
    1 + (mean H - H) / mean H, H being the mean of -log p.
    """
    # Of a tie the first sample's wins; no answer (-) has no vote; a unanimous group is left out.
    answers = ("abacabadabacabad", "babaabbabaabbaba", "aaaaaaaaaaaaaaaa", "------ab-b------")
    bench.answer_of = lambda id: answers[id.prompt][id.k].strip("-")

    def voted(group: Group) -> list[float]:
        winner = "abab"[group[0].id.prompt]
        plain = standardised([float(r.answer == winner) for r in group])
        if not reshaping:
            return plain
        surprises = [-r.log_probs.mean().item() for r in group]
        mean = fmean(surprises)
        return [a * (1 + (mean - h) / mean) for a, h in zip(plain, surprises, strict=True)]

    groups = bench.groups(16)
    responses = set_advantages([*groups[:2], groups[3]], voted)
    batch = bench.run("ttrl", entropy_reshaping=reshaping)
    batch.agrees(responses, clipped(responses))
    if reshaping:  # the advantage has H over H alone, whatever its sign
        surprises = [-r.log_probs.mean().item() for r in responses]
        assert batch.scalar("surprise") == pytest.approx(surprises)


# -- Rewards and advantages per token --------------------------------------------------------------


def token_rewards(r: Response, last: float, kl_coef: float) -> Tensor:
    """InstructGPT (arXiv 2203.02155, equation 2): at the end; less beta log(p / q)."""
    needs_last_token_only = torch.arange(1, r.length + 1) == r.length
    return needs_last_token_only * last - kl_coef * (r.log_probs - r.reference_log_probs)


def gae(rewards: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """arXiv 1506.02438, equation 16: the sum over l of (gamma lam)^l delta_(t+l)."""
    delta = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    steps = torch.arange(len(delta))
    powers = (gamma * lam) ** (steps - steps[:, None]).clamp(min=0)
    return (powers.triu() * delta).sum(1)


def values_agree(
    batch: TrainedBatch, responses: Group, raw: list[Tensor], of: str = "", clip: float = 0.2
) -> None:
    """The critic learns A + V, with values clipped around the old ones (arXiv 2005.12729, section
    3).
    """
    new = [getattr(r, f"new_{of}values") for r in responses]
    old = [getattr(r, f"{of}values") for r in responses]
    returns = [a + v for a, v in zip(raw, old, strict=True)]
    near = [x.clamp(v - clip, v + clip) for x, v in zip(new, old, strict=True)]
    errors = [
        torch.max((x - y).square(), (z - y).square()) / 2
        for x, y, z in zip(new, returns, near, strict=True)
    ]
    batch.agrees(responses, token_mean(errors), f"{of}critic", returns=returns)


@pytest.mark.parametrize("keys", [{}, {"gamma": 0.9, "lam": 0.7, "kl_coef": 0.5}])
def test_ppo(bench: Bench, keys: dict[str, float]) -> None:
    """arXiv 1707.06347, equations 7 and 11, over advantages whitened."""
    gamma, lam, kl_coef = keys.values() or (1.0, 0.95, 0.02)
    responses = flat(bench.groups(8))
    raw = [gae(token_rewards(r, r.reward, kl_coef), r.values, gamma, lam) for r in responses]
    set_whitened(responses, raw)
    batch = bench.run("ppo", **keys)
    batch.agrees(responses, clipped(responses))
    values_agree(batch, responses, raw)


def test_ppo_follows_a_target_of_its_kl(bench: Bench) -> None:
    """arXiv 1909.08593, section 2.2: the second step has the first one's coefficient, changed."""
    first, second = flat(bench.groups(8)), flat(bench.group(4 + i, 8) for i in range(4))
    kl = fmean((r.log_probs - r.reference_log_probs).sum().item() for r in first)
    error = max(-0.2, min(0.2, kl / 0.5 - 1))
    coef = 0.1 * (1 + error * len(first) / 100)
    raw = [gae(token_rewards(r, r.reward, coef), r.values) for r in second]
    keys = {"kl_coef": 0.1, "kl_target": 0.5, "kl_horizon": 100.0}
    batch = bench.run("ppo", steps=2, value_clip=None, critic_warmup=2, **keys)
    values_agree(batch, second, raw, clip=math.inf)
    assert {name for name, _ in batch.updates} == {"update_critic"}, "the actor still waits"


@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce_pp(bench: Bench, group_baseline: bool) -> None:
    """The reward less beta times the KL of this token and all after it, normalized over the batch.
    The variant with baseline takes the mean of the prompt's rewards off first.
    """
    groups = bench.groups(4)
    lasts = [x for g in groups for x in (less_mean if group_baseline else list)(rewards(g))]
    responses = flat(groups)
    at_token = [token_rewards(r, x, 0.01) for r, x in zip(responses, lasts, strict=True)]
    set_whitened(responses, [x.flip(0).cumsum(0).flip(0) for x in at_token])
    bench.run("reinforce_pp", group_baseline=group_baseline).agrees(responses, clipped(responses))


def test_safe_rlhf(bench: Bench) -> None:
    """The multiplier m by equation 31; advantages (A_R - m A_C) / (1 + m) by equation 30; half of
    the KL penalty in the reward, half in the cost.
    """
    responses = flat(bench.groups(8))
    m = math.exp(math.log(0.5) + 0.3 * 0.5 * (fmean(r.cost for r in responses) - 0.1))
    of_reward = [gae(token_rewards(r, r.reward, 0.02 / 2), r.values) for r in responses]
    of_cost = [gae(token_rewards(r, r.cost, -0.02 / 2), r.cost_values) for r in responses]
    joined = zip(of_reward, of_cost, strict=True)
    set_whitened(responses, [(a - m * c) / (1 + m) for a, c in joined])
    batch = bench.run("safe_rlhf", multiplier=0.5, multiplier_lr=0.3, threshold=0.1)
    batch.agrees(responses, clipped(responses))
    values_agree(batch, responses, of_reward)
    values_agree(batch, responses, of_cost, of="cost_")


# -- Without rewards -------------------------------------------------------------------------------

MEANS = pytest.mark.parametrize(
    ("normalize", "mean"), [("token", token_mean), ("sequence", response_mean)]
)


@MEANS
def test_distill(bench: Bench, normalize: str, mean: Callable[..., Tensor]) -> None:
    """Half of log(p / q) squared: its gradient is log(p / q) grad log p, that of the reverse KL."""
    responses = flat(bench.groups(4))
    loss = mean([(r.new_log_probs - r.teacher_log_probs).square() / 2 for r in responses])
    bench.run("distill", normalize=normalize).agrees(responses, loss)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": lambda p, q: q * (q / p).log(),
    "reverse_kl": lambda p, q: p * (p / q).log(),
    "jsd": lambda p, q: (p * (2 * p / (p + q)).log() + q * (2 * q / (p + q)).log()) / 2,
}


@pytest.mark.parametrize(
    "run",
    [
        lambda bench, keys: bench.run("distill_topk", **keys),
        lambda bench, keys: bench.run("self_distill", **keys),
    ],
    ids=["distill_topk", "self_distill"],
)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@MEANS
def test_distill_on_the_likeliest_tokens(
    bench: Bench,
    run: Callable[..., TrainedBatch],
    divergence: str,
    normalize: str,
    mean: Callable[..., Tensor],
) -> None:
    """Over the teacher's tokens and the rest as one (GKD, arXiv 2306.13649, section 3)."""
    responses = flat(bench.groups(4))

    def terms(r: Response) -> Tensor:
        p, q = r.new_candidate_log_probs.exp(), r.teacher_top_log_probs.exp()
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
        return DIVERGENCES[divergence](p, q).sum(-1)

    keys = {"top_k": 4, "divergence": divergence, "normalize": normalize}
    batch = run(bench, keys)
    batch.agrees(responses, mean([terms(r) for r in responses]))


@MEANS
def test_sft(bench: Bench, normalize: str, mean: Callable[..., Tensor]) -> None:
    """Maximum likelihood."""
    responses = flat(bench.groups(1))
    bench.run("sft", normalize=normalize).agrees(
        responses, mean([-r.new_log_probs for r in responses])
    )
