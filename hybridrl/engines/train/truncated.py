"""Log-probabilities and entropies of truncated distributions, over the ids that sampling has kept.

Sampling by top-k, top-p or min-p draws from the model's distribution renormalized over the kept
tokens, which is then the policy to differentiate (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). A
trainer that takes the whole distribution has ratios other than 1 before its first step, and a
gradient of another objective.
"""

from collections.abc import Sequence

import torch

from hybridrl.engines.train.interface import TrainSequence


def kept_rows(
    sequences: Sequence[TrainSequence], places: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """The kept ids [scored, most] of the scored `places` in the ids of each sequence; -1 behind.

    None where no token has any. A token that was drawn from the whole distribution has none.
    """
    counts, ids = [torch.zeros(0, dtype=torch.int64)], list[torch.Tensor]()
    for sequence, own in zip(sequences, places, strict=True):
        first = sequence.ids.shape[0] - sequence.response_tokens
        if sequence.kept_ids is None:
            counts.append(torch.zeros(len(own), dtype=torch.int64))
            continue
        flat = sequence.kept_ids.to(torch.int64)
        of_token, kept = flat.tensor_split([sequence.response_tokens])
        scored = torch.zeros(len(of_token), dtype=torch.bool)
        scored[own - first] = True
        counts.append(of_token[scored])
        ids.append(kept[scored.repeat_interleave(of_token)])
    of_all = torch.cat(counts)
    most = int(of_all.max()) if len(of_all) else 0
    if not most:
        return None
    rows = torch.full((len(of_all), most), -1, dtype=torch.int64)
    rows[torch.arange(most) < of_all[:, None]] = torch.cat(ids)
    return rows


def truncated(
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    kept: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities and entropies [scored], renormalized over the `kept` ids [scored, most].

    `log_probs` [scored, 1 + most] are those of the `targets` [scored] and of the kept ids under the
    whole distribution, whose `entropy` is [scored]. Rows without kept ids stay as they are. A
    target that is not among its kept ids has log-probability -inf.
    """
    whole, of_kept = log_probs[:, 0], log_probs[:, 1:]
    inside = kept >= 0
    restricted = inside.any(1)
    # A row without kept ids takes part with finite numbers, which are not used.
    logits = torch.where(inside | ~restricted[:, None], of_kept, -torch.inf)
    renormalized = logits.log_softmax(1)
    is_target = kept == targets[:, None]
    # The target's number among the kept ids, not its own: both come from the same product.
    own = torch.where(is_target, renormalized, 0.0).sum(1)
    own = torch.where(is_target.any(1), own, -torch.inf)
    if entropy is not None:
        terms = torch.where(inside, renormalized, 0.0)
        entropy = torch.where(restricted, -(terms.exp() * terms).sum(1), entropy)
    return torch.where(restricted, own, whole), entropy
