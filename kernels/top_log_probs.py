"""The likeliest tokens at every position, without the logits of the whole vocabulary at once."""

import torch
import torch.distributed as dist

from hybridrl.kernels.linear_log_probs import CHUNK_ELEMENTS, VocabShard
from hybridrl.kernels.linear_log_probs_torch import column_chunks


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
