"""Drawing tokens: one uniform per token against the cumulative distribution in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hybridrl.engines.rollout.device_copies import Array, upload
from hybridrl.engines.rollout.interface import SamplingParams
from hybridrl.engines.rollout.logit_edits import LogitEdits

_CHUNK = 256
_NUCLEUS = 512


@dataclass(slots=True)
class SamplingBatch:
    """Sampling parameters of the rows of one step.

    `temperature` [rows] float32 (1 where greedy), `greedy` [rows] bool or None when no row is,
    `top_k` [rows] int64 (the vocabulary's size where all) or None, `top_p` [rows] float64 or None.
    `widest` is the largest number of `top_k` but those of all tokens, which the host knows. `min_p`
    is [rows] float32 or None. `plain` says that every row has temperature 1. `edits` is None where
    all rows draw from the model's own logits. `num_kept` is the largest `top_k` of the rows whose
    kept ids are recorded (`SamplingParams.keeps_ids`), 0 where no row's are; `keeps` [rows] bool
    says which rows' are, None where all are or none.
    """

    temperature: torch.Tensor
    plain: bool
    greedy: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    widest: int = 0
    min_p: torch.Tensor | None = None
    edits: LogitEdits | None = None
    num_kept: int = 0
    keeps: torch.Tensor | None = None

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device
    ) -> "SamplingBatch":
        """The rows of `params`, as tensors on `device`."""
        columns: dict[str, Array] = {
            "temperature": np.array([p.temperature or 1.0 for p in params], np.float32)
        }
        if any(p.temperature == 0 for p in params):
            columns["greedy"] = np.array([p.temperature == 0 for p in params])
        widest = max([p.top_k for p in params if 0 < p.top_k < vocab_size], default=0)
        if widest:
            columns["top_k"] = np.array([p.top_k or vocab_size for p in params], np.int64)
        if any(p.top_p < 1 for p in params):
            columns["top_p"] = np.array([p.top_p for p in params], np.float64)
        if any(p.min_p > 0 for p in params):
            columns["min_p"] = np.array([p.min_p for p in params], np.float32)
        keeping = [p for p in params if p.keeps_ids]
        if 0 < len(keeping) < len(params):
            columns["keeps"] = np.array([p.keeps_ids for p in params])
        sent = upload(columns, device)
        return cls(
            temperature=sent["temperature"],
            plain=all(p.temperature in (0, 1) for p in params),
            greedy=sent.get("greedy"),
            top_k=sent.get("top_k"),
            top_p=sent.get("top_p"),
            widest=widest,
            min_p=sent.get("min_p"),
            edits=LogitEdits(params, device) if any(p.edits_logits for p in params) else None,
            num_kept=min(vocab_size, max([p.top_k for p in keeping], default=0)),
            keeps=sent.get("keeps"),
        )

    @classmethod
    def alike(
        cls, params: SamplingParams, rows: int, vocab_size: int, device: torch.device
    ) -> "SamplingBatch":
        """As `of`, for `rows` rows of the same `params`, which the device fills in itself."""
        assert not params.edits_logits
        temperature, narrow = params.temperature, 0 < params.top_k < vocab_size

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            temperature=column(temperature or 1.0, torch.float32),
            plain=temperature in (0, 1),
            greedy=column(True, torch.bool) if temperature == 0 else None,
            top_k=column(params.top_k, torch.int64) if narrow else None,
            top_p=column(params.top_p, torch.float64) if params.top_p < 1 else None,
            widest=params.top_k if narrow else 0,
            min_p=column(params.min_p, torch.float32) if params.min_p > 0 else None,
            num_kept=min(params.top_k, vocab_size) if params.keeps_ids else 0,
        )

    @property
    def has_only_temperatures(self) -> bool:
        """Whether a row that leaves leaves no work of its own behind."""
        rest = (self.greedy, self.top_k, self.top_p, self.min_p, self.edits)
        return not self.num_kept and all(column is None for column in rest)

    def take(self, rows: torch.Tensor) -> "SamplingBatch":
        """Only these rows, in this order; none edits its logits. Maxima are those of all rows."""
        assert self.edits is None
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        taken: dict[str, Any] = {
            name: column[rows]
            for name, column in columns.items()
            if isinstance(column, torch.Tensor)
        }
        return replace(self, **taken)


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    batch: SamplingBatch,
    edited: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens [rows], their log-probabilities [rows] float32, and the kept ids [rows, num_kept].

    `logits` [rows, vocab], `uniforms` [rows] float64 in [0, 1). The log-probability is that of the
    temperature-scaled distribution before all restrictions (of temperature 1 for greedy rows). The
    token is the first one whose cumulative probability, in the order of ids, exceeds the uniform.
    With `edited` logits (`LogitEdits`) the token is drawn from those.

    A row that keeps ids returns those that it was drawn from, int32, rising, with -1 behind them.
    Its log-probability is that of the temperature-scaled distribution renormalized over them. Other
    rows have -1 alone, and where there is no row that keeps ids there are none.
    """
    # The model's distribution after temperature.
    logits = _scaled(logits, batch)
    best = logits.amax(-1, True)
    of_model = weights = (logits - best).exp_()
    # The one that is drawn from.
    if edited is not None:
        edited = _scaled(edited, batch)
        weights = (edited - edited.amax(-1, True)).exp_()
    if batch.min_p is not None:
        # The most probable token has weight 1.
        weights = weights.where(weights >= batch.min_p[:, None], 0.0)
    kept = None
    if batch.num_kept:
        kept = kept_ids(weights, batch)
        tokens, total = _draw_kept(kept, weights, of_model, uniforms)
    if kept is None:
        tokens, total = _draw(weights, of_model, uniforms, batch)
    elif batch.keeps is not None:
        others = _draw(weights, of_model, uniforms, batch)
        tokens = torch.where(batch.keeps[:, None], tokens, others[0])
        total = torch.where(batch.keeps[:, None], total, others[1])
    if batch.greedy is not None:
        likeliest = (logits if edited is None else edited).argmax(-1, True)
        tokens = torch.where(batch.greedy[:, None], likeliest, tokens)
    log_probs = (logits.gather(-1, tokens) - best - total.log()).float()  # the sums are float64
    return tokens[:, 0], log_probs[:, 0], None if kept is None else kept.int()


def _draw(
    weights: torch.Tensor, of_model: torch.Tensor, uniforms: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows, 1] of restricted `weights`, and the sums [rows, 1] float64 of the model's.

    Both weights are [rows, vocab], and may be one tensor.
    """
    ends = _ends(of_model)
    total = ends[:, -1:]
    if batch.top_k is not None or batch.top_p is not None:
        weights = restrict(weights, batch.top_k, batch.widest, batch.top_p)
    if weights is not of_model:
        ends = _ends(weights)
    return _invert(weights, ends, uniforms), total


def _draw_kept(
    kept: torch.Tensor, weights: torch.Tensor, of_model: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_draw`, from the `kept` ids [rows, num_kept] alone; the sums are of their weights.

    A row without kept ids has a total of 0, and its token means nothing.
    """
    inside, ids = kept >= 0, kept.clamp(min=0)
    ends = weights.gather(-1, ids).where(inside, 0.0).cumsum(-1, dtype=torch.float64)
    last = ends[:, -1:]
    place = _first_above(ends, uniforms[:, None] * last, last)
    tokens = ids.gather(-1, place.clamp(max=ids.shape[1] - 1))
    total = of_model.gather(-1, ids).where(inside, 0.0).sum(-1, True, dtype=torch.float64)
    return tokens, total


def kept_ids(weights: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The ids [rows, num_kept] that rows which keep them are drawn from, rising; -1 behind them.

    `weights` [rows, vocab] float32 are probabilities up to a factor per row. Of equal ones the
    lower id is the likelier, so a row has `top_k` ids at most, whichever rows are beside it.
    """
    vocab, device = weights.shape[-1], weights.device
    # A float32 that is not negative orders as its bits do; below them, the lower ids are larger.
    keys = weights.view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    keys += torch.arange(vocab - 1, -1, -1, device=device)
    ids = vocab - 1 - (keys.topk(batch.num_kept, -1).values & (2**32 - 1))
    largest = weights.gather(-1, ids)
    inside = largest > 0
    if batch.top_k is not None:
        inside &= torch.arange(batch.num_kept, device=device) < batch.top_k[:, None]
    if batch.top_p is not None:
        ends = largest.where(inside, 0.0).cumsum(-1, dtype=torch.float64)
        before = functional.pad(ends[:, :-1], (1, 0))
        top_p = batch.top_p[:, None]
        inside &= (before < top_p * ends[:, -1:]) | (top_p >= 1)
    if batch.keeps is not None:
        inside &= batch.keeps[:, None]
    ids = ids.masked_fill(~inside, vocab).sort(-1).values
    return ids.masked_fill(ids == vocab, -1)


def _scaled(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    logits = logits.float()
    return logits if batch.plain else logits / batch.temperature[:, None]


def restrict(
    weights: torch.Tensor, top_k: torch.Tensor | None, widest: int, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Zero the weights outside top-k, then top-p (of the remaining); ties with the last kept stay.

    `weights` [rows, vocab] are probabilities up to a factor per row; `widest`: see `SamplingBatch`.
    """
    vocab = weights.shape[-1]
    if top_k is not None:
        largest = weights.topk(widest, -1).values
        last = largest.gather(-1, (top_k - 1).clamp(max=widest - 1)[:, None])
        weights = weights.where((weights >= last) | (top_k >= vocab)[:, None], 0.0)
    if top_p is not None:
        wanted = (top_p * weights.sum(-1, dtype=torch.float64))[:, None]
        # A nucleus is mostly small: a full sort only if the first candidates do not fill it.
        for count in (min(_NUCLEUS, vocab), vocab):
            largest = weights.topk(count, -1).values
            reached = largest.double().cumsum(-1) >= wanted
            if count == vocab or bool((reached[:, -1] | (top_p >= 1)).all()):
                break
        first = reached.int().argmax(-1, keepdim=True)
        last = largest.gather(-1, first)
        # top_p 1 keeps all, whatever the rounding of the sums.
        everything = (top_p >= 1)[:, None] | ~reached[:, -1:]
        weights = weights.where((weights >= last) | everything, 0.0)
    return weights


def _ends(weights: torch.Tensor) -> torch.Tensor:
    """Cumulative sums in float64, by token or, for a large vocabulary, by chunk of `_CHUNK`."""
    vocab = weights.shape[-1]
    if vocab <= _CHUNK:
        return weights.cumsum(-1, dtype=torch.float64)
    aligned = vocab - vocab % _CHUNK
    sums = weights[:, :aligned].unflatten(-1, (-1, _CHUNK)).sum(-1, dtype=torch.float64)
    if aligned < vocab:
        remaining = weights[:, aligned:].sum(-1, keepdim=True, dtype=torch.float64)
        sums = torch.cat((sums, remaining), -1)
    return sums.cumsum(-1)


def _invert(weights: torch.Tensor, ends: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token [rows, 1] whose cumulative weight exceeds the uniform's share of the total.

    In two levels, chunk and token, so that the float64 sums of a large vocabulary are cheap. Of
    weights that are no numbers it is the last one, whose log-probability tells.
    """
    total = ends[:, -1:]
    target = uniforms[:, None] * total
    index = _first_above(ends, target, total)
    vocab = weights.shape[-1]
    if vocab <= _CHUNK:
        return index.clamp_(max=vocab - 1)
    before = ends.gather(-1, (index - 1).clamp(min=0)).where(index > 0, 0.0)
    ids = index * _CHUNK + torch.arange(_CHUNK, device=weights.device)
    inside = weights.gather(-1, ids.clamp(max=vocab - 1)).where(ids < vocab, 0.0)
    ends = inside.cumsum(-1, dtype=torch.float64)
    token = _first_above(ends, target - before, ends[:, -1:])
    return (index * _CHUNK + token).clamp_(max=vocab - 1)


def _first_above(ends: torch.Tensor, target: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The first index [rows, 1] where `ends` [rows, n] exceeds `target` [rows, 1].

    Rounding may put the target at the `last` end. It is clamped below that, so that the weight at
    the index is positive. Among ends that are no numbers, as of a model that has diverged, it is n.
    """
    return torch.searchsorted(ends, target.minimum(last * (1 - 2.0**-52)), right=True)
