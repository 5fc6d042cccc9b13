"""Settings that recipes with a probability ratio share: the old policy, and rollout correction.

A recipe's config derives from `RolloutCorrection`, and the recipe calls `add_old_log_probs` once.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hybridrl.algorithms.corrections import (
    Correction,
    CorrectionLevel,
    CorrectionRule,
    StepScale,
)
from hybridrl.config import ConfigError, bounded
from hybridrl.flow import Flow, Stream


class OldLogProbs(Enum):
    """The source of the old log-probabilities in the ratio."""

    rollout = "rollout"  # the rollout engine's, as sampled: no extra pass
    trainer = "trainer"  # recomputed by the train engine before the update
    ewma = "ewma"  # those of a moving average of the policy (PPO-EWMA)


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """The old policy of the ratio, and the weights of samples from another policy.

    `old_log_probs=trainer weights=truncate` is the decoupled PPO of AReaL (arXiv 2505.24298,
    equation 5) with bounded weights. The ratio is clipped around the policy before the update; the
    weight leads there from the policy that sampled. `old_log_probs=ewma weights=truncate` is
    PPO-EWMA (arXiv 2110.00641, section 3): the ratio is clipped around an average of policies.
    """

    old_log_probs: OldLogProbs = OldLogProbs.rollout
    """The source of the old policy's log-probabilities: rollout, trainer or ewma."""
    ewma_decay: float = bounded(0.9, above=0, below=1)
    """old_log_probs=ewma: decay of the average at an optimizer step."""
    weights: CorrectionRule = CorrectionRule.none
    """Weigh the policy loss by the old policy's / rollout's probability: none, truncate or mask."""
    level: CorrectionLevel = CorrectionLevel.token
    """One weight a token, or one a sequence."""
    bound: float = bounded(2.0, above=1)
    """The bound at which weights are truncated or masked."""
    step_scale: StepScale = StepScale.none
    """Take smaller steps where stale samples are worth fewer (VCPO, arXiv 2602.17616)."""

    def make_correction(self) -> Correction | None:
        """The `Correction` of the settings; raises ConfigError for an impossible one."""
        if self.weights is CorrectionRule.none:
            return None
        if self.old_log_probs is OldLogProbs.rollout:
            allowed = "none, or recipe.correction.old_log_probs=trainer or ewma with it"
            raise ConfigError("recipe.correction.weights", self.weights.value, allowed)
        return Correction(rule=self.weights, level=self.level, bound=self.bound)


@dataclass(kw_only=True, slots=True)
class RolloutCorrection:
    """The settings that recipes with a ratio to an old policy share."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """The old policy, and what samples from another policy count."""


def add_old_log_probs(
    flow: Flow, samples: Stream, cfg: RolloutCorrection
) -> tuple[Stream, dict[str, Any]]:
    """The stream with the `old_log_probs` and `rollout_weights` of `cfg`, and arguments of a
    `PolicyLoss`.
    """
    settings = cfg.correction
    correction = settings.make_correction()
    if settings.old_log_probs is OldLogProbs.trainer:
        samples = flow.actor.log_probs(samples)
    elif settings.old_log_probs is OldLogProbs.ewma:
        average = flow.copy(flow.actor, update="ewma", decay=settings.ewma_decay)
        samples = average.log_probs(samples, name="old_log_probs")
    if correction:
        fields = ("old_log_probs", "log_probs")
        samples = samples.map(correction, fields, ("rollout_weights",), name="correction")
    return samples, {"correction": correction, "step_scale": settings.step_scale}
