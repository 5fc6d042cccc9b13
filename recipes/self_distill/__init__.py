"""On-policy self-distillation: the policy that knows the answer teaches the one that does not."""

from dataclasses import dataclass

from hybridrl.algorithms.distill import Divergence, TopKDistillLoss
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class SelfDistillConfig:
    """Settings of self-distillation; what the teacher knows is in `data.privileged_template`."""

    num_samples: int = bounded(4, least=1)
    """Samples per prompt."""
    teacher_ema_decay: float | None = bounded(0.95, above=0, below=1)
    """The teacher is an average of policies, of which so much remains after an optimizer step;
    null: the policy at the start."""
    top_k: int = bounded(32, least=1)
    """The teacher's likeliest tokens at each position; all others together are one more."""
    divergence: Divergence = Divergence.reverse_kl
    """forward_kl, reverse_kl or jsd, of student and teacher at each token."""
    normalize: str = "token"
    """Mean over all tokens (token), or over responses of their mean (sequence)."""


@recipe("self_distill")
def self_distill(flow: Flow, cfg: SelfDistillConfig) -> None:
    """Move the policy towards what it would say if it knew the privileged text."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.num_samples)
    teacher = flow.copy(flow.actor)
    if cfg.teacher_ema_decay is not None:
        teacher = flow.copy(flow.actor, update="ewma", decay=cfg.teacher_ema_decay)
    samples = teacher.top_log_probs(samples, cfg.top_k, privileged=True, name="teacher")
    loss = TopKDistillLoss(top_k=cfg.top_k, divergence=cfg.divergence, normalize=cfg.normalize)
    flow.actor.update(samples, loss=loss)
