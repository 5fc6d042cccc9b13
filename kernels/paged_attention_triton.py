"""`decode_torch.paged_attention` in Triton: keys in splits of one length, joined in their order.

Splits begin at the same positions for every sequence, so a query's numbers do not depend on the
batch or on how long its other sequences are (Flash-Decoding with splits of fixed size).
"""

import torch
import triton
import triton.language as tl

SPLIT = 512
"""Keys of a split."""
_TILES = {2: 8192, 4: 2048}
"""Numbers of the keys of a tile, and of its values, by bytes of a number: larger ones spill."""
LOWEST = tl.constexpr(-1e30)
"""A finite start of a maximum: minus infinity would make a rescaled sum of zero not a number."""


@triton.jit(do_not_specialize=["pages", "splits"])  # one compilation serves all
def _split_kernel(
    query,
    cache,
    tables,
    slots,
    positions,
    out,
    split_sums,
    sinks,
    pages,
    splits,
    scaling,
    window,
    softcap,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WHOLE: tl.constexpr,
    ON_CPU: tl.constexpr,
):
    """The query heads of one kv head, for QUERIES tokens of a sequence, over one split.

    Row `query SHARED + head` is a head among the SHARED ones of the kv head. A WHOLE split has all
    keys: its result is final.
    """
    first_token, kv_head, split = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    token = first_token + row // SHARED
    exists = row < QUERIES * SHARED
    position = tl.load(positions + token, mask=exists, other=-1)
    slot = tl.load(slots + first_token).to(tl.int64)
    place = (token.to(tl.int64) * KV_HEADS + kv_head) * SHARED + row % SHARED
    inside = exists[:, None] & (d < DIM)[None, :]
    q = tl.load(query + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)

    # keys of the split that some of the queries see
    first, stop = split * SPLIT, tl.minimum((split + 1) * SPLIT, tl.max(position, 0) + 1)
    oldest = tl.zeros((ROWS,), tl.int32)
    if window is not None:
        oldest = tl.maximum(position - window + 1, 0)
        lowest = tl.min(tl.where(position >= 0, oldest, 2147483647), 0)
        first = tl.maximum(first, lowest // KEYS * KEYS)

    best = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    for start in range(first, stop, KEYS):
        at = start + tl.arange(0, KEYS)
        block = tl.load(tables + slot * pages + at // BLOCK_SIZE, mask=at < stop, other=0)
        line = (block.to(tl.int64) * 2 * KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE
        held = (at < stop)[None, :] & (d < DIM)[:, None]
        k = tl.load(cache + line[None, :] * DIM + d[:, None], mask=held, other=0.0)
        line += KV_HEADS * BLOCK_SIZE
        held = (at < stop)[:, None] & (d < DIM)[None, :]
        v = tl.load(cache + line[:, None] * DIM + d[None, :], mask=held, other=0.0)
        if ON_CPU:  # Triton's interpreter takes the bits of bf16 for integers in a product
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        if softcap is not None:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        seen = (at[None, :] <= position[:, None]) & (at[None, :] >= oldest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        scale = tl.exp(best - new_best)
        values = values * scale[:, None]
        values = tl.dot(weights.to(v.dtype), v, values, input_precision="ieee")
        total = total * scale + tl.sum(weights, 1)
        best = new_best

    if WHOLE:
        if sinks is not None:
            head = kv_head * SHARED + row % SHARED
            best, total, values = _with_sink(best, total, values, sinks, head, exists)
        result = values / tl.where(total > 0, total, 1.0)[:, None]
        address = out + place[:, None] * DIM + d[None, :]
        tl.store(address, result.to(out.dtype.element_ty), mask=inside)
    else:
        used = exists & (first < stop)
        index = place * splits + split
        address = out + index[:, None] * DIM + d[None, :]
        tl.store(address, values, mask=inside & (first < stop))
        tl.store(split_sums + index * 2, best, mask=used)
        tl.store(split_sums + index * 2 + 1, total, mask=used)


@triton.jit
def _with_sink(best, total, values, sinks, head, exists):
    """The sums with the score of a key that has no value."""
    sink = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32)
    new_best = tl.maximum(best, sink)
    scale = tl.exp(best - new_best)
    return new_best, total * scale + tl.exp(sink - new_best), values * scale[:, None]


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    split_values,
    split_sums,
    positions,
    sinks,
    out,
    splits,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """ROWS heads of one token: what its splits have, from the first to the last."""
    token = tl.program_id(0)
    head, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    exists = head < HEADS
    inside = exists[:, None] & (d < DIM)[None, :]
    place = token.to(tl.int64) * HEADS + head
    position = tl.load(positions + token)
    first = 0
    if window is not None:
        first = tl.maximum(position - window + 1, 0) // SPLIT
    best = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, BLOCK_DIM), tl.float32)
    for split in range(first, tl.cdiv(position + 1, SPLIT)):
        index = place * splits + split
        its_best = tl.load(split_sums + index * 2, mask=exists, other=0.0)
        its_total = tl.load(split_sums + index * 2 + 1, mask=exists, other=0.0)
        its_values = tl.load(
            split_values + index[:, None] * DIM + d[None, :], mask=inside, other=0.0
        )
        new_best = tl.maximum(best, its_best)
        scale, its_scale = tl.exp(best - new_best), tl.exp(its_best - new_best)
        values = values * scale[:, None] + its_values * its_scale[:, None]
        total = total * scale + its_total * its_scale
        best = new_best
    if sinks is not None:
        best, total, values = _with_sink(best, total, values, sinks, head, exists)
    result = values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=inside)


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    max_length: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    queries: int = 1,
) -> torch.Tensor:
    """See `decode_torch.paged_attention`; all tensors are contiguous.

    `max_length` sets the launch: a CUDA graph serves all sequences below it, in the memory of
    float32 [tokens, heads, splits, head_dim + 2] where they have more than one split.
    """
    kv_heads, block_size, dim = cache.shape[2:]
    tokens, heads = query.shape[:2]
    assert tokens % queries == 0
    splits = triton.cdiv(max_length, SPLIT)
    shared, block_dim = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    keys = max(16, min(64, _TILES[cache.itemsize] // block_dim))
    out = torch.empty_like(query)
    split_values, split_sums = out, out
    if splits > 1:
        split_values = query.new_empty(tokens, heads, splits, dim, dtype=torch.float32)
        split_sums = query.new_empty(tokens, heads, splits, 2, dtype=torch.float32)
    shape = {"DIM": dim, "SPLIT": SPLIT, "KEYS": keys, "BLOCK_DIM": block_dim}
    with torch.cuda.device_of(query):
        _split_kernel[tokens // queries, kv_heads, splits](
            query, cache, tables, slots, positions, split_values, split_sums, sinks,
            tables.shape[1], splits, scaling, window, softcap,
            QUERIES=queries, KV_HEADS=kv_heads, SHARED=shared, BLOCK_SIZE=block_size,
            ROWS=max(16, triton.next_power_of_2(queries * shared)), WHOLE=splits == 1,
            ON_CPU=query.device.type == "cpu", num_warps=4, num_stages=2, **shape,
        )  # fmt: skip
        if splits > 1:
            rows = min(4, triton.next_power_of_2(heads))
            _join_kernel[tokens, triton.cdiv(heads, rows)](
                split_values, split_sums, positions, sinks, out, splits, window,
                HEADS=heads, ROWS=rows, num_warps=4, **shape,
            )  # fmt: skip
    return out
