"""The reference policy of a KL term: the initial policy, or a moving average of policies."""

from hybridrl.flow import Flow, Stream


def add_reference(flow: Flow, samples: Stream, decay: float | None) -> Stream:
    """The stream with `reference_log_probs`, by the initial policy.

    With a `decay`, the recipe's `reference_ema_decay`, by a moving average of the policy: after an
    optimizer step it is decay * average + (1 - decay) * policy (the soft update of TR-DPO,
    arXiv 2404.09656; the anchor of WARP, arXiv 2406.16768).
    """
    if decay is None:
        return flow.reference.log_probs(samples)
    average = flow.copy(flow.actor, update="ewma", decay=decay, name="average_reference")
    return average.log_probs(samples, name="reference_log_probs")
