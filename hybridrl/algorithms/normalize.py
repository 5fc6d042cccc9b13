"""Weights of tokens in the batch loss.

| name | batch loss | from |
|---|---|---|
| `token` | mean over all tokens of the batch | DAPO, arXiv 2503.14476, section 3.3 |
| `sequence` | mean over sequences of their token mean | GRPO, arXiv 2402.03300, eq. 3 |
| `constant` | mean over sequences of token sum / longest response | Dr.GRPO, arXiv 2503.20783 |

`token` lets long responses weigh more, `sequence` weighs their tokens less; `constant` weighs every
token alike whatever the lengths in the batch are.
"""

from collections.abc import Sequence

import torch

from hybridrl.algorithms import NORMALIZATIONS, resolve


def token_weights(
    lengths: Sequence[int] | torch.Tensor,
    normalize: str,
    num_tokens: int,
    num_sequences: int,
    max_tokens: int,
) -> torch.Tensor:
    """Weight of every token [tokens] of packed sequences, float32. The batch loss is the sum of
    weight times loss over all ranks and micro-batches.

    `lengths` [sequences] are the trained tokens of each sequence here, `num_tokens` and
    `num_sequences` the totals over all ranks and micro-batches. `max_tokens` is the constant of
    `constant`: the longest response that may be generated. A sequence without trained tokens has no
    weight; whether `num_sequences` counts it is the caller's choice. Raises ConfigError for an
    unknown name.
    """
    counts = torch.as_tensor(lengths, dtype=torch.int64)
    per_sequence = resolve(NORMALIZATIONS, "recipe.normalize", normalize)
    weights: torch.Tensor = per_sequence(counts, num_tokens, num_sequences, max_tokens)
    return weights.float().repeat_interleave(counts)


def factor_of_totals(normalize: str, num_tokens: int, num_sequences: int, max_tokens: int) -> float:
    """The factor between the weights of these totals and those of totals 1.

    It is the same for every token, so it may be applied to a sum over tokens, where the totals are
    known last. So it is with the normalizations of this file (`Loss.totals_are_factor`).
    """
    assert normalize in NORMALIZATIONS, f"{normalize}: totals may be more than a factor"
    per_sequence, one = resolve(NORMALIZATIONS, "recipe.normalize", normalize), torch.ones(1)
    known = per_sequence(one, num_tokens, num_sequences, max_tokens)
    return float(known / per_sequence(one, 1, 1, 1))


def token(
    counts: torch.Tensor, num_tokens: int, num_sequences: int, max_tokens: int
) -> torch.Tensor:
    """Weight per token of each sequence [sequences]: 1 / num_tokens."""
    return torch.full(counts.shape, 1.0 / max(num_tokens, 1), dtype=torch.float64)


def sequence(
    counts: torch.Tensor, num_tokens: int, num_sequences: int, max_tokens: int
) -> torch.Tensor:
    """Weight per token of each sequence [sequences]: 1 / (num_sequences * its tokens)."""
    return 1.0 / (max(num_sequences, 1) * counts.clamp(min=1).double())


def constant(
    counts: torch.Tensor, num_tokens: int, num_sequences: int, max_tokens: int
) -> torch.Tensor:
    """Weight per token of each sequence [sequences]: 1 / (num_sequences * max_tokens)."""
    scale = max(num_sequences, 1) * max(max_tokens, 1)
    return torch.full(counts.shape, 1.0 / scale, dtype=torch.float64)
