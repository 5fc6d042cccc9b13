"""The experts of a decode step in Triton: each token's choice, rows by expert, grouped products.

The functions equal those of `decode_torch`. The host knows no number of rows: every expert has its
programs, which end where it has no rows. Tiles depend on the widths alone, and sums on no other
row: a token's numbers are the same in every batch.
"""

import torch
import triton
import triton.language as tl

ROWS = 16
"""Rows of an expert that one product has: few tokens of a step choose the same one."""
COLUMNS = 64
"""Columns of a product that one program computes."""
_INNER = {2: 128, 4: 32}
"""Features of a tile, by bytes of a number."""
ITEMS = 64
"""Pairs whose places one program finds."""
OTHERS = 128
"""Pairs that it compares them with at a time."""
FEATURES_AT_ONCE = 1024
"""Features of a token that one program sums."""


@triton.jit
def _route_kernel(
    logits,
    positions,
    weights,
    chosen,
    experts,
    PER_TOKEN: tl.constexpr,
    NORMALIZES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
):
    """One token."""
    token = tl.program_id(0)
    at, place = tl.arange(0, BLOCK), tl.arange(0, BLOCK_CHOSEN)
    x = tl.load(logits + token * experts + at, mask=at < experts, other=float("-inf"))
    x = x.to(tl.float32)
    scores = tl.exp(x - tl.max(x, 0))
    scores = scores / tl.sum(scores, 0)
    best = tl.zeros((BLOCK_CHOSEN,), tl.float32)
    indices = tl.zeros((BLOCK_CHOSEN,), tl.int32)
    for number in range(PER_TOKEN):
        highest = tl.max(scores, 0)
        index = tl.min(tl.where(scores == highest, at, 2147483647), 0)
        best = tl.where(place == number, highest, best)
        indices = tl.where(place == number, index, indices)
        scores = tl.where(at == index, -1.0, scores)
    if NORMALIZES:
        best = best / tl.sum(best, 0)
    runs = tl.load(positions + token) >= 0
    inside = place < PER_TOKEN
    out = token * PER_TOKEN + place
    tl.store(weights + out, best.to(weights.dtype.element_ty), mask=inside)
    tl.store(chosen + out, tl.where(runs, indices, -1), mask=inside)


