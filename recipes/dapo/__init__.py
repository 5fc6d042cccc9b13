"""DAPO: decoupled clip and dynamic sampling (Yu et al., arXiv 2503.14476, section 3)."""

from dataclasses import dataclass
from functools import partial

from hybridrl.algorithms import advantages, losses
from hybridrl.algorithms.rewards import has_spread, overlong_shaped
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class DAPOConfig(RolloutCorrection):
    """Settings of DAPO."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt; the paper takes 16."""
    max_rounds: int = bounded(10, least=1)
    """Rounds of prompts that a step may ask for, until it has trainer.prompts_per_step groups whose
    rewards differ. After them it trains on the groups that it has."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.28, least=0)
    """The ratio is clipped above at 1 + clip_high: unlikely tokens may become likely."""
    max_tokens: int = bounded(256, least=1)
    """The longest response: rollout.max_new_tokens."""
    overlong_share: float = bounded(0.2, least=0, most=1)
    """The last share of max_tokens, where a response loses up to overlong_penalty; 0: none."""
    overlong_penalty: float = bounded(1.0, least=0)
    """The penalty of a response of max_tokens."""


@recipe("dapo")
def dapo(flow: Flow, cfg: DAPOConfig) -> None:
    """Sample until enough groups have a learning signal, and clip less where tokens grow."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples)
    # Dynamic sampling (3.2).
    samples = samples.filter(has_spread).take(max_rounds=cfg.max_rounds, allow_fewer=True)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    # Soft overlong punishment (3.4).
    judged_by = "reward"
    if cfg.overlong_share and cfg.overlong_penalty:
        shape = partial(
            overlong_shaped,
            max_tokens=cfg.max_tokens,
            buffer_tokens=max(1, round(cfg.overlong_share * cfg.max_tokens)),
            penalty=cfg.overlong_penalty,
        )
        samples = samples.map(len, ("log_probs",), scalars=("length",))
        samples = samples.by_group(shape, ("reward", "length"), ("shaped_reward",))
        judged_by = "shaped_reward"
    samples = samples.by_group(advantages.group_relative, (judged_by,))
    # Clip-higher (3.1), every token of the batch alike (3.3).
    loss = losses.ClippedLoss(
        clip_low=cfg.clip_low, clip_high=cfg.clip_high, normalize="token", **stale
    )
    flow.actor.update(samples, loss=loss)
