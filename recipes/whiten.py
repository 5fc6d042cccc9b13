"""Whitening of per-token advantages over the whole batch, which several recipes share."""

from hybridrl.algorithms import critic
from hybridrl.flow import Stream


def whitened(samples: Stream, field: str, output: str = "advantages") -> Stream:
    """The stream with the tensor `output`: `field` less the batch's mean, over its deviation.

    The tensors stay on their ranks; the driver gets moments of each response, and returns two
    scalars.
    """
    moments, batch_moments = ("num_tokens", "mean", "squares"), ("batch_mean", "batch_scale")
    samples = samples.map(critic.moments, (field,), scalars=moments)
    samples = samples.by_batch(critic.whitening, moments, batch_moments)
    return samples.map(critic.whiten, (field, *batch_moments), (output,))
