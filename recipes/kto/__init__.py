"""KTO: responses that are wanted or not, without pairs (Ethayarajh et al., arXiv 2402.01306)."""

from dataclasses import dataclass

from hybridrl.algorithms import preference_losses
from hybridrl.config import bounded
from hybridrl.flow import Flow, Stream, recipe
from hybridrl.recipes.reference import add_reference


@dataclass(kw_only=True, slots=True)
class KTOConfig:
    """Settings of KTO."""

    beta: float = bounded(0.1, above=0)
    """Scale of log(p / p_reference): larger stays nearer."""
    desirable_weight: float = bounded(1.0, least=0)
    """Weight of the chosen responses."""
    undesirable_weight: float = bounded(1.0, least=0)
    """Weight of the rejected ones."""
    unpaired: bool = False
    """A row has one response, its answer, which is wanted where the reward is above 0."""


@recipe("kto")
def kto(flow: Flow, cfg: KTOConfig) -> None:
    """Raise wanted responses above what any response gains, and lower the others below it."""
    if cfg.unpaired:
        samples = flow.reward.score(with_other(flow, None))
        samples = samples.map(preference_losses.reward_sign, ("reward",), scalars=("sign",))
    else:
        sides = [with_other(flow, column) for column in ("chosen", "rejected")]
        samples = sides[0].pair(sides[1])
        samples = samples.map(preference_losses.desirability, ("side",), scalars=("sign",))
    samples = samples.by_batch(preference_losses.reference_point, ("other_log_ratio",), ("kl",))
    samples = add_reference(flow, samples, None)
    loss = preference_losses.KTOLoss(
        beta=cfg.beta,
        desirable_weight=cfg.desirable_weight,
        undesirable_weight=cfg.undesirable_weight,
    )
    flow.actor.update(samples, loss=loss)


def with_other(flow: Flow, column: str | None) -> Stream:
    """A column's responses with `other_log_ratio`, that of the next prompt's response after the
    same prompt. None is the column of the answers.
    """
    name = f"other_{column or 'answer'}"
    other = flow.targets(column, name=name, of_next=True)
    other = flow.reference.log_probs(flow.actor.log_probs(other))
    fields = ("old_log_probs", "reference_log_probs")
    other = other.map(preference_losses.log_ratio, fields, scalars=("log_ratio",))
    return flow.targets(column).join(other, "other_", name=f"join_{name}")
