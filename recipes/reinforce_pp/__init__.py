"""REINFORCE++: no critic, advantages normalized over the whole batch (arXiv 2501.03262)."""

from dataclasses import dataclass
from functools import partial

import torch

from hybridrl.algorithms import advantages, critic, losses
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.reference import add_reference
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs
from hybridrl.recipes.turn_credit import add_turn_credit
from hybridrl.recipes.whiten import whitened


@dataclass(kw_only=True, slots=True)
class ReinforcePPConfig(RolloutCorrection):
    """Settings of REINFORCE++."""

    num_samples: int = bounded(4, least=1)
    """Samples per prompt."""
    group_baseline: bool = False
    """Take the mean of a prompt's rewards off first: REINFORCE++ with baseline."""
    turn_rewards: bool = False
    """Each turn of a conversation has what it earned, at its last token; the end has the rest."""
    kl_coef: float = bounded(0.01, least=0)
    """The penalty, in reward, of a token's nat of log p / p_reference; 0 needs no reference."""
    reference_ema_decay: float | None = bounded(None, above=0, below=1)
    """Decay of an averaged reference at an optimizer step; null: the policy at start."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""


@recipe("reinforce_pp")
def reinforce_pp(flow: Flow, cfg: ReinforcePPConfig) -> None:
    """Sample, charge tokens for leaving the reference, normalize over the batch, clip."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.num_samples, turns=cfg.turn_rewards)
    samples = flow.reward.score(samples)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    reward = "reward"
    if cfg.group_baseline:
        reward = "centered_reward"
        centered = partial(advantages.group_relative, std_normalize=False)
        samples = samples.by_group(centered, ("reward",), (reward,))
    against = "log_probs"
    if cfg.kl_coef:
        samples = add_reference(flow, samples, cfg.reference_ema_decay)
        against = "reference_log_probs"
    samples, reward = add_turn_credit(samples, reward, cfg.turn_rewards)
    function = partial(to_go, kl_coef=cfg.kl_coef)
    samples = samples.map(function, (reward, "log_probs", against), ("return_to_go",))
    samples = whitened(samples, "return_to_go")
    loss = losses.ClippedLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, **stale)
    flow.actor.update(samples, loss=loss)


def to_go(
    reward: float | torch.Tensor,
    log_probs: torch.Tensor,
    reference: torch.Tensor,
    *,
    kl_coef: float,
) -> torch.Tensor:
    """Reward to go [response_tokens], undiscounted."""
    return critic.discounted(critic.token_rewards(reward, log_probs, reference, kl_coef))
