"""Logits of a few given tokens at every position, without those of the whole vocabulary."""

import torch
import torch.distributed as dist

from hybridrl.kernels.linear_log_probs import (
    CHUNK_ELEMENTS,
    Backend,
    VocabShard,
    linear_log_probs,
)
from hybridrl.kernels.linear_log_probs_torch import column_chunks


def candidate_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    candidates: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    shard: VocabShard | None = None,
    backend: Backend = "auto",
    bias: torch.Tensor | None = None,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `linear_log_probs`, with the log-probabilities of `candidates` [tokens, k], too.

    The first result is [tokens, 1 + k], the target's first.
    """
    logits = token_logits(
        hidden, weight, candidates, temperature,
        chunk_elements=chunk_elements, shard=shard, bias=bias, cap=cap,
    )  # fmt: skip
    return linear_log_probs(
        hidden, weight, targets, temperature, with_entropy, chunk_elements, shard, backend, bias,
        cap, (candidates, logits),
    )  # fmt: skip


@torch.no_grad()
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
    """Logits [tokens, k] of `ids` [tokens, k], in float32 at least; not differentiable.

    Rows of the weight are gathered for some tokens at a time. Other arguments, and what a `shard`
    means, as for `linear_log_probs`.
    """
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
    logits = products if cap is None else cap * torch.tanh(products / cap)
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


def _chunks(num: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]
