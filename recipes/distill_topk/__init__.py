"""On-policy distillation on the teacher's likeliest tokens: a divergence in place of one sample."""

from dataclasses import dataclass

from hybridrl.algorithms.distill import Divergence, TopKDistillLoss
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class TopKDistillConfig:
    """Settings of distillation on top-k log-probabilities; the teachers are in `teacher`."""

    num_samples: int = bounded(4, least=1)
    """Samples per prompt."""
    top_k: int = bounded(32, least=1)
    """The teacher's likeliest tokens at each position; all others together are one more."""
    divergence: Divergence = Divergence.reverse_kl
    """forward_kl, reverse_kl or jsd, of student and teacher at each token."""
    normalize: str = "token"
    """Mean over all tokens (token), or over responses of their mean (sequence)."""


@recipe("distill_topk")
def distill_topk(flow: Flow, cfg: TopKDistillConfig) -> None:
    """Lower a divergence from the teacher on the student's own samples."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.num_samples)
    samples = flow.teacher.top_log_probs(samples, cfg.top_k)
    loss = TopKDistillLoss(top_k=cfg.top_k, divergence=cfg.divergence, normalize=cfg.normalize)
    flow.actor.update(samples, loss=loss)
