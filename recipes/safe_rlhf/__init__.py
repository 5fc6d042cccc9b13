"""Safe RLHF: reward under a bound on the mean cost (Dai et al., arXiv 2310.12773).

PPO with two judges and two critics. A Lagrange multiplier weighs the cost: it grows while the mean
cost of responses is above the threshold, and falls below it (equations 30 and 31).
"""

from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch

from hybridrl.algorithms import critic, losses
from hybridrl.algorithms.control import Multiplier, with_cost
from hybridrl.config import ConfigError, bounded
from hybridrl.flow import Flow, Stream, recipe
from hybridrl.recipes.ppo import PPOConfig, add_kl
from hybridrl.recipes.rollout_correction import add_old_log_probs
from hybridrl.recipes.whiten import whitened


@dataclass(kw_only=True, slots=True)
class SafeRLHFConfig(PPOConfig):
    """Settings of Safe RLHF, besides those of PPO; the cost is `cost.*`."""

    threshold: float = 0.0
    """The mean cost that responses may have."""
    multiplier: float = bounded(1.0, above=0)
    """The multiplier at the beginning; above 0, since 0 stays 0."""
    multiplier_lr: float = bounded(0.1, least=0)
    """Step of its logarithm per unit of cost."""
    multiplier_max: float | None = bounded(5.0, above=0)
    """Its largest value; null: none."""

    def __post_init__(self) -> None:
        PPOConfig.__post_init__(self)
        if self.turn_rewards:
            raise ConfigError("recipe.turn_rewards", True, "false, or recipe=ppo, reinforce_pp")
        if self.multiplier_max is not None and self.multiplier > self.multiplier_max:
            allowed = f"at most recipe.multiplier_max={self.multiplier_max}"
            raise ConfigError("recipe.multiplier", self.multiplier, allowed)


@recipe("safe_rlhf")
def safe_rlhf(flow: Flow, cfg: SafeRLHFConfig) -> None:
    """Sample, judge twice, weigh the cost by the multiplier; train the policy and both critics."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.num_samples)
    samples = flow.reward.score(samples)
    samples = flow.cost.score(samples)
    samples = add_multiplier(flow, samples, cfg)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = add_token_rewards(flow, samples, cfg)
    samples = flow.critic.values(samples)
    samples = flow.cost_critic.values(samples)
    samples = add_advantages(samples, cfg)
    value_loss = critic.ValueLoss(clip=cfg.value_clip)
    flow.critic.update(samples, loss=value_loss)
    of_costs = {"values": "cost_values", "returns": "cost_returns"}
    flow.cost_critic.update(samples, loss=value_loss, fields=of_costs)
    loss = losses.ClippedLoss(
        clip_low=cfg.clip,
        clip_high=cfg.clip,
        entropy_coef=cfg.entropy_coef,
        normalize=cfg.normalize,
        **stale,
    )
    flow.actor.update(samples, loss=loss, after=cfg.critic_warmup)


def add_multiplier(flow: Flow, samples: Stream, cfg: SafeRLHFConfig) -> Stream:
    """The multiplier, as the batch's mean cost has changed it, as a field of every sample."""
    state = flow.state("multiplier", cfg.multiplier)
    grow = Multiplier(lr=cfg.multiplier_lr, threshold=cfg.threshold, maximum=cfg.multiplier_max)

    def follow(costs: list[float]) -> list[float]:
        state.set(grow(state.get(), fmean(costs)))
        return [state.get()] * len(costs)

    return samples.by_batch(follow, ("cost",), ("multiplier",), name="multiplier")


def add_token_rewards(flow: Flow, samples: Stream, cfg: SafeRLHFConfig) -> Stream:
    """Rewards and costs at the last token; at every token each has half of the KL penalty."""
    samples, fields, penalty = add_kl(flow, samples, cfg)
    function = partial(penalized, **penalty)
    return samples.map(function, ("reward", "cost", *fields), ("token_rewards", "token_costs"))


def add_advantages(samples: Stream, cfg: SafeRLHFConfig) -> Stream:
    """Advantages of reward and cost by GAE, joined, then whitened; the returns of both."""
    samples = samples.map(
        partial(estimate, gamma=cfg.gamma, lam=cfg.lam),
        inputs=("token_rewards", "values", "token_costs", "cost_values", "multiplier"),
        outputs=("raw_advantages", "returns", "cost_returns"),
    )
    return whitened(samples, "raw_advantages")


def penalized(
    reward: float,
    cost: float,
    log_probs: torch.Tensor,
    reference: torch.Tensor,
    kl_coef: float,
    kl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and costs of one response, which share the KL penalty."""
    rewards = critic.token_rewards(reward, log_probs, reference, kl_coef / 2, kl=kl)
    costs = critic.token_rewards(cost, log_probs, reference, -kl_coef / 2, kl=kl)
    return rewards, costs


def estimate(
    rewards: torch.Tensor,
    values: torch.Tensor,
    costs: torch.Tensor,
    cost_values: torch.Tensor,
    multiplier: float,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Joined advantages of one response, and both returns."""
    of_reward, returns = critic.gae(rewards, values, gamma=gamma, lam=lam)
    of_cost, cost_returns = critic.gae(costs, cost_values, gamma=gamma, lam=lam)
    return with_cost(of_reward, of_cost, multiplier), returns, cost_returns
