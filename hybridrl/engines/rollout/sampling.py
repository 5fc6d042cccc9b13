"""Drawing tokens: one uniform per token against the cumulative distribution in float64."""

from dataclasses import dataclass

import torch

_CHUNK = 256
_NUCLEUS = 512


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of the rows of one step.

    `temperature` [rows] float32 (1 where greedy), `greedy` [rows] bool or None when no row is,
    `top_k` [rows] int64 (the vocabulary's size where all) or None, `top_p` [rows] float64 or None.
    `plain` says that every row has temperature 1.
    """

    temperature: torch.Tensor
    plain: bool
    greedy: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None


def sample(
    logits: torch.Tensor, uniforms: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] and their log-probabilities [rows] float32.

    `logits` [rows, vocab], `uniforms` [rows] float64 in [0, 1). The log-probability is that of the
    temperature-scaled distribution before top-k and top-p (of temperature 1 for greedy rows). The
    token is the first one whose cumulative probability, in the order of ids, exceeds the uniform.
    """
    logits = logits.float()
    if not batch.plain:
        logits = logits / batch.temperature[:, None]
    best, argbest = logits.max(-1)
    weights = (logits - best[:, None]).exp_()
    chunks, total = _chunk_sums(weights)
    if batch.top_k is not None or batch.top_p is not None:
        weights = restrict(weights, batch.top_k, batch.top_p)
        chunks, kept = _chunk_sums(weights)
    else:
        kept = total
    tokens = _invert(weights, chunks, uniforms * kept)
    if batch.greedy is not None:
        tokens = torch.where(batch.greedy, argbest, tokens)
    drawn = logits.gather(-1, tokens[:, None])[:, 0]
    return tokens, ((drawn - best).double() - total.log()).float()


def restrict(
    weights: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Zero what top-k, then top-p (of what top-k left), exclude; ties with the last kept one stay.

    `weights` [rows, vocab] are probabilities up to a factor per row.
    """
    vocab = weights.shape[-1]
    if top_k is not None:
        most = int(top_k.clamp(max=vocab).where(top_k < vocab, 1).max())
        largest = weights.topk(most, -1).values
        last = largest.gather(-1, (top_k - 1).clamp(max=most - 1)[:, None])
        weights = weights.where((weights >= last) | (top_k >= vocab)[:, None], 0.0)
    if top_p is not None:
        wanted = (top_p * weights.sum(-1, dtype=torch.float64))[:, None]
        # A nucleus is mostly small: a full sort only where the first candidates do not fill it.
        for count in (min(_NUCLEUS, vocab), vocab):
            largest = weights.topk(count, -1).values
            reached = largest.double().cumsum(-1) >= wanted
            if count == vocab or bool((reached[:, -1] | (top_p >= 1)).all()):
                break
        first = reached.int().argmax(-1, keepdim=True)
        last = largest.gather(-1, first)
        # top_p 1 keeps all: rounding of the sums must not decide there.
        everything = (top_p >= 1)[:, None] | ~reached[:, -1:]
        weights = weights.where((weights >= last) | everything, 0.0)
    return weights


def _chunk_sums(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of runs of `_CHUNK` tokens [rows, chunks] and of all [rows], in float64."""
    rows, vocab = weights.shape
    whole = vocab - vocab % _CHUNK
    sums = weights[:, :whole].reshape(rows, -1, _CHUNK).sum(-1, dtype=torch.float64)
    if whole < vocab:
        rest = weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat((sums, rest), -1) if whole else rest
    return sums, sums.sum(-1)


def _invert(weights: torch.Tensor, chunks: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative weight exceeds `target` [rows].

    In two levels, chunk and token, so that the float64 sums of a large vocabulary stay cheap.
    """
    _rows, vocab = weights.shape
    offset = None
    if chunks.shape[-1] > 1:
        ends = chunks.cumsum(-1)
        chunk = (ends <= target[:, None]).sum(-1).clamp_(max=chunks.shape[-1] - 1)
        # Rounding may leave the target at the very end, beyond the last chunk with any weight.
        chunk = torch.minimum(chunk, _last_positive(chunks))
        target = target - (ends - chunks).gather(-1, chunk[:, None])[:, 0]
        offset = chunk * _CHUNK
        ids = offset[:, None] + torch.arange(_CHUNK, device=weights.device)
        inside = weights.gather(-1, ids.clamp(max=vocab - 1)).double()
        weights = inside.where(ids < vocab, 0.0)
    ends = weights.cumsum(-1, dtype=torch.float64)
    token = torch.minimum((ends <= target[:, None]).sum(-1), _last_positive(weights))
    return token if offset is None else token + offset


def _last_positive(weights: torch.Tensor) -> torch.Tensor:
    """Index of the last positive entry of every row."""
    flipped = (weights > 0).flip(-1).int()
    return weights.shape[-1] - 1 - flipped.argmax(-1)
