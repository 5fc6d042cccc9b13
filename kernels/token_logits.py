"""Logits of a few given tokens at every position, without those of the whole vocabulary.

With `linear_log_probs` of one token they give log-probabilities of others: log p(j) is
logit_j - lse, and lse is logit_t - log p(t).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from hybridrl.kernels.linear_log_probs import CHUNK_ELEMENTS, VocabShard, linear_log_probs
from hybridrl.kernels.linear_log_probs_torch import column_chunks


def candidate_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    candidates: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    shard: VocabShard | None = None,
    bias: torch.Tensor | None = None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `linear_log_probs`, with the log-probabilities of `candidates` [tokens, k], too.

    The first result is [tokens, 1 + k], the target's first.
    """
    log_probs, entropy = linear_log_probs(
        hidden, weight, targets, temperature, with_entropy, shard=shard, bias=bias, cap=cap
    )
    ids = torch.cat([targets[:, None], candidates], 1)
    logits = token_logits(hidden, weight, ids, temperature, shard=shard, bias=bias, cap=cap)
    log_sum_exp = logits[:, 0] - log_probs
    of_candidates = logits[:, 1:] - log_sum_exp[:, None]
    return torch.cat([log_probs[:, None], of_candidates], 1), entropy


def token_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float = 1.0,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
    shard: VocabShard | None = None,
    bias: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """Logits [tokens, k] of `ids` [tokens, k], differentiable in `hidden`, `weight` and `bias`.

    In float32 at least. Other arguments, and what a `shard` means, as for `linear_log_probs`.
    """
    products = _TokenProducts.apply(hidden, weight, bias, ids, chunk_elements, shard)
    logits: torch.Tensor = products if cap is None else cap * torch.tanh(products / cap)
    return logits / temperature


@torch.no_grad()
def top_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    temperature: float = 1.0,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
    shard: VocabShard | None = None,
    bias: torch.Tensor | None = None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities [tokens, k] of the `k` likeliest tokens, the likeliest first.

    Not differentiable. Collective with a `shard`; the results are equal on all of its ranks. Other
    arguments are those of `linear_log_probs`. The vocabulary has `k` tokens at least.
    """
    start, size = (shard.start, shard.size) if shard else (0, len(weight))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    hidden = hidden.to(wide)
    top = hidden.new_full((len(hidden), k), -torch.inf)
    ids = torch.zeros_like(top, dtype=torch.int64)
    log_sum_exp = top[:, :1].clone()
    for columns in column_chunks(hidden, size, chunk_elements):
        products = hidden @ weight[columns].to(wide).T
        if bias is not None:
            products += bias[columns].to(wide)
        if cap is not None:
            products = products.div_(cap).tanh_().mul_(cap)
        logits = products.div_(temperature)
        log_sum_exp = torch.logaddexp(log_sum_exp, logits.logsumexp(-1, keepdim=True))
        values, places = logits.topk(min(k, logits.shape[1]))
        top, ids = _likeliest(k, [top, values], [ids, places + start + columns.start])
    if shard:
        log_sum_exp = torch.cat(_gathered(log_sum_exp, shard.group), 1).logsumexp(-1, keepdim=True)
        top, ids = _likeliest(k, _gathered(top, shard.group), _gathered(ids, shard.group))
    return ids, top - log_sum_exp


def _likeliest(
    k: int, logits: list[torch.Tensor], ids: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    top, places = torch.cat(logits, 1).topk(k)
    return top, torch.cat(ids, 1).gather(1, places)


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The tensor of every rank of a group, on all of them."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor.contiguous(), group=group)
    return tensors


class _TokenContext(FunctionCtx):
    """The values kept for `backward`; autograd makes it and fills in the last two."""

    chunk_tokens: int
    shard: VocabShard | None
    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]


class _TokenProducts(torch.autograd.Function):
    """Products of hidden states with given rows of the weight, plus the bias.

    Rows are gathered for some tokens at a time, in both directions.
    """

    @staticmethod
    def forward(
        ctx: _TokenContext,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ids: torch.Tensor,
        chunk_elements: int,
        shard: VocabShard | None,
    ) -> torch.Tensor:
        start, size = (shard.start, shard.size) if shard else (0, len(weight))
        local = ids - start
        inside = (local >= 0) & (local < size)
        local = local.masked_fill(~inside, 0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        chunk_tokens = max(1, chunk_elements // max(1, ids.shape[1] * hidden.shape[1]))
        products = torch.zeros(ids.shape, dtype=wide, device=hidden.device)
        for tokens in _chunks(len(ids), chunk_tokens) if size else ():
            rows = weight[local[tokens]].to(wide)
            products[tokens] = torch.einsum("td,tkd->tk", hidden[tokens].to(wide), rows)
            if bias is not None:
                products[tokens] += bias[local[tokens]].to(wide)
        products = products.masked_fill(~inside, 0)
        if shard:
            dist.all_reduce(products, group=shard.group)
        saved: Any = (hidden, weight, bias, local, inside)  # torch takes None, too
        ctx.save_for_backward(*saved)
        ctx.chunk_tokens, ctx.shard = chunk_tokens, shard
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx: _TokenContext, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, local, inside = ctx.saved_tensors
        wide = grad.dtype
        grad = grad.masked_fill(~inside, 0)
        size = ctx.shard.size if ctx.shard else len(weight)
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if ctx.needs_input_grad[0] else None
        # Of the rows that some token reads, in float32: all of a head's would be gigabytes.
        rows_read, places_read = local.unique(return_inverse=True)
        num_read, features = len(rows_read), hidden.shape[1]
        grad_rows = hidden.new_zeros(num_read, features, dtype=wide)
        grad_row_bias = hidden.new_zeros(num_read, dtype=wide)
        for tokens in _chunks(len(local), ctx.chunk_tokens) if size else ():
            places, of_chunk = places_read[tokens].flatten(), grad[tokens]
            if grad_hidden is not None:
                rows = weight[local[tokens]].to(wide)
                grad_hidden[tokens] = torch.einsum("tk,tkd->td", of_chunk, rows)
            if ctx.needs_input_grad[1]:
                outer = of_chunk[..., None] * hidden[tokens].to(wide)[:, None]
                grad_rows.index_add_(0, places, outer.flatten(0, 1))
            grad_row_bias.index_add_(0, places, of_chunk.flatten())
        if ctx.shard and grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=ctx.shard.group)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            _at_rows(weight, rows_read, grad_rows, size) if ctx.needs_input_grad[1] else None,
            _at_rows(bias, rows_read, grad_row_bias, size) if ctx.needs_input_grad[2] else None,
            *[None] * 3,
        )


def _at_rows(
    whole: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, size: int
) -> torch.Tensor:
    """Zeros like `whole` with `values` at its `rows`, if the shard has any (`size`)."""
    gradient = torch.zeros_like(whole)
    if size:
        gradient[rows] = values.to(whole.dtype)
    return gradient


def _chunks(num: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]
