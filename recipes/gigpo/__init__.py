"""GiGPO: conversations compared as a whole, and turn by turn from the same state."""

from dataclasses import dataclass
from functools import partial

from hybridrl.algorithms import losses, turns
from hybridrl.config import bounded
from hybridrl.flow import Flow, Stream, recipe
from hybridrl.recipes.reference import add_reference
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class GiGPOConfig(RolloutCorrection):
    """Settings of GiGPO (arXiv 2505.10978)."""

    group_size: int = bounded(8, least=2)
    """Conversations per prompt."""
    turn_weight: float = bounded(1.0, least=0)
    """Weight of the turns' advantages beside that of the conversation; 0 is GRPO."""
    gamma: float = bounded(0.95, least=0, most=1)
    """Discount of what later turns earn."""
    std_normalize: bool = True
    """Divide by a group's standard deviation."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""
    kl_coef: float = bounded(0.0, least=0)
    """Weight of the KL term to the reference policy; 0 needs no reference."""
    kl: str = "k3"
    """Estimator of that KL: k1, k2 or k3."""
    normalize: str = "token"
    """Weights of tokens: token, sequence or constant."""


@recipe("gigpo")
def gigpo(flow: Flow, cfg: GiGPOConfig) -> None:
    """Converse in groups, compare wholes and turns, take a clipped step."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size, turns=True)
    samples = flow.reward.score(samples)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    if cfg.kl_coef:
        samples = add_reference(flow, samples, None)
    samples = add_advantages(samples, cfg)
    loss = losses.ClippedLoss(
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        kl_coef=cfg.kl_coef,
        kl=cfg.kl,
        normalize=cfg.normalize,
        **stale,
    )
    flow.actor.update(samples, loss=loss)


def add_advantages(samples: Stream, cfg: GiGPOConfig) -> Stream:
    """One advantage a turn, which all of its tokens have."""
    fields = ("states", "returns")
    followed = partial(turns.turn_returns, gamma=cfg.gamma)
    samples = samples.map(followed, ("reward", "turn_rewards", "turn_state"), scalars=fields)
    compared = partial(
        turns.group_in_group, turn_weight=cfg.turn_weight, std_normalize=cfg.std_normalize
    )
    samples = samples.by_group(compared, ("reward", *fields), ("turn_advantages",))
    return samples.map(turns.of_tokens, ("turn_advantages", "turn"), ("advantages",))
