"""The draw of a decode step in Triton, and what it changes in the sequences' state.

The functions equal those of `decode_torch`. The vocabulary is read once for sums by chunk, and one
chunk a second time, for the token in it. Exponentials are in float32, sums in float64.
"""

import torch
import triton
import triton.language as tl

from hybridrl.kernels import decode_state
from hybridrl.kernels.decode_state import DecodeState

CHUNK = 1024
"""Tokens of the vocabulary that one program reads."""
ROWS_AT_ONCE = 64
"""Sequences whose state one program changes."""
RUNNING, STOPPED, FULL = (
    tl.constexpr(value) for value in (decode_state.RUNNING, decode_state.STOPPED, decode_state.FULL)
)
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _scaled(logits, row, at, vocab, temperature):
    """Logits of some tokens of a row, over the temperature, which is 1 for a greedy row."""
    inside = at < vocab
    z = tl.load(logits + row.to(tl.int64) * vocab + at, mask=inside, other=float("-inf"))
    divisor = tl.where(temperature == 0.0, 1.0, temperature) + tl.zeros(z.shape, tl.float32)
    return tl.div_rn(z.to(tl.float32), divisor)


@triton.jit
def _chunk_kernel(logits, slots, temperatures, maxima, sums, vocab, chunks, CHUNK: tl.constexpr):
    """The maximum of a chunk, and the sum of exponentials that are relative to it."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + tl.load(slots + row))
    z = _scaled(logits, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab, temperature)
    # Finite: a chunk may have only logits of minus infinity.
    best = tl.maximum(tl.max(z, 0), LOWEST)
    total = tl.sum(tl.exp(z - best).to(tl.float64), 0)
    tl.store(maxima + row * chunks + chunk, best)
    tl.store(sums + row * chunks + chunk, total)


@triton.jit
def _uniform(stream, count):
    """Philox4x32-10 of one stream at one count: a float64 with 53 random bits."""
    key, at = stream.to(tl.uint64, bitcast=True), count.to(tl.uint64)
    low, high = (at & 0xFFFFFFFF).to(tl.uint32), (at >> 32).to(tl.uint32)
    zero = low * 0
    first, second, _, _ = tl.philox_impl(
        low, high, zero, zero, (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32), 10
    )
    bits = ((first >> 5).to(tl.int64) << 26) | (second >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _uniforms_kernel(streams, counts, out):
    row = tl.program_id(0)
    tl.store(out + row, _uniform(tl.load(streams + row), tl.load(counts + row)))


def uniforms(streams: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """See `decode_torch.uniforms`: for draws that are restricted in torch."""
    out = torch.empty_like(streams, dtype=torch.float64)
    with torch.cuda.device_of(streams):
        _uniforms_kernel[len(streams),](streams, counts, out, num_warps=1)
    return out


@triton.jit
def _first_above(weights, ends, target, at):
    """The first index with a weight whose end exceeds the target; else the last with a weight.

    Sums in a tree need not rise with the index, so an end above the target is not enough.
    """
    first = tl.min(tl.where((ends > target) & (weights > 0), at, 2147483647), 0)
    last = tl.max(tl.where(weights > 0, at, 0), 0)
    return tl.minimum(first, last)


@triton.jit
def _draw_kernel(
    logits,
    slots,
    counts,
    streams,
    temperatures,
    maxima,
    sums,
    tokens,
    log_probs,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One row: its chunk by the chunks' sums, then its token."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    count = tl.load(counts + row)
    temperature = tl.load(temperatures + slot)
    greedy = temperature == 0.0

    # chunk
    at = tl.arange(0, CHUNKS)
    best_of = tl.load(maxima + row * chunks + at, mask=at < chunks, other=LOWEST)
    best = tl.max(best_of, 0)
    scale = tl.exp(best_of - best)
    weights = tl.load(sums + row * chunks + at, mask=at < chunks, other=0.0) * scale
    ends = tl.cumsum(weights, 0)
    total = tl.max(ends, 0)
    uniform = _uniform(tl.load(streams + slot), tl.maximum(count, 0))
    # Rounding may put the target at the last end.
    target = tl.minimum(uniform * total, total * (1 - 2.220446049250313e-16))
    likeliest = tl.min(tl.where(best_of == best, at, 2147483647), 0)
    chunk = tl.where(greedy, likeliest, _first_above(weights, ends, target, at))
    before = tl.sum(tl.where(at == chunk - 1, ends, 0.0), 0)
    chunk_best = tl.load(maxima + row * chunks + chunk)

    # token
    at = tl.arange(0, CHUNK)
    z = _scaled(logits, row, chunk * CHUNK + at, vocab, temperature)
    weights = tl.exp(z - chunk_best).to(tl.float64) * tl.exp(chunk_best - best)
    likeliest = tl.min(tl.where(z == chunk_best, at, 2147483647), 0)
    drawn = _first_above(weights, tl.cumsum(weights, 0), target - before, at)
    index = tl.where(greedy, likeliest, drawn)
    logit = tl.sum(tl.where(at == index, z, 0.0), 0)
    log_prob = (logit - best).to(tl.float64) - tl.log(total)
    tl.store(tokens + row, tl.where(count >= 0, chunk * CHUNK + index, -1))
    tl.store(log_probs + row, tl.where(count >= 0, log_prob.to(tl.float32), 0.0))


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    streams: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `decode_torch.sample`; all tensors are contiguous."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    maxima = logits.new_empty(rows, chunks, dtype=torch.float32)
    sums = logits.new_empty(rows, chunks, dtype=torch.float64)
    tokens = logits.new_empty(rows, dtype=torch.int32)
    log_probs = logits.new_empty(rows, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _chunk_kernel[rows, chunks](
            logits, slots, temperatures, maxima, sums, vocab, chunks, CHUNK=CHUNK, num_warps=4
        )
        _draw_kernel[rows,](
            logits, slots, counts, streams, temperatures, maxima, sums, tokens, log_probs,
            vocab, chunks,
            CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(chunks), num_warps=4,
        )  # fmt: skip
    return tokens, log_probs


@triton.jit(do_not_specialize=["rows"])  # one compilation serves all
def _begin_kernel(
    state_tokens,
    lengths,
    state_counts,
    ended,
    slots,
    tokens,
    positions,
    counts,
    rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    slot = tl.load(slots + row, mask=exists, other=0)
    runs = exists & (tl.load(ended + slot, mask=exists, other=1) == RUNNING)
    tl.store(tokens + row, tl.load(state_tokens + slot, mask=exists, other=0), mask=exists)
    tl.store(positions + row, tl.load(lengths + slot, mask=runs, other=-1), mask=exists)
    tl.store(counts + row, tl.load(state_counts + slot, mask=runs, other=-1), mask=exists)


def begin_step(state: DecodeState, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """See `decode_torch.begin_step`."""
    tokens, positions, counts = (torch.empty_like(slots) for _ in range(3))
    with torch.cuda.device_of(slots):
        _begin_kernel[triton.cdiv(len(slots), ROWS_AT_ONCE),](
            state.tokens, state.lengths, state.counts, state.ended, slots, tokens, positions,
            counts, len(slots), BLOCK=ROWS_AT_ONCE, num_warps=1,
        )  # fmt: skip
    return tokens, positions, counts


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(
    state_tokens,
    lengths,
    counts,
    limits,
    stops,
    ended,
    slots,
    tokens,
    rows,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row, mask=row < rows, other=-1)
    drawn = token >= 0
    slot = tl.load(slots + row, mask=drawn, other=0)
    length = tl.load(lengths + slot, mask=drawn, other=0) + 1
    count = tl.load(counts + slot, mask=drawn, other=0) + 1
    limit = tl.load(limits + slot, mask=drawn, other=0)
    reason = tl.where(count >= limit, FULL, RUNNING)
    for number in range(NUM_STOPS):
        stop = tl.load(stops + slot * NUM_STOPS + number, mask=drawn, other=-1)
        reason = tl.where(stop == token, STOPPED, reason)
    tl.store(state_tokens + slot, token, mask=drawn)
    tl.store(lengths + slot, length, mask=drawn)
    tl.store(counts + slot, count, mask=drawn)
    tl.store(ended + slot, reason, mask=drawn)


def advance(state: DecodeState, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """See `decode_torch.advance`."""
    with torch.cuda.device_of(slots):
        _advance_kernel[triton.cdiv(len(slots), ROWS_AT_ONCE),](
            state.tokens, state.lengths, state.counts, state.limits, state.stops, state.ended,
            slots, tokens, len(slots),
            NUM_STOPS=state.stops.shape[1], BLOCK=ROWS_AT_ONCE, num_warps=1,
        )  # fmt: skip
