"""The parts of `train_layer` in Triton, equal to those of `train_layer_torch`.

Sums have a fixed order: there are no atomics, and tiles follow from shapes alone. So the same
inputs give the same bits, and a row's numbers are the same in every batch.
"""

import torch
import triton
import triton.language as tl

TILE = 4096
"""Elements of a tile of rows; a row that is longer is a tile."""
PROGRAMS = 256
"""Parts of a sum over all rows, at most: two on each multiprocessor of a large GPU."""
HEADS_AT_ONCE = 8
"""Heads of a token that are rotated together."""
ELEMENTS_AT_ONCE = 2048
"""Elements that one program activates."""


@triton.jit(do_not_specialize=["rows"])  # one compilation serves any number of tokens
def _norm_kernel(
    x, weight, out, scales, rows, features, eps, offset, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Some rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    places = row.to(tl.int64)[:, None] * features + at[None, :]
    inside = (row < rows)[:, None] & (at < features)[None, :]
    h = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 1) / features + eps)
    w = tl.load(weight + at, mask=at < features, other=0.0).to(tl.float32) + offset
    normed = h * scale[:, None] * w[None, :]
    tl.store(out + places, normed.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    out: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """See `train_layer_torch.norm`; all tensors are contiguous."""
    (rows, features), (in_tile, block, warps) = x.shape, _tile(x.shape[1])
    with torch.cuda.device_of(x):
        _norm_kernel[triton.cdiv(rows, in_tile),](
            x, weight, out, scales, rows, features, eps, offset,
            ROWS=in_tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "rows_of_program"])
def _norm_grad_kernel(
    grad,
    x,
    weight,
    scales,
    grad_x,
    parts,
    rows,
    features,
    rows_of_program,
    offset,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Consecutive rows, and their part of the weight's gradient where `parts` is given."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    w = tl.load(weight + at, mask=at < features, other=0.0).to(tl.float32) + offset
    total = tl.zeros((BLOCK,), tl.float32)
    first = program * rows_of_program
    last = tl.minimum(first + rows_of_program, rows)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        places = row.to(tl.int64)[:, None] * features + at[None, :]
        inside = (row < last)[:, None] & (at < features)[None, :]
        g = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < last, other=0.0)[:, None]
        normed = h * scale
        total += tl.sum(g * normed, 0)
        g *= w[None, :]
        g = (g - normed * (tl.sum(g * normed, 1) / features)[:, None]) * scale
        tl.store(grad_x + places, g.to(grad_x.dtype.element_ty), mask=inside)
    if parts is not None:
        tl.store(parts + program.to(tl.int64) * features + at, total, mask=at < features)


@triton.jit(do_not_specialize=["number"])
def _sum_kernel(parts, out, number, features, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of some features over all parts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, number, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < number)[:, None] & (at < features)[None, :]
        places = row[:, None] * features + at[None, :]
        total += tl.sum(tl.load(parts + places, mask=inside, other=0.0), 0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < features)


def norm_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    offset: float,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor | None,
) -> None:
    """See `train_layer_torch.norm_grad`; all tensors are contiguous."""
    (rows, features), (in_tile, block, warps) = x.shape, _tile(x.shape[1])
    of_program = triton.cdiv(rows, PROGRAMS * in_tile) * in_tile
    programs = triton.cdiv(rows, of_program)
    parts = None if grad_weight is None else scales.new_empty(programs, features)
    with torch.cuda.device_of(x):
        _norm_grad_kernel[programs,](
            grad, x, weight, scales, grad_x, parts, rows, features, of_program, offset,
            ROWS=in_tile, BLOCK=block, num_warps=warps,
        )  # fmt: skip
        if grad_weight is not None:
            _sum_kernel[triton.cdiv(features, 64),](
                parts, grad_weight, programs, features, ROWS=32, BLOCK=64, num_warps=4
            )


