"""What a decoder layer computes between its products and its attention, in Triton.

The functions equal those of `decode_torch`. Rows are independent, and tiles depend on the widths
alone: a row's numbers are the same in every batch.
"""

import torch
import triton
import triton.language as tl

HEADS_AT_ONCE = 8
"""Heads of a token that one program rotates."""
FEATURES_AT_ONCE = 1024
"""Features of a token that one program activates."""


@triton.jit
def _residual_norm_kernel(
    x, residual, weight, out, total, features, eps, offset, BLOCK: tl.constexpr
):
    """One token."""
    start = tl.program_id(0).to(tl.int64) * features
    at = tl.arange(0, BLOCK)
    inside = at < features
    h = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        h += tl.load(residual + start + at, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(total.dtype.element_ty)
        tl.store(total + start + at, rounded, mask=inside)
        h = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 0) / features + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + start + at, (h * scale * w).to(out.dtype.element_ty), mask=inside)


def residual_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `decode_torch.residual_norm`. Both results are contiguous, as the inputs are."""
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    features = x.shape[1]
    block = triton.next_power_of_2(features)
    with torch.cuda.device_of(x):
        _residual_norm_kernel[len(x),](
            x, residual, weight, out, total, features, eps, offset,
            BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["pages"])  # one compilation serves all
def _rotate_kernel(
    qkv,
    q_norm,
    k_norm,
    rotation,
    cache,
    tables,
    slots,
    positions,
    query,
    pages,
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Some heads of one token: queries, keys and values in the order of the fused product."""
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    d = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (d < DIM)
    heads = qkv + (token.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * DIM
    x = tl.load(heads + d, mask=inside, other=0.0).to(tl.float32)
    # The number that a rotation joins with this one.
    HALF: tl.constexpr = ROTARY // 2
    other = tl.where(d < HALF, d + HALF, d - HALF)
    turned = (d < ROTARY) & (head < HEADS + KV_HEADS)
    partner = tl.load(heads + other, mask=inside & turned, other=0.0).to(tl.float32)
    if q_norm is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        is_query = head < HEADS
        normed = x * scale * _norm_weights(q_norm, k_norm, d, d < DIM, is_query, offset)
        x = tl.where(head < HEADS + KV_HEADS, normed, x)
        partner *= scale * _norm_weights(q_norm, k_norm, other, d < ROTARY, is_query, offset)
        # As torch, which writes a norm before it rotates it.
        x = x.to(qkv.dtype.element_ty).to(tl.float32)
        partner = partner.to(qkv.dtype.element_ty).to(tl.float32)

    position = tl.load(positions + token)
    at = tl.maximum(position, 0).to(tl.int64) * 2 * ROTARY
    cos = tl.load(rotation + at + d, mask=d < ROTARY, other=0.0).to(tl.float32)
    sin = tl.load(rotation + at + ROTARY + d, mask=d < ROTARY, other=0.0).to(tl.float32)
    x = tl.where(turned, x * cos + partner * sin, x)

    out = query + (token.to(tl.int64) * HEADS + head) * DIM + d
    tl.store(out, x.to(query.dtype.element_ty), mask=inside & (head < HEADS))
    # Keys, then values, to the token's place. One that does not exist has none.
    slot = tl.load(slots + token).to(tl.int64)
    page = tl.maximum(position, 0) // BLOCK_SIZE
    block = tl.load(tables + slot * pages + page).to(tl.int64)
    place = (block * 2 * KV_HEADS + head - HEADS) * BLOCK_SIZE + position % BLOCK_SIZE
    written = inside & (head >= HEADS) & (position >= 0)
    tl.store(cache + place * DIM + d, x.to(cache.dtype.element_ty), mask=written)


@triton.jit
def _norm_weights(q_norm, k_norm, d, mask, is_query, offset):
    """Weights [heads, head_dim] of the norm of queries, or of keys."""
    of_query = tl.load(q_norm + d, mask=mask, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm + d, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key) + offset


def qk_norm_rotary_write(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    rotation: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """See `decode_torch.qk_norm_rotary_write`; all tensors are contiguous."""
    kv_heads, block_size, dim = cache.shape[2:]
    all_heads = qkv.shape[1] // dim
    heads = all_heads - 2 * kv_heads
    query = qkv.new_empty(len(qkv), heads, dim)
    q_norm, k_norm = norms or (None, None)
    with torch.cuda.device_of(qkv):
        _rotate_kernel[len(qkv), triton.cdiv(all_heads, HEADS_AT_ONCE)](
            qkv, q_norm, k_norm, rotation, cache, tables, slots, positions, query,
            tables.shape[1], eps, offset,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, ROTARY=rotation.shape[-1],
            BLOCK_SIZE=block_size, BLOCK_HEADS=HEADS_AT_ONCE,
            BLOCK_DIM=triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
    return query


@triton.jit
def _act_mul_kernel(gate_up, out, features, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Some features of one token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < features
    gate = tl.load(gate_up + token * 2 * features + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * features + features + at, mask=inside, other=0.0)
    if ACTIVATION == "silu":
        h = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        h = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # gelu_tanh; (1 + tanh x) / 2 is sigmoid 2 x
        h = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    h *= up.to(tl.float32)
    tl.store(out + token * features + at, h.to(out.dtype.element_ty), mask=inside)


def act_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """See `decode_torch.act_mul`."""
    tokens, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, features)
    with torch.cuda.device_of(gate_up):
        _act_mul_kernel[tokens, triton.cdiv(features, FEATURES_AT_ONCE)](
            gate_up, out, features,
            ACTIVATION=activation, BLOCK=FEATURES_AT_ONCE, num_warps=4,
        )  # fmt: skip
    return out
