"""ReMax: REINFORCE with the greedy response's reward as baseline (arXiv 2310.10505)."""

from dataclasses import dataclass

from hybridrl.algorithms import advantages, losses
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class ReMaxConfig:
    """Settings of ReMax."""

    num_samples: int = bounded(1, least=1)
    """Samples per prompt, besides the greedy one."""


@recipe("remax")
def remax(flow: Flow, cfg: ReMaxConfig) -> None:
    """Sample, answer greedily too, and learn from the difference of the rewards."""
    greedy = flow.reward.score(flow.actor.generate(flow.prompts, greedy=True, name="greedy"))
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.num_samples)
    samples = flow.reward.score(samples).join(greedy, "greedy_")
    samples = samples.by_group(advantages.greedy_baseline, ("reward", "greedy_reward"))
    # A response is one action: its log-probability is the sum over its tokens.
    flow.actor.update(samples, loss=losses.ReinforceLoss(normalize="constant"))
