"""FlashAttention 2 on a CPU, by its formulas: the kernel of `varlen_attn`, which torch lacks there.

Within `flash_on_cpu` torch's `_flash_attention_forward` and `_flash_attention_backward` have CPU
kernels. Everything above them is torch's own: `varlen_attn`, its operator, and that one's autograd.
Scores exist as matrices, in the inputs' format. A query is aligned with the last key of its
sequence, as in flash-attn since 2.1. The backward pass has P from the forward pass' sums, as
FlashAttention (arXiv 2205.14135, algorithm 4) has.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


def _sequences(starts: torch.Tensor, longest: int) -> list[slice]:
    assert starts.dtype == torch.int32, "cu_seqlens must have dtype int32"
    slices = [slice(*ends) for ends in pairwise(starts.tolist())]
    assert max(s.stop - s.start for s in slices) <= longest, "a sequence is beyond the longest"
    return slices


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, left: int, right: int
) -> torch.Tensor:
    """Masked scores [heads, queries, keys]; the key's heads are repeated."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    queries, keys = scores.shape[1:]
    distance = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        hidden |= -distance > right
    if left >= 0:
        hidden |= distance > left
    return scores.masked_fill(hidden, -torch.inf)


def _checked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """The query heads of a key head, of tensors that the kernel would take."""
    assert query.shape[2] == key.shape[2] == value.shape[2], "one width"
    assert all(x.stride(-1) == 1 for x in (query, key, value)), "contiguous last dimension"
    assert query.shape[1] % key.shape[1] == 0, "heads of keys must divide heads of queries"
    return query.shape[1] // key.shape[1]


@contextmanager
def flash_on_cpu() -> Iterator[Counter[str]]:
    """See the module. Counts the calls `forward` and `backward`."""
    calls: Counter[str] = Counter()

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        of_queries: torch.Tensor,
        of_keys: torch.Tensor,
        longest_query: int,
        longest_key: int,
        dropout: float,
        is_causal: bool,
        return_debug_mask: bool,
        scale: float | None = None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        **unset: Any,
    ) -> Tensors:
        assert dropout == 0
        assert not return_debug_mask
        assert not any(x is not None for x in unset.values()), unset
        calls["forward"] += 1
        groups = _checked(query, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        right = 0 if is_causal else window_size_right
        out, sums = torch.full_like(query, torch.nan), query.new_empty(query.shape[1::-1])
        for q, k in zip(
            _sequences(of_queries, longest_query), _sequences(of_keys, longest_key), strict=True
        ):
            keys, values = (x[k].repeat_interleave(groups, 1) for x in (key, value))
            scores = _scores(query[q], keys, scale, window_size_left, right)
            sums[:, q] = scores.logsumexp(-1)
            out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        state = torch.zeros(2, dtype=torch.uint64)
        return out, sums, state, torch.empty((), dtype=torch.uint64), query.new_empty(0)

    def backward(
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        of_queries: torch.Tensor,
        of_keys: torch.Tensor,
        longest_query: int,
        longest_key: int,
        dropout: float,
        is_causal: bool,
        state: torch.Tensor,
        unused: torch.Tensor,
        scale: float | None = None,
        window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> Tensors:
        assert dropout == 0
        calls["backward"] += 1
        groups = _checked(query, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        right = 0 if is_causal else window_size_right
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
        for q, k in zip(
            _sequences(of_queries, longest_query), _sequences(of_keys, longest_key), strict=True
        ):
            keys, values = (x[k].repeat_interleave(groups, 1) for x in (key, value))
            scores = _scores(query[q], keys, scale, window_size_left, right)
            weights = (scores - sums[:, q, None]).exp()
            of_weights = torch.einsum("qhd,khd->hqk", grad[q], values)
            rows = (grad[q] * out[q]).sum(-1).T[..., None]
            of_scores = weights * (of_weights - rows) * scale
            of_query[q] = torch.einsum("hqk,khd->qhd", of_scores, keys)
            expanded = torch.einsum("hqk,qhd->khd", of_scores, query[q])
            of_key[k] = expanded.unflatten(1, (-1, groups)).sum(2)
            expanded = torch.einsum("hqk,qhd->khd", weights, grad[q])
            of_value[k] = expanded.unflatten(1, (-1, groups)).sum(2)
        return of_query, of_key, of_value

    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        library.impl("_flash_attention_forward", forward)
        library.impl("_flash_attention_backward", backward)
        yield calls
    finally:
        library._destroy()
