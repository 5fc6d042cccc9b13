"""The parts of `linear_log_probs` in torch: for the CPU, and the reference of the Triton ones.

Products and sums are in float32 at least, for inputs of any dtype.
"""

from collections.abc import Iterator

import torch

from hybridrl.kernels.softmax_partial import SoftmaxPartial

ALIGNED = 128
"""Columns: rows of a chunk then begin where a GPU's matrix products are fast."""


def column_chunks(hidden: torch.Tensor, vocab: int, chunk_elements: int) -> Iterator[slice]:
    """Slices of the vocabulary for which [tokens, columns] has at most `chunk_elements` elements.

    A chunk is at least as wide as `hidden`: a narrow product is slow, and the input is as large.
    Wide chunks are whole Triton blocks. Without tokens there is nothing to compute, and no chunk.
    """
    tokens, features = hidden.shape
    size = max(1, features, chunk_elements // max(1, tokens))
    if size > ALIGNED:
        size -= size % ALIGNED
    stop = vocab if tokens else 0
    return (slice(start, min(start + size, stop)) for start in range(0, stop, size))


def partial(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    chunk_elements: int,
    bias: torch.Tensor | None = None,
    cap: float | None = None,
) -> SoftmaxPartial:
    """Statistics of the logits over the rows of `weight`, [tokens] each.

    hidden [tokens, features], weight [vocab, features], bias [vocab]; targets [tokens] are rows of
    `weight`, other values stand for targets outside of this shard.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    hidden = hidden.to(dtype)
    joined = SoftmaxPartial.empty(len(hidden), dtype, hidden.device)
    for columns in column_chunks(hidden, len(weight), chunk_elements):
        chunk, chunk_targets = weight[columns].to(dtype), targets - columns.start
        chunk_bias = None if bias is None else bias[columns]
        logits = _logits(hidden, chunk, temperature, chunk_bias, cap)
        joined = joined.join(_of_chunk(logits, chunk_targets, with_entropy))
    return joined


def _of_chunk(logits: torch.Tensor, targets: torch.Tensor, with_entropy: bool) -> SoftmaxPartial:
    index, is_inside = _column_index(targets, logits)
    target = logits.gather(-1, index).squeeze(-1).masked_fill(~is_inside, -torch.inf)
    maximum = logits.amax(-1)
    shifted = logits.sub_(maximum[:, None])
    if not with_entropy:
        total = shifted.exp_().sum(-1)
        return SoftmaxPartial(maximum, total, torch.zeros_like(total), target)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    return SoftmaxPartial(maximum, total, exponentials.mul_(shifted).sum(-1), target)


def grad_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Gradient [tokens, vocab] of hidden weight^T in the dtype of `hidden`; arguments as above.

    lse and entropy [tokens] are those of the full vocabulary; without `entropy` its gradient is
    ignored.
    """
    log_p = _logits(hidden, weight, temperature, bias, cap)
    # d c tanh(x / c) / dx, from the capped logits.
    slope = None if cap is None else log_p.mul(temperature / cap).square_().neg_().add_(1)
    log_p.sub_(lse[:, None])
    if entropy is None:
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    else:
        p = log_p.exp()
        scale = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None])
        grad = p.mul_(scale.add_(grad_log_probs[:, None])).neg_()
    index, is_inside = _column_index(targets, grad)
    grad.scatter_add_(-1, index, grad_log_probs.where(is_inside, 0)[:, None])
    grad.div_(temperature)
    return grad if slope is None else grad.mul_(slope)


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None,
    cap: float | None,
) -> torch.Tensor:
    logits = hidden @ weight.T
    if bias is not None:
        logits += bias
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)
    return logits if temperature == 1 else logits.div_(temperature)


def _column_index(targets: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target as an index [tokens, 1], and whether it is among these columns."""
    columns = logits.shape[-1]
    is_inside = (targets >= 0) & (targets < columns)
    return targets.clamp(0, columns - 1)[:, None], is_inside