def _tile(features: int) -> tuple[int, int, int]:
    """Rows of a tile, its columns, and the warps that share it."""
    block = triton.next_power_of_2(features)
    in_tile = max(1, TILE // block)
    return in_tile, block, min(16, max(4, in_tile * block // 1024))


@triton.jit
def _rotate_heads(
    x, out, stride, out_stride, c, s, other_c, other_s, HEADS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The heads of one token; strides are those between heads."""
    d = tl.arange(0, BLOCK)[None, :]
    behind = 2 * HALF + tl.arange(0, BLOCK)[None, :]
    for start in range(0, HEADS, AT_ONCE):
        head = start + tl.arange(0, AT_ONCE)[:, None]
        inside = (head < HEADS) & (d < HALF)
        first = tl.load(x + head * stride + d, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + head * stride + HALF + d, mask=inside, other=0.0).to(tl.float32)
        turned = (first * c - second * s).to(out.dtype.element_ty)
        tl.store(out + head * out_stride + d, turned, mask=inside)
        turned = (second * other_c + first * other_s).to(out.dtype.element_ty)
        tl.store(out + head * out_stride + HALF + d, turned, mask=inside)
        for at in range(0, REST, BLOCK):  # numbers that are not rotated
            inside = (head < HEADS) & (at + d < REST)
            passed = tl.load(x + head * stride + behind + at, mask=inside)
            tl.store(out + head * out_stride + behind + at, passed, mask=inside)


@triton.jit
def _rotate_kernel(
    query, key, cos, sin, query_out, key_out,
    query_stride, query_token, key_stride, key_token,
    query_out_stride, query_out_token, key_out_stride, key_out_token,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """One token: strides are those between its heads, and between tokens."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    row = token * 2 * HALF + d
    c = tl.load(cos + row, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    other_c = tl.load(cos + row + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    other_s = tl.load(sin + row + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    if BACK:  # the transposed rotation
        s, other_s = -other_s, -s
    _rotate_heads(
        query + token * query_token, query_out + token * query_out_token,
        query_stride, query_out_stride, c, s, other_c, other_s,
        HEADS, HALF, REST, AT_ONCE, BLOCK,
    )  # fmt: skip
    _rotate_heads(
        key + token * key_token, key_out + token * key_out_token,
        key_stride, key_out_stride, c, s, other_c, other_s,
        KV_HEADS, HALF, REST, AT_ONCE, BLOCK,
    )  # fmt: skip


def rotate(
    heads: tuple[torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    outs: tuple[torch.Tensor, torch.Tensor],
    back: bool,
) -> None:
    """See `train_layer_torch.rotate`; numbers of a head are consecutive, `cos` and `sin` rows."""
    strides = [stride for x in (*heads, *outs) for stride in (x.stride(1), x.stride(0))]
    half = cos.shape[1] // 2
    with torch.cuda.device_of(cos):
        _rotate_kernel[len(cos),](
            *heads, cos, sin, *outs, *strides,
            HEADS=heads[0].shape[1], KV_HEADS=heads[1].shape[1],
            HALF=half, REST=heads[0].shape[2] - 2 * half,
            AT_ONCE=HEADS_AT_ONCE, BLOCK=triton.next_power_of_2(half), BACK=back, num_warps=4,
        )  # fmt: skip


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """act(gate), and its slope."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
        slope = share * (1.0 + gate * (1.0 - share))
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:  # gelu_tanh; (1 + tanh x) / 2 is sigmoid 2 x
        square = gate * gate
        share = tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * square))
        rise = 1.5957691216057308 * (1.0 + 0.134145 * square)
        slope = share * (1.0 + gate * (1.0 - share) * rise)
    return gate * share, slope


@triton.jit(do_not_specialize=["number"])
def _act_mul_kernel(gate, up, out, number, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Consecutive elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < number, other=0.0).to(tl.float32)
    h, _ = _activated(g, ACTIVATION)
    h *= tl.load(up + at, mask=at < number, other=0.0).to(tl.float32)
    tl.store(out + at, h.to(out.dtype.element_ty), mask=at < number)


def act_mul(gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """See `train_layer_torch.act_mul`; all tensors are contiguous."""
    with torch.cuda.device_of(gate):
        _act_mul_kernel[triton.cdiv(gate.numel(), ELEMENTS_AT_ONCE),](
            gate, up, out, gate.numel(),
            ACTIVATION=activation, BLOCK=ELEMENTS_AT_ONCE, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["number"])
def _act_mul_grad_kernel(
    grad, gate, up, grad_gate, grad_up, number, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Consecutive elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + at, mask=at < number, other=0.0).to(tl.float32)
    h, slope = _activated(
        tl.load(gate + at, mask=at < number, other=0.0).to(tl.float32), ACTIVATION
    )
    tl.store(grad_up + at, (g * h).to(grad_up.dtype.element_ty), mask=at < number)
    g *= slope * tl.load(up + at, mask=at < number, other=0.0).to(tl.float32)
    tl.store(grad_gate + at, g.to(grad_gate.dtype.element_ty), mask=at < number)


def act_mul_grad(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
) -> None:
    """See `train_layer_torch.act_mul_grad`; all tensors are contiguous."""
    with torch.cuda.device_of(gate):
        _act_mul_grad_kernel[triton.cdiv(gate.numel(), ELEMENTS_AT_ONCE),](
            grad, gate, up, grad_gate, grad_up, gate.numel(),
            ACTIVATION=activation, BLOCK=ELEMENTS_AT_ONCE, num_warps=4,
        )  # fmt: skip
