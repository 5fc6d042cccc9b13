"""The parts of `linear_log_probs` in Triton: logits live in registers, one tile at a time.

Forward is an online softmax over blocks of the vocabulary; only [splits, tokens] statistics are
written. Backward recomputes the logits of a chunk and writes their gradient. Torch's own product
turns it into those of `hidden` and `weight`: no atomics, so the same inputs give the same bits. The
rules are those of `linear_log_probs_torch`, to whose functions these are equal.
"""

import torch
import triton
import triton.language as tl

from hybridrl.kernels.softmax_partial import SoftmaxPartial

# Tokens, vocabulary and features of a tile, by bytes of an element. Float32 is multiplied without
# tensor cores: in large tiles it would spill, and take 128 KiB of shared memory where many GPUs
# have 99.
_TILES = {2: (128, 128, 64), 4: (64, 64, 32)}
WANTED_PROGRAMS = 1024
"""Programs of a forward launch: several waves on every GPU of today (an H200 runs 132 at once)."""
GROUP = 8
"""Blocks of tokens that share blocks of `weight` while those are in the second-level cache."""
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _logits(
    hidden,
    weight,
    rows,
    columns,
    tokens,
    vocab,
    features,
    hidden_stride,
    weight_stride,
    ON_CPU: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """One tile of hidden weight^T in float32; zero outside of the matrices."""
    # 64-bit: a head of 256 k tokens by 8 k features has 2^31 elements.
    hidden_rows = hidden + rows.to(tl.int64)[:, None] * hidden_stride
    weight_rows = weight + columns.to(tl.int64)[None, :] * weight_stride
    tile = tl.zeros((BLOCK_TOKENS, BLOCK_VOCAB), tl.float32)
    for start in range(0, features, BLOCK_FEATURES):
        k = start + tl.arange(0, BLOCK_FEATURES)
        left = tl.load(
            hidden_rows + k[None, :],
            mask=(rows < tokens)[:, None] & (k < features)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight_rows + k[:, None],
            mask=(columns < vocab)[None, :] & (k < features)[:, None],
            other=0.0,
        )
        if ON_CPU:  # Triton's interpreter takes the bits of bf16 for integers in a product
            left, right = left.to(tl.float32), right.to(tl.float32)
        tile = tl.dot(left, right, tile, input_precision="ieee")
    return tile


@triton.jit
def _transformed(tile, bias, cap, columns, vocab):
    """The tile of products with the head's bias, capped; unchanged where both are None."""
    if bias is not None:
        row = tl.load(bias + columns, mask=columns < vocab, other=0.0)
        tile += row.to(tl.float32)[None, :]
    if cap is not None:
        tile = cap * (2.0 * tl.sigmoid(2.0 * tile / cap) - 1.0)  # tanh
    return tile


@triton.jit(do_not_specialize=["tokens"])  # their number varies: one compilation serves all
def _partial_kernel(
    hidden,
    weight,
    targets,
    out,
    tokens,
    vocab,
    features,
    hidden_stride,
    weight_stride,
    temperature,
    vocab_per_split,
    bias,
    cap,
    WITH_ENTROPY: tl.constexpr,
    ON_CPU: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """Statistics of one block of tokens over one split of the vocabulary.

    Splits vary fastest over the programs, so those that run together share blocks of `hidden`.
    """
    split = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    target = tl.load(targets + rows, mask=rows < tokens, other=-1)
    # A finite start: minus infinity would make a rescaled sum of zero not a number.
    maximum = tl.full((BLOCK_TOKENS,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_TOKENS,), tl.float32)
    weighted = tl.zeros((BLOCK_TOKENS,), tl.float32)
    target_logit = tl.full((BLOCK_TOKENS,), float("-inf"), tl.float32)
    first = split * vocab_per_split
    for start in range(first, min(first + vocab_per_split, vocab), BLOCK_VOCAB):
        columns = start + tl.arange(0, BLOCK_VOCAB)
        logits = _logits(
            hidden,
            weight,
            rows,
            columns,
            tokens,
            vocab,
            features,
            hidden_stride,
            weight_stride,
            ON_CPU,
            BLOCK_TOKENS,
            BLOCK_VOCAB,
            BLOCK_FEATURES,
        )
        logits = _transformed(logits, bias, cap, columns, vocab)
        logits = tl.where((columns < vocab)[None, :], logits / temperature, LOWEST)
        new_maximum = tl.maximum(maximum, tl.max(logits, 1))
        shift = maximum - new_maximum
        scale = tl.exp(shift)
        shifted = logits - new_maximum[:, None]
        exponentials = tl.exp(shifted)
        if WITH_ENTROPY:
            weighted = scale * (weighted + shift * total) + tl.sum(exponentials * shifted, 1)
        total = scale * total + tl.sum(exponentials, 1)
        maximum = new_maximum
        is_target = columns[None, :] == target[:, None]
        target_logit = tl.maximum(
            target_logit, tl.max(tl.where(is_target, logits, float("-inf")), 1)
        )
    # [4, splits, tokens], in the order of SoftmaxPartial.
    statistic = tl.num_programs(0).to(tl.int64) * tokens
    place = out + split.to(tl.int64) * tokens + rows
    tl.store(place, maximum, mask=rows < tokens)
    tl.store(place + statistic, total, mask=rows < tokens)
    tl.store(place + 2 * statistic, weighted, mask=rows < tokens)
    tl.store(place + 3 * statistic, target_logit, mask=rows < tokens)


@triton.jit(do_not_specialize=["tokens"])
def _grad_logits_kernel(
    hidden,
    weight,
    targets,
    lse,
    entropy,
    grad_log_probs,
    grad_entropy,
    out,
    tokens,
    vocab,
    features,
    hidden_stride,
    weight_stride,
    temperature,
    bias,
    cap,
    WITH_ENTROPY: tl.constexpr,
    ON_CPU: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """One tile of the logits' gradient; programs go over GROUP blocks of tokens, then columns."""
    token_blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    in_group = GROUP * tl.cdiv(vocab, BLOCK_VOCAB)
    program = tl.program_id(0)
    first = program // in_group * GROUP
    height = min(token_blocks - first, GROUP)
    rows = (first + program % in_group % height) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = program % in_group // height * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    logits = _logits(
        hidden,
        weight,
        rows,
        columns,
        tokens,
        vocab,
        features,
        hidden_stride,
        weight_stride,
        ON_CPU,
        BLOCK_TOKENS,
        BLOCK_VOCAB,
        BLOCK_FEATURES,
    )
    logits = _transformed(logits, bias, cap, columns, vocab)
    inside = rows < tokens
    target = tl.load(targets + rows, mask=inside, other=-1)
    grad = tl.load(grad_log_probs + rows, mask=inside, other=0.0)[:, None]
    log_p = logits / temperature - tl.load(lse + rows, mask=inside, other=0.0)[:, None]
    scale = grad
    if WITH_ENTROPY:
        grad_of_entropy = tl.load(grad_entropy + rows, mask=inside, other=0.0)[:, None]
        h = tl.load(entropy + rows, mask=inside, other=0.0)[:, None]
        scale = grad + grad_of_entropy * (log_p + h)
    result = tl.where(columns[None, :] == target[:, None], grad, 0.0) - tl.exp(log_p) * scale
    if cap is not None:
        # The slope of tanh. From log_p, since a second tile would not fit in registers.
        log_sum = tl.load(lse + rows, mask=inside, other=0.0)[:, None]
        tangent = (log_p + log_sum) * (temperature / cap)
        result *= 1.0 - tangent * tangent
    place = out + rows.to(tl.int64)[:, None] * vocab + columns[None, :]
    mask = inside[:, None] & (columns < vocab)[None, :]
    tl.store(place, (result / temperature).to(out.dtype.element_ty), mask=mask)


def partial(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    chunk_elements: int,
    bias: torch.Tensor | None = None,
    cap: float | None = None,
) -> SoftmaxPartial:
    """As `linear_log_probs_torch.partial`, not in float64; no chunk of logits exists at all."""
    hidden, weight = _rows_contiguous(hidden), _rows_contiguous(weight)
    tokens, vocab = len(hidden), len(weight)
    block_tokens, block_vocab, _ = _TILES[hidden.itemsize]
    token_blocks, vocab_blocks = triton.cdiv(tokens, block_tokens), triton.cdiv(vocab, block_vocab)
    splits = max(1, min(vocab_blocks, triton.cdiv(WANTED_PROGRAMS, token_blocks)))
    out = torch.empty(4, splits, tokens, dtype=torch.float32, device=hidden.device)
    with torch.cuda.device_of(hidden):
        _partial_kernel[splits, token_blocks](
            hidden,
            weight,
            targets,
            out,
            tokens,
            vocab,
            hidden.shape[1],
            hidden.stride(0),
            weight.stride(0),
            temperature,
            triton.cdiv(vocab_blocks, splits) * block_vocab,
            bias,
            cap,
            WITH_ENTROPY=with_entropy,
            **_options(hidden),
        )
    return SoftmaxPartial(*out).join_parts()


def grad_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
    bias: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """As `linear_log_probs_torch.grad_logits`."""
    hidden, weight = _rows_contiguous(hidden), _rows_contiguous(weight)
    tokens, vocab = len(hidden), len(weight)
    out = torch.empty(tokens, vocab, dtype=hidden.dtype, device=hidden.device)
    block_tokens, block_vocab, _ = _TILES[hidden.itemsize]
    programs = triton.cdiv(tokens, block_tokens) * triton.cdiv(vocab, block_vocab)
    with torch.cuda.device_of(hidden):
        _grad_logits_kernel[programs,](
            hidden,
            weight,
            targets,
            lse,
            lse if entropy is None else entropy,  # not looked at without entropy
            grad_log_probs.contiguous(),  # a sum's gradient is one number, expanded
            grad_entropy.contiguous(),
            out,
            tokens,
            vocab,
            hidden.shape[1],
            hidden.stride(0),
            weight.stride(0),
            temperature,
            bias,
            cap,
            WITH_ENTROPY=entropy is not None,
            GROUP=GROUP,
            **_options(hidden),
        )
    return out


def _rows_contiguous(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _options(hidden: torch.Tensor) -> dict[str, int]:
    """Fixed, not tuned at run time: another tile shape would change the last bits."""
    block_tokens, block_vocab, block_features = _TILES[hidden.itemsize]
    return {
        "ON_CPU": hidden.device.type == "cpu",
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_VOCAB": block_vocab,
        "BLOCK_FEATURES": block_features,
        "num_warps": 8,
        "num_stages": 3,
    }
