"""Actor-critic algorithms: rewards and advantages per token, their whitening, the value loss.

Functions of one response are for `Stream.map`. They take and return tensors [response_tokens] and
scalars, and run on the rank that holds the tensors. Only scalars cross samples: the driver gets
`moments` of each response, `whitening` joins them there (`by_batch`), and `whiten` applies the
result on the rank. So results do not depend on the placement of samples.

A `mask` [response_tokens] is False for tokens that the policy did not write (an environment did):
they are skipped. None: all are the policy's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import torch

from hybridrl.algorithms import KL_ESTIMATORS, resolve
from hybridrl.algorithms.losses import CheckedLoss, Fields
from hybridrl.config import ConfigError


def turn_credit(reward: float, turn: torch.Tensor, turn_rewards: torch.Tensor) -> torch.Tensor:
    """The reward of a conversation as numbers [response_tokens], which sum to it.

    A turn's last token has what the turn has earned (`turn_rewards` [turns]), the response's last
    one the rest. `turn` [response_tokens] are the numbers of the turns, without the tokens of
    replies. Tensors are of one response, as `Stream.map` gives them.
    """
    credit = torch.zeros(len(turn))
    if not len(turn):
        return credit
    ends = torch.cat([turn[1:] != turn[:-1], torch.ones(1, dtype=torch.bool)])
    credit[ends] = turn_rewards.to(credit.dtype)[turn[ends].long()]
    credit[-1] += reward - credit.sum()
    return credit


def token_rewards(
    reward: float | torch.Tensor,
    log_probs: torch.Tensor,
    reference_log_probs: torch.Tensor,
    kl_coef: float = 0.0,
    *,
    kl: str = "k1",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rewards [response_tokens] of one response: the reward at its last token, less KL everywhere.

    A `reward` [response_tokens] is where it was earned (`turn_credit`).

    r_t = -kl_coef KL_t + (reward if t is last), with KL_t by the estimator `kl` from the
    log-probabilities of the policy that sampled and of the reference, both [response_tokens]
    (Ziegler et al., arXiv 1909.08593, equation 2; InstructGPT, arXiv 2203.02155, equation 2). A
    cost (Safe-RLHF) takes -kl_coef: there the penalty is added.

    `samples.map(partial(token_rewards, kl_coef=0.05), ("reward", "old_log_probs",
    "reference_log_probs"), ("token_rewards",))`; a coefficient that changes is a scalar field, and
    the fourth input.
    """
    penalties = resolve(KL_ESTIMATORS, "recipe.kl", kl)(log_probs, reference_log_probs)
    rewards: torch.Tensor = -kl_coef * penalties.detach()
    is_own = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    rewards = torch.where(is_own, rewards, 0.0)
    if isinstance(reward, torch.Tensor):
        return rewards + torch.where(is_own, reward.to(rewards.dtype), 0.0)
    if is_own.any():
        rewards[is_own.nonzero()[-1]] += reward
    return rewards


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of one response, all [response_tokens].

    A_t = d_t + gamma lam A_(t+1) with d_t = r_t + gamma V_(t+1) - V_t, V after the end being 0. The
    critic learns the returns A + V (generalized advantage estimation: Schulman et al., arXiv
    1506.02438, equation 16). The recursion runs in float64. Masked tokens have advantage 0 and
    their own value as return.
    """
    is_own = [True] * len(rewards) if mask is None else mask.tolist()
    advantages = [0.0] * len(rewards)
    following = value_after = 0.0
    r, v = rewards.detach().double().tolist(), values.detach().double().tolist()
    for t in reversed(range(len(r))):
        if is_own[t]:
            following = r[t] + gamma * value_after - v[t] + gamma * lam * following
            value_after = v[t]
            advantages[t] = following
    result = torch.tensor(advantages, dtype=torch.float64, device=values.device)
    return result.to(values.dtype), (result + values.detach()).to(values.dtype)


def discounted(
    rewards: torch.Tensor, *, gamma: float = 1.0, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Reward to go of every token, [response_tokens]: sum over t' >= t of gamma^(t'-t) r_t'.

    REINFORCE++ takes it, less nothing, as the advantage before whitening (arXiv 2501.03262).
    """
    return gae(rewards, torch.zeros_like(rewards), gamma=gamma, lam=1.0, mask=mask)[0]


def moments(x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[int, float, float]:
    """Number, mean and sum of squared deviations of a response's tokens, in float64."""
    values = (x if mask is None else x[mask]).detach().double()
    if not values.numel():
        return 0, 0.0, 0.0
    mean = values.mean()
    return values.numel(), mean.item(), (values - mean).square().sum().item()


def whitening(
    counts: Sequence[SupportsFloat],
    means: Sequence[SupportsFloat],
    squares: Sequence[SupportsFloat],
    *,
    eps: float = 1e-8,
) -> tuple[list[float], list[float]]:
    """Mean and scale over all tokens of the batch, from the `moments` of its responses [samples].

    Both are given once per sample, so that they are scalars of the stream. Deviations are added
    about the common mean (Chan, Golub and LeVeque 1979), which loses no digits where the mean is
    far from 0. The scale is 1 / sqrt(unbiased variance + eps), as in verl's `masked_whiten`; with
    less than two tokens it is 0.
    """
    n, m, s = ([float(x) for x in column] for column in (counts, means, squares))
    total = math.fsum(n)
    mean = math.fsum(map(math.prod, zip(n, m, strict=True))) / max(total, 1.0)
    deviations = (b + a * (c - mean) ** 2 for a, b, c in zip(n, s, m, strict=True))
    scale = 1 / math.sqrt(math.fsum(deviations) / (total - 1) + eps) if total > 1 else 0.0
    return [mean] * len(n), [scale] * len(n)


def whiten(x: torch.Tensor, mean: float, scale: float) -> torch.Tensor:
    """(x - mean) scale of one response, [response_tokens]."""
    return ((x.double() - mean) * scale).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class ValueLoss(CheckedLoss):
    """Half the squared error of the critic's values, clipped around the old ones.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 per token (value clipping of
    PPO's reference code; Engstrom et al., arXiv 2005.12729, section 3). `clip` None leaves it out.

    For a model with a value head: its first argument are the values [tokens]. Metrics: `value`,
    `value_clip_fraction`, `value_error`, the squared error without clipping.
    """

    clip: float | None = 0.2
    normalize: str = "token"

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError("recipe.value_clip", self.clip, "above 0, or null")
        super().__post_init__()

    @property
    def fields(self) -> tuple[str, ...]:
        """`returns`; `values`, those of before the update, for clipping."""
        return ("returns", "values") if self.clip is not None else ("returns",)

    def __call__(
        self, values: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """Loss [tokens] and metrics [tokens] of `values` [tokens]."""
        error = (values - fields["returns"]).square()
        metrics = {"value": values.detach(), "value_error": error.detach()}
        if self.clip is None:
            return 0.5 * error, metrics
        old = fields["values"]
        near = values.clamp(old - self.clip, old + self.clip)
        clipped = (near - fields["returns"]).square()
        metrics["value_clip_fraction"] = (clipped > error).detach().to(values.dtype)
        return 0.5 * torch.maximum(error, clipped), metrics
