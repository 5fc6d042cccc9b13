"""Whitening of per-token advantages over the whole batch, which several recipes share."""

from hybridrl.algorithms import critic
from hybridrl.flow import Stream


def whitened(samples: Stream, field: str, output: str = "advantages") -> Stream:
    """The stream with the tensor `output`: `field` less the batch's mean, over its deviation.

    The tensors stay where they are; moments of each response travel to the driver and back.
    """
    moments, whole = ("num_tokens", "mean", "squares"), ("batch_mean", "batch_scale")
    samples = samples.map(critic.moments, (field,), scalars=moments)
    samples = samples.by_batch(critic.whitening, moments, whole)
    return samples.map(critic.whiten, (field, *whole), (output,))
