"""What FSDP gathers at once, and for how long, by the model's size.

One rule for the engine that does it and for what plans its memory and its seconds.
"""

ONE_GROUP_PARAMETERS = 32 * 2**20
"""Up to this size hooks per layer cost more than they hide."""
KEPT_PARAMETERS = 512 * 2**20
"""Weights and gradients of such a model are at most 4 GiB a rank."""


def is_one_group(parameters: int) -> bool:
    """Whether a pipeline chunk of a model of `parameters` is one group, not one for each layer."""
    return parameters <= ONE_GROUP_PARAMETERS


def stays_unsharded(parameters: int, pp: int) -> bool:
    """Whether weights stay gathered from the first micro-batch of an update to the last.

    So an update has one all-gather and one reduce-scatter of each weight. Larger models without a
    pipeline gather each layer anew, for each micro-batch and in the backward pass. A pipeline has
    many micro-batches in flight, and would gather them for each.
    """
    return parameters <= KEPT_PARAMETERS or pp > 1
