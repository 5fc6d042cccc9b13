"""Proximal policy optimization with a critic (arXiv 1707.06347), as RLHF has it (arXiv 2203.02155).

InstructGPT's reward is that of the reward model at the last token, less a KL penalty to the
reference at every token (section 3.5). The critic's values turn it into an advantage per token.
"""

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch

from hybridrl.algorithms import KL_ESTIMATORS, critic, losses, resolve
from hybridrl.algorithms.control import AdaptiveKL
from hybridrl.config import ConfigError, bounded
from hybridrl.flow import Flow, Stream, recipe
from hybridrl.recipes.reference import add_reference
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs
from hybridrl.recipes.turn_credit import add_turn_credit
from hybridrl.recipes.whiten import whitened


@dataclass(kw_only=True, slots=True)
class PPOConfig(RolloutCorrection):
    """Settings of PPO; passes and mini-batches are `trainer.epochs` and `trainer.mini_batches`."""

    num_samples: int = bounded(8, least=1)
    """Samples per prompt."""
    gamma: float = bounded(1.0, least=0, most=1)
    """Discount of a token's reward per token before it."""
    lam: float = bounded(0.95, least=0, most=1)
    """Lambda of the advantage estimate: 0 trusts the critic alone, 1 the rewards alone."""
    kl_coef: float = bounded(0.02, least=0)
    """Weight of the KL penalty in the reward; 0 needs no reference."""
    kl: str = "k1"
    """Estimator of that KL: k1, k2 or k3."""
    kl_target: float | None = bounded(None, above=0)
    """Distance from the reference, nats per response, that `kl_coef` adapts to; null: it stays."""
    kl_horizon: float = bounded(10000.0, above=0)
    """Responses in which it adapts: n of them change it by at most a fifth of n / kl_horizon."""
    reference_ema_decay: float | None = bounded(None, above=0, below=1)
    """Decay of an averaged reference at an optimizer step; null: the policy at start."""
    clip: float = bounded(0.2, above=0, most=1)
    """The ratio is clipped to 1 - clip and 1 + clip."""
    value_clip: float | None = bounded(0.2, above=0)
    """Values are clipped to this distance from their old ones; null: not clipped."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalize: str = "token"
    """Weights of the policy's tokens: token, sequence or constant."""
    turn_rewards: bool = False
    """Each turn of a conversation has what it earned, at its last token; the end has the rest."""
    critic_warmup: int = bounded(0, least=0)
    """Steps at the beginning in which the critic alone is trained."""

    def __post_init__(self) -> None:
        resolve(KL_ESTIMATORS, "recipe.kl", self.kl)  # which otherwise the ranks are first to do
        if self.kl_target is not None and not self.kl_coef:
            raise ConfigError("recipe.kl_target", self.kl_target, "null with kl_coef=0: 0 stays 0")


@recipe("ppo")
def ppo(flow: Flow, cfg: PPOConfig) -> None:
    """Sample, judge, compare with the critic's values; train both."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.num_samples, turns=cfg.turn_rewards)
    samples = flow.reward.score(samples)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = add_token_rewards(flow, samples, cfg)
    samples = flow.critic.values(samples)
    samples = add_advantages(samples, cfg)
    flow.critic.update(samples, loss=critic.ValueLoss(clip=cfg.value_clip))
    loss = losses.ClippedLoss(
        clip_low=cfg.clip,
        clip_high=cfg.clip,
        entropy_coef=cfg.entropy_coef,
        normalize=cfg.normalize,
        **stale,
    )
    flow.actor.update(samples, loss=loss, after=cfg.critic_warmup)


def add_token_rewards(flow: Flow, samples: Stream, cfg: PPOConfig) -> Stream:
    """The reward at the last token, or the turns' last ones, less the KL penalty at every token."""
    samples, fields, penalty = add_kl(flow, samples, cfg)
    samples, reward = add_turn_credit(samples, "reward", cfg.turn_rewards)
    function = partial(critic.token_rewards, **penalty)
    return samples.map(function, (reward, *fields), ("token_rewards",))


def add_kl(
    flow: Flow, samples: Stream, cfg: PPOConfig
) -> tuple[Stream, tuple[str, ...], dict[str, Any]]:
    """Each response's distance `kl` from the reference, in nats.

    Also gives the inputs of a penalty: fields (the log-probabilities of policy and reference, and
    a coefficient that changes), and settings.
    """
    fields = ("log_probs", "log_probs")  # the policy has no KL of itself
    if cfg.kl_coef:
        samples = add_reference(flow, samples, cfg.reference_ema_decay)
        fields = ("log_probs", "reference_log_probs")
    samples = samples.map(distance, fields, scalars=("kl",))
    if cfg.kl_target is None:
        return samples, fields, {"kl": cfg.kl, "kl_coef": cfg.kl_coef}
    state = flow.state("kl_coef", cfg.kl_coef)
    adapt = AdaptiveKL(target=cfg.kl_target, horizon=cfg.kl_horizon)

    def follow(kl: list[float]) -> list[float]:
        coef = state.get()
        state.set(adapt(coef, fmean(kl), len(kl)))  # for the next step
        return [coef] * len(kl)

    samples = samples.by_batch(follow, ("kl",), ("kl_coef",), name="kl_coef")
    return samples, (*fields, "kl_coef"), {"kl": cfg.kl}


def add_advantages(samples: Stream, cfg: PPOConfig) -> Stream:
    """Advantages by GAE, whitened over the batch, and the returns that the critic learns."""
    samples = samples.map(
        partial(critic.gae, gamma=cfg.gamma, lam=cfg.lam),
        inputs=("token_rewards", "values"),
        outputs=("raw_advantages", "returns"),
    )
    return whitened(samples, "raw_advantages")


def distance(log_probs: torch.Tensor, reference: torch.Tensor) -> float:
    """The sum of log p - log p_reference over one response."""
    return (log_probs - reference).sum().item()