def route(
    logits: torch.Tensor,
    positions: torch.Tensor,
    per_token: int,
    normalizes: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `decode_torch.route`; all tensors are contiguous."""
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, per_token, dtype=dtype)
    chosen = logits.new_empty(tokens, per_token, dtype=torch.int32)
    with torch.cuda.device_of(logits):
        _route_kernel[tokens,](
            logits, positions, weights, chosen, experts,
            PER_TOKEN=per_token, NORMALIZES=normalizes, BLOCK=triton.next_power_of_2(experts),
            BLOCK_CHOSEN=triton.next_power_of_2(per_token), num_warps=1,
        )  # fmt: skip
    return weights, chosen


@triton.jit
def _local(chosen, first, number):
    """The number of an expert among the local ones; `number` for one elsewhere."""
    expert = chosen - first
    return tl.where((expert >= 0) & (expert < number), expert, number)


@triton.jit(do_not_specialize=["pairs", "first"])  # one compilation serves all
def _order_kernel(
    chosen, order, ends, pairs, first, number, ITEMS: tl.constexpr, OTHERS: tl.constexpr
):
    """The places of some pairs, and behind all pairs the ends of experts.

    A pair comes after those of lower experts, and the earlier ones of its expert. The end of an
    expert is where a first pair of the next one would come.
    """
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    is_pair = item < pairs
    expert = _local(tl.load(chosen + item, mask=is_pair, other=0), first, number)
    expert = tl.where(is_pair, expert, item - pairs + 1)
    index = tl.where(is_pair, item, -1)
    before = tl.zeros((ITEMS,), tl.int32)
    for start in range(0, pairs, OTHERS):
        at = start + tl.arange(0, OTHERS)
        other = _local(tl.load(chosen + at, mask=at < pairs, other=0), first, number)
        other = tl.where(at < pairs, other, 2147483647)[None, :]
        earlier = (other == expert[:, None]) & (at[None, :] < index[:, None])
        before += tl.sum(((other < expert[:, None]) | earlier).to(tl.int32), 1)
    tl.store(order + before, item, mask=is_pair)
    tl.store(ends + item - pairs, before, mask=(item >= pairs) & (item < pairs + number))


def order_by_expert(
    chosen: torch.Tensor, first: int, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `decode_torch.order_by_expert`."""
    pairs = chosen.numel()
    order, ends = chosen.new_empty(pairs), chosen.new_empty(number)
    with torch.cuda.device_of(chosen):
        _order_kernel[triton.cdiv(pairs + number, ITEMS),](
            chosen, order, ends, pairs, first, number,
            ITEMS=ITEMS, OTHERS=OTHERS, num_warps=4,
        )  # fmt: skip
    return order, ends


@triton.jit
def _product_kernel(
    x,
    weight,
    order,
    ends,
    out,
    inner,
    columns,
    SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    ON_CPU: tl.constexpr,
):
    """Some columns of all rows of one expert."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.program_id(1)
    own = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    of_expert = weight + (expert.to(tl.int64) * columns + column)[None, :] * inner
    for start in range(own, stop, ROWS):
        row = start + tl.arange(0, ROWS)
        exists = row < stop
        pair = tl.load(order + row, mask=exists, other=0).to(tl.int64)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, inner, INNER):
            at = begin + tl.arange(0, INNER)
            held = exists[:, None] & (at < inner)[None, :]
            h = tl.load(x + (pair // SHARED)[:, None] * inner + at[None, :], mask=held, other=0.0)
            held = (at < inner)[:, None] & (column < columns)[None, :]
            w = tl.load(of_expert + at[:, None], mask=held, other=0.0)
            if ON_CPU:  # Triton's interpreter takes the bits of bf16 for integers in a product
                h, w = h.to(tl.float32), w.to(tl.float32)
            total = tl.dot(h, w, total, input_precision="ieee")
        held = exists[:, None] & (column < columns)[None, :]
        address = out + pair[:, None] * columns + column[None, :]
        tl.store(address, total.to(out.dtype.element_ty), mask=held)


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, shared: int
) -> torch.Tensor:
    """See `decode_torch.grouped_product`; all tensors are contiguous.

    An expert's weights are read once for each ROWS rows that it has.
    """
    number, columns, inner = weight.shape
    out = x.new_empty(len(order), columns)
    with torch.cuda.device_of(x):
        _product_kernel[triton.cdiv(columns, COLUMNS), number](
            x, weight, order, ends, out, inner, columns,
            SHARED=shared, ROWS=ROWS, COLUMNS=COLUMNS, INNER=_INNER[x.itemsize],
            ON_CPU=x.device.type == "cpu", num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first"])
def _combine_kernel(
    rows,
    weights,
    chosen,
    out,
    features,
    first,
    number,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some features of one token, from its first expert to its last."""
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(PER_TOKEN):
        pair = token.to(tl.int64) * PER_TOKEN + place
        here = _local(tl.load(chosen + pair), first, number) < number
        row = tl.load(rows + pair * features + at, mask=here & (at < features), other=0.0)
        total += tl.load(weights + pair).to(tl.float32) * row.to(tl.float32)
    address = out + token.to(tl.int64) * features + at
    tl.store(address, total.to(out.dtype.element_ty), mask=at < features)


def combine(
    rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, first: int, number: int
) -> torch.Tensor:
    """See `decode_torch.combine`."""
    (tokens, per_token), features = chosen.shape, rows.shape[1]
    out = rows.new_empty(tokens, features)
    with torch.cuda.device_of(rows):
        _combine_kernel[tokens, triton.cdiv(features, FEATURES_AT_ONCE)](
            rows, weights, chosen, out, features, first, number,
            PER_TOKEN=per_token, BLOCK=FEATURES_AT_ONCE, num_warps=4,
        )  # fmt: skip
    return out
