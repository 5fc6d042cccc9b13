"""Each token's share of the covariance of log-probability and advantage, over the whole batch."""

from hybridrl.algorithms import covariance
from hybridrl.flow import Stream
from hybridrl.recipes.rollout_correction import OldLogProbs, RolloutCorrection


def add_covariances(samples: Stream, cfg: RolloutCorrection) -> Stream:
    """The stream with the tensor `covariance`, and the scalars `length` and `batch_tokens`.

    From `advantage` and the log-probabilities before the update: by the train engine where the
    recipe has them from there, else as sampled.
    """
    sampled = cfg.correction.old_log_probs is OldLogProbs.rollout
    log_probs = "log_probs" if sampled else "old_log_probs"
    scalars = ("length", "log_prob_sum")
    means = ("mean_log_prob", "mean_advantage", "batch_tokens")
    samples = samples.map(covariance.log_prob_sum, (log_probs,), scalars=scalars)
    samples = samples.by_batch(covariance.token_means, (*scalars, "advantage"), means)
    inputs = (log_probs, "advantage", *means[:2])
    return samples.map(covariance.covariances, inputs, ("covariance",))
