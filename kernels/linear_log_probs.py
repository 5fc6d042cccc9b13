"""Log-probabilities of given tokens straight from hidden states, without the whole logits.

A head of 150 k tokens makes logits far larger than everything else in a small model's step. Here
rows are taken in chunks: the forward pass keeps one number a row (the log-sum-exp), the backward
pass recomputes a chunk's logits. Extra memory is one chunk, whatever the number of tokens.
"""

from collections.abc import Iterator

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk: 64 MiB in float32."""


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target, and on request the entropy, of softmax(hidden weight^T / T).

    hidden [tokens, features], weight [vocab, features], targets [tokens] (int64). Both results are
    [tokens] in float32 (float64 for float64 inputs) and differentiable in `hidden` and `weight`.
    Zero tokens are allowed and give zero gradients. `chunk_elements` bounds the logits that exist
    at a time. Raises ValueError for a temperature that is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: wanted a number above 0")
    log_probs, entropy = _LinearLogProbs.apply(
        hidden, weight, targets, temperature, with_entropy, chunk_elements
    )
    return log_probs, entropy if with_entropy else None


def _chunks(rows: int, columns: int, chunk_elements: int) -> Iterator[slice]:
    size = max(1, chunk_elements // columns)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = hidden @ weight.T
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits if temperature == 1 else logits.div_(temperature)


class _LinearLogProbs(torch.autograd.Function):
    """d log p(t) / d logit_j = [j = t] - p_j; d H / d logit_j = -p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        chunk_elements: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        lse = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        target_logits, entropy = torch.empty_like(lse), torch.zeros_like(lse)
        for rows in _chunks(len(hidden), len(weight), chunk_elements):
            logits = _logits(hidden[rows], weight, temperature)
            lse[rows] = logits.logsumexp(-1)
            target_logits[rows] = logits.gather(-1, targets[rows, None]).squeeze(-1)
            if with_entropy:
                log_p = logits.sub_(lse[rows, None])
                entropy[rows] = -log_p.exp().mul_(log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        ctx.chunk_elements = chunk_elements
        return target_logits - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in float32: bf16 would lose small terms.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        for rows in _chunks(len(hidden), len(weight), ctx.chunk_elements):
            log_p = _logits(hidden[rows], weight, ctx.temperature).sub_(lse[rows, None])
            scale = grad_log_probs[rows, None]
            if ctx.with_entropy:
                p = log_p.exp()
                scale = scale + grad_entropy[rows, None] * log_p.add_(entropy[rows, None])
                grad = p.mul_(scale).neg_()
            else:
                grad = log_p.exp_().mul_(-scale)
            grad.scatter_add_(-1, targets[rows, None], grad_log_probs[rows, None])
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None
