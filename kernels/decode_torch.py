"""What the Triton kernels of a decode step compute, in torch.

Sums are in float32 at least. A token that does not exist has position -1, and a row without a draw
has count -1: those rows write nothing, attend to nothing and draw token -1.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from hybridrl.kernels.decode_state import FULL, RUNNING, STOPPED, DecodeState

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
_WORD = 0xFFFFFFFF


def residual_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of h = x + residual, and h: both [tokens, features].

    The norm is h / sqrt(mean(h^2) + eps) (weight + offset); Gemma's `offset` is 1.
    """
    total = x if residual is None else x + residual
    return _rms_norm(total, weight, eps, offset), total


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
    """Rotated queries [tokens, heads, head_dim]; keys and values are written to the cache.

    `qkv` [tokens, (heads + 2 kv_heads) head_dim] is the fused product of a layer. `norms` are the
    weights [head_dim] of the RMSNorm of every query and key head; None: there is none. `rotation`
    [positions, 2, rotary_dim] has cosines and sines, the first half of the sines negated. It
    rotates the first `rotary_dim` numbers of a head by halves. `cache` [blocks, 2, kv_heads,
    block_size, head_dim] is that of a layer, `tables` [slots, pages] has the blocks of sequences,
    `slots` and `positions` [tokens] say whose and which token is which.
    """
    kv_heads, block_size, dim = cache.shape[2:]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    qkv = qkv.view(len(qkv), -1, dim)
    query, key, value = qkv.split((heads, kv_heads, kv_heads), 1)
    if norms is not None:
        query, key = (
            _rms_norm(x, w, eps, offset) for x, w in zip((query, key), norms, strict=True)
        )
    query, key = (_rotated(x, rotation, positions) for x in (query, key))

    exists = positions >= 0
    page = tables[slots, positions.clamp(min=0) // block_size]
    blocks, offsets = page[exists].long(), positions[exists].long() % block_size
    new = torch.stack((key, value), 1)
    cache.permute(0, 3, 1, 2, 4)[blocks, offsets] = new[exists]
    return query


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
    """Attention of every query [tokens, heads, head_dim] over the pages of its sequence.

    A query sees the keys up to its position, of these the last `window` ones. No position is
    `max_length` or more. A sequence may have several queries; each `queries` tokens, which divide
    all of them, are those of one. `softcap` c makes c tanh(x / c) of scores x. `sinks` [heads]
    are scores of a key without a value. For `cache` and the others see `qk_norm_rotary_write`.
    """
    kv_heads, block_size, dim = cache.shape[2:]
    tokens, heads = query.shape[:2]
    wide = _wide_dtype(query)
    pages = tables[slots.long(), : -(-max_length // block_size)].long()
    # [tokens, 2, kv_heads, keys, head_dim]
    kept = cache[pages].permute(0, 2, 3, 1, 4, 5).reshape(tokens, 2, kv_heads, -1, dim).to(wide)
    scores = query.to(wide).view(tokens, kv_heads, -1, dim) @ kept[:, 0].mT * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    at = torch.arange(scores.shape[-1], device=query.device)
    seen = at <= positions[:, None]
    if window is not None:
        seen &= at > positions[:, None] - window
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.to(wide).view(1, kv_heads, -1, 1).expand(tokens, -1, -1, -1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : len(at)]
    out = (weights @ kept[:, 1]).view(tokens, heads, dim)
    return out.where((positions >= 0)[:, None, None], 0.0).to(query.dtype)


def act_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """act(gate) * up [tokens, features] of a fused product [tokens, 2 features].

    `activation` is a key of ACTIVATIONS.
    """
    gate, up = gate_up.to(_wide_dtype(gate_up)).chunk(2, -1)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def route(
    logits: torch.Tensor,
    positions: torch.Tensor,
    per_token: int,
    normalizes: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [tokens, per_token] of `dtype`, and int32 experts, by a router's logits.

    `logits` are [tokens, experts]. Experts are those of highest probability, the highest first, and
    weights their probabilities, which sum to 1 if it `normalizes`. A token that does not exist has
    the expert -1.
    """
    weights, chosen = logits.softmax(-1, dtype=_wide_dtype(logits)).topk(per_token)
    if normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(dtype), chosen.where((positions >= 0)[:, None], -1).int()


def order_by_expert(
    chosen: torch.Tensor, first: int, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of token and expert in the order of experts: int32 `order` [pairs], `ends` [number].

    `chosen` [tokens, per_token] has the experts of pairs 0 to tokens * per_token. Of the `number`
    experts from `first` on number i has the pairs order[ends[i - 1]:ends[i]], in their order. Pairs
    of experts elsewhere come last.

    Example: experts 4, 3, 7, 4 with first 3 and number 2 give the order 1, 0, 3, 2 and ends 1, 3.
    """
    experts, order = _local(chosen.flatten(), first, number).sort(stable=True)
    numbers = torch.arange(number, device=chosen.device)
    return order.int(), torch.searchsorted(experts, numbers, right=True, out_int32=True)


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, shared: int
) -> torch.Tensor:
    """Rows [pairs, out] of `x` [pairs / shared, in] by each pair's expert, in the order of pairs.

    `weight` is [number, out, in], `order` and `ends` are those of `order_by_expert`. Each `shared`
    pairs have one row of `x`. A pair of an expert elsewhere has any numbers.
    """
    experts = torch.searchsorted(ends, torch.arange(len(order), device=x.device), right=True)
    here = experts < len(weight)
    pairs = order[here].long()
    out = x.new_full((len(order), weight.shape[1]), torch.nan)
    out[pairs] = torch.einsum("pi,poi->po", x[pairs // shared], weight[experts[here]])
    return out


def combine(
    rows: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, first: int, number: int
) -> torch.Tensor:
    """The sum [tokens, features] of each token's `rows` [pairs, features] by its weights.

    Pairs of experts that are none of the `number` from `first` on add nothing.
    """
    here = _local(chosen, first, number) < number
    wide = rows.to(_wide_dtype(rows)).view(*chosen.shape, -1) * weights[..., None]
    return wide.where(here[..., None], 0.0).sum(1).to(rows.dtype)


def begin_step(state: DecodeState, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pending tokens, positions and counts, int32 [rows] each, of the sequences in `slots` [rows].

    Positions and counts are -1 where nothing runs.
    """
    runs = state.ended[slots] == RUNNING
    positions, counts = (x[slots].where(runs, -1) for x in (state.lengths, state.counts))
    return state.tokens[slots], positions, counts


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    streams: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] int32 and their log-probabilities [rows] float32 of `logits` [rows, vocab].

    Token number `counts` [rows] of the sequences in `slots` [rows]. It is the first one whose
    cumulative probability exceeds the uniform of its stream; the likeliest where the temperature
    is 0. Log-probabilities are those after the temperature, or of temperature 1 for the likeliest.
    """
    temperature = temperatures[slots]
    greedy = temperature == 0
    scaled = logits.float() / temperature.where(~greedy, 1.0)[:, None]
    best, likeliest = scaled.max(-1)
    ends = (scaled - best[:, None]).exp().cumsum(-1, dtype=torch.float64)
    last = ends[:, -1:]
    # Rounding may put the target at the last end.
    target = (uniforms(streams[slots], counts)[:, None] * last).minimum(last * (1 - 2.0**-52))
    drawn = torch.searchsorted(ends, target, right=True)[:, 0]
    tokens = likeliest.where(greedy, drawn)
    logit = scaled.gather(-1, tokens[:, None])[:, 0]
    log_probs = ((logit - best).double() - last[:, 0].log()).float()
    draws = counts >= 0
    return tokens.where(draws, -1).int(), log_probs.where(draws, 0.0)


def advance(state: DecodeState, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """The drawn `tokens` [rows] are the pending ones in `slots` [rows], or end their sequences.

    A token of -1 changes nothing. No two rows with a token are in one slot.
    """
    drawn = tokens >= 0
    slots, tokens = slots[drawn].long(), tokens[drawn]
    stopped = (state.stops[slots] == tokens[:, None]).any(-1)
    full = state.counts[slots] + 1 >= state.limits[slots]
    state.tokens[slots] = tokens
    state.lengths[slots] += 1
    state.counts[slots] += 1
    state.ended[slots] = (full * FULL).masked_fill(stopped, STOPPED).int()


def uniforms(streams: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Uniforms in [0, 1) float64 of int64 `streams` at int32 `counts`: Philox4x32-10, 53 bits.

    Bit for bit those of `hybridrl.engines.rollout.random`, on any device. A product of two words
    may wrap to a negative number, whose bits are right.
    """
    at = counts.long()
    words = [at & _WORD, (at >> 32) & _WORD, torch.zeros_like(at), torch.zeros_like(at)]
    key = [streams & _WORD, (streams >> 32) & _WORD]
    for number in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        bumped = [
            (k + number * weyl) & _WORD
            for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        ]
        words = [
            ((second >> 32) & _WORD) ^ words[1] ^ bumped[0],
            second & _WORD,
            ((first >> 32) & _WORD) ^ words[3] ^ bumped[1],
            first & _WORD,
        ]
    return ((words[0] >> 5 << 26) | (words[1] >> 6)).double() * 2.0**-53


def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of sums: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _local(chosen: torch.Tensor, first: int, number: int) -> torch.Tensor:
    """The number of each expert among the local ones; `number` for one elsewhere."""
    experts = chosen - first
    return experts.where((experts >= 0) & (experts < number), number)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    wide = x.to(_wide_dtype(x))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)


def _rotated(x: torch.Tensor, rotation: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, head_dim], rotated in its first numbers."""
    size = rotation.shape[-1]
    wide = _wide_dtype(x)
    cos, sin = rotation[positions.clamp(min=0)].to(wide).unsqueeze(2).unbind(1)
    turned = x[..., :size].to(wide)
    swapped = turned.roll(size // 2, -1)
    turned = (turned * cos + swapped * sin).to(x.dtype)
    return torch.cat((turned, x[..., size:]), -1)
