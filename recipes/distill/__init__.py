"""On-policy distillation: the student samples, the teacher says how likely that was for it."""

from dataclasses import dataclass

from hybridrl.algorithms.distill import DistillLoss
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class DistillConfig:
    """Settings of on-policy distillation; the teacher is `teacher.path`."""

    num_samples: int = bounded(4, least=1)
    """Samples per prompt."""
    normalize: str = "token"
    """Mean over all tokens (token), or over responses of their mean (sequence)."""


@recipe("distill")
def distill(flow: Flow, cfg: DistillConfig) -> None:
    """Lower the reverse KL to the teacher on the student's own samples."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.num_samples)
    samples = flow.teacher.log_probs(samples)
    flow.actor.update(samples, loss=DistillLoss(normalize=cfg.normalize))
