"""Seconds of weights that go from training ranks to ranks that generate alone.

Training ranks write the model once, in the generation dtype, into host memory. Each generation rank
then takes its shard over the network and onto its device.
"""

from dataclasses import dataclass

from hybridrl.costs.devices import Accelerator


@dataclass(frozen=True, slots=True)
class PushCosts:
    """Seconds in which training ranks push their weights, and in which an instance loads them."""

    push_s: float = 0.0
    load_s: float = 0.0


def push_costs(
    nbytes: float,
    accelerator: Accelerator,
    *,
    train_ranks: int,
    instance_ranks: int,
    instances: int,
) -> PushCosts:
    """The seconds for a model of `nbytes`, which `instances` of so many ranks load at once.

    The network's bound is the busier side: a generation rank takes in its shard, and training ranks
    together send the model to every instance.
    """
    shard = nbytes / instance_ranks
    busiest = max(shard, nbytes * instances / train_ranks)
    return PushCosts(
        push_s=nbytes / train_ranks / accelerator.host_bytes_per_s,
        load_s=busiest / accelerator.network_bytes_per_s + shard / accelerator.host_bytes_per_s,
    )
