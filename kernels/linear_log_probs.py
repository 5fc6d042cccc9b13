"""Log-probabilities of given tokens from hidden states, without materializing all logits.

With a head of 150 k tokens logits are by far the largest tensor of a small model's step. Here the
forward pass keeps one number a token (the log-sum-exp). The backward pass recomputes the logits, a
chunk of the vocabulary at a time. The vocabulary may be sharded over the ranks of a group.
docs/kernels.md lists the messages and their sizes.
"""

import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx, once_differentiable

from hybridrl.kernels import linear_log_probs_torch

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk: 64 MiB in float32."""

Backend = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The shard of a vocabulary that this rank's `weight` holds.

    Its first `size` rows are the tokens `start` to `start + size`; rows after those are padding,
    are in no sum and get a zero gradient. The ranks of `group` hold the full vocabulary, each token
    once; a shard may be empty (`size` 0).
    """

    group: dist.ProcessGroup
    start: int
    size: int


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
    shard: VocabShard | None = None,
    backend: Backend = "auto",
    bias: torch.Tensor | None = None,
    cap: float | None = None,
    candidates: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target, and on request the entropy, of softmax(hidden weight^T / T).

    hidden [tokens, features], weight [vocab, features], targets [tokens] (int64). Both results are
    [tokens] in float32 (float64 for float64 inputs) and differentiable in `hidden` and `weight`.
    With a `bias` [vocab], differentiable too, x = hidden weight^T + bias takes the product's place.
    With a `cap` c then c tanh(x / c) does, before the temperature (Gemma 2, arXiv 2408.00118).
    Zero tokens are allowed and give zero gradients; a target outside of the vocabulary has log-
    probability -inf. `chunk_elements` bounds the logits that exist at a time.

    With a `shard`, `weight` and `bias` are this rank's shard of the vocabulary (Megatron-LM, arXiv
    1909.08053, section 3, here with the head's product inside). The call and its backward pass are
    collective over the group, and every rank passes the same `hidden`, targets and gradients of the
    results.
    Results are equal on all ranks; the gradient of `hidden` is summed over the ranks already; the
    gradients of `weight` and `bias` are local.

    With `candidates`, ids [tokens, k], the first result is [tokens, 1 + k]: the target's
    log-probability, then theirs.

    `auto` selects Triton for bf16 and fp16 on NVIDIA GPUs since Ampere, else torch. Raises
    ValueError for a temperature or a cap that is not above 0, inputs of two dtypes, or float64 for
    Triton. Also for a bias of another length, or a shard that is longer than `weight`.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: wanted a number above 0")
    if cap is not None and not cap > 0:
        raise ValueError(f"cap={cap}: wanted a number above 0")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype}, weight is {weight.dtype}: wanted one dtype")
    if bias is not None and (bias.shape, bias.dtype) != (weight.shape[:1], weight.dtype):
        raise ValueError(
            f"bias is {list(bias.shape)} {bias.dtype}: wanted [{len(weight)}] {weight.dtype}"
        )
    if backend == "triton" and hidden.dtype == torch.float64:
        raise ValueError("backend=triton computes in float32: wanted torch for float64")
    if shard and not (shard.start >= 0 and 0 <= shard.size <= len(weight)):
        raise ValueError(f"{shard.start=}, {shard.size=}: weight has {len(weight)} rows")
    logits = None
    if candidates is not None:
        scaling = temperature, chunk_elements, shard, bias, cap
        logits = _token_logits(hidden, weight, candidates, *scaling)
    log_probs, entropy = _LinearLogProbs.apply(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        cap,
        with_entropy,
        chunk_elements,
        shard,
        backend,
        candidates,
        logits,
    )
    return log_probs, entropy if with_entropy else None


@torch.no_grad()
def _token_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    temperature: float,
    chunk_elements: int,
    shard: VocabShard | None,
    bias: torch.Tensor | None,
    cap: float | None,
) -> torch.Tensor:
    """Logits [tokens, k] of `ids` [tokens, k], in float32 at least; not differentiable.

    Rows of the weight are gathered for some tokens at a time. Other arguments, and what a `shard`
    means, as for `linear_log_probs`.
    """
    start, size = (shard.start, shard.size) if shard else (0, len(weight))
    local = ids - start
    inside = (local >= 0) & (local < size)
    local = local.masked_fill(~inside, 0)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    chunk_tokens = max(1, chunk_elements // max(1, ids.shape[1] * hidden.shape[1]))
    products = torch.zeros(ids.shape, dtype=wide, device=hidden.device)
    for first in range(0, len(ids), chunk_tokens) if size else ():
        tokens = slice(first, first + chunk_tokens)
        rows = weight[local[tokens]].to(wide)
        products[tokens] = torch.einsum("td,tkd->tk", hidden[tokens].to(wide), rows)
        if bias is not None:
            products[tokens] += bias[local[tokens]].to(wide)
    products = products.masked_fill(~inside, 0)
    if shard:
        dist.all_reduce(products, group=shard.group)
    logits = products if cap is None else cap * torch.tanh(products / cap)
    return logits / temperature


def _implementation(backend: Backend, hidden: torch.Tensor) -> ModuleType:
    """The module that implements `partial` and `grad_logits`."""
    if backend == "auto":
        suits = (
            hidden.is_cuda
            and torch.version.cuda is not None  # the tiles are sized for NVIDIA's shared memory
            and torch.cuda.get_device_capability(hidden.device) >= (8, 0)
            and hidden.dtype in (torch.bfloat16, torch.float16)
            and importlib.util.find_spec("triton") is not None
        )
        backend = "triton" if suits else "torch"
    if backend == "torch" or not len(hidden):  # a Triton launch must have work
        return linear_log_probs_torch
    from hybridrl.kernels import linear_log_probs_triton

    return linear_log_probs_triton


class _Context(FunctionCtx):
    """The values kept for `backward`; autograd makes it and fills in the last two."""

    temperature: float
    cap: float | None
    with_entropy: bool
    chunk_elements: int
    shard: VocabShard | None
    backend: Backend
    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]


class _LinearLogProbs(torch.autograd.Function):
    """d log p(t) / d logit_j = [j = t] - p_j; d H / d logit_j = -p_j (log p_j + H).

    A cap multiplies both by 1 - tanh(x / c)^2. The bias has the sum of its column's gradients.

    With candidates the first is sum_i g_i [j = i] - p_j sum_i g_i over the target and them. Both
    terms may be a thousand times their difference (`hybridrl.algorithms.distill`), which bf16 would
    lose. So it is taken in float32, before anything is rounded.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        cap: float | None,
        with_entropy: bool,
        chunk_elements: int,
        shard: VocabShard | None,
        backend: Backend,
        candidates: torch.Tensor | None,
        candidate_logits: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, size = (shard.start, shard.size) if shard else (0, len(weight))
        local = targets - start
        local = local.masked_fill(local >= size, -1).contiguous()  # not a padded row either
        statistics = _implementation(backend, hidden).partial(
            hidden,
            weight[:size],
            local,
            temperature,
            with_entropy,
            chunk_elements,
            None if bias is None else bias[:size],
            cap,
        )
        if shard:
            statistics = statistics.all_reduce(shard.group)
        lse, entropy = statistics.log_sum_exp(), statistics.entropy()
        log_probs, ids = statistics.target - lse, None
        if candidates is not None and candidate_logits is not None:
            log_probs = torch.cat([log_probs[:, None], candidate_logits - lse[:, None]], 1)
            ids = torch.cat([targets[:, None], candidates], 1) - start
        saved: Any = (hidden, weight, bias, local, lse, entropy, ids, log_probs)  # None, too
        ctx.save_for_backward(*saved)
        ctx.temperature, ctx.cap, ctx.with_entropy = temperature, cap, with_entropy
        ctx.chunk_elements, ctx.shard, ctx.backend = chunk_elements, shard, backend
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, grad_log_probs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, local, lse, entropy, ids, log_probs = ctx.saved_tensors
        if ids is not None:
            of_entropy = grad_entropy if ctx.with_entropy else None
            ids, of_ids = _grad_at(
                ids, log_probs, lse, entropy, grad_log_probs, of_entropy, ctx.temperature, ctx.cap
            )
            grad_log_probs, local = grad_log_probs.sum(1), torch.full_like(local, -1)
        implementation = _implementation(ctx.backend, hidden)
        wide = lse.dtype
        operand = wide if implementation is linear_log_probs_torch else hidden.dtype
        operand_hidden = hidden.to(operand)
        # Summed over chunks and ranks in float32: bf16 would lose small terms.
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        size = ctx.shard.size if ctx.shard else len(weight)
        for columns in linear_log_probs_torch.column_chunks(hidden, size, ctx.chunk_elements):
            chunk = weight[columns].to(operand)
            grad = implementation.grad_logits(
                operand_hidden,
                chunk,
                local - columns.start,
                lse,
                entropy if ctx.with_entropy else None,
                grad_log_probs,
                grad_entropy,
                ctx.temperature,
                None if bias is None else bias[columns],
                ctx.cap,
            )
            if ids is not None:
                tokens, places = ((ids >= columns.start) & (ids < columns.stop)).nonzero(
                    as_tuple=True
                )
                at = ids[tokens, places] - columns.start
                grad[tokens, at] = of_ids[tokens, places].to(grad.dtype)
            if grad_hidden is not None:
                grad_hidden += grad @ chunk
            if grad_weight is not None:
                grad_weight[columns] = (grad.T @ operand_hidden).to(weight.dtype)
            if grad_bias is not None:
                grad_bias[columns] = grad.sum(0, dtype=wide).to(bias.dtype)
            del grad  # before the next chunk's, so that one exists at a time
        if ctx.shard and grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=ctx.shard.group)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 9


def _grad_at(
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    temperature: float,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some `ids` [tokens, n] in rising order, and the gradients of their products [tokens, n].

    `log_probs` and their gradients are [tokens, n], the others [tokens]. Where an id stands more
    than once, each place has the whole gradient.
    """
    scale = grad_log_probs.sum(1, keepdim=True)
    if grad_entropy is not None:
        scale = scale + grad_entropy[:, None] * (log_probs + entropy[:, None])
    ids, order = ids.sort(dim=1, stable=True)
    # The sum over the places of an id: they are neighbors now.
    begins = torch.ones_like(ids)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    run = begins.cumsum(1) - 1
    of_place = grad_log_probs.gather(1, order)
    of_id = torch.zeros_like(of_place).scatter_add_(1, run, of_place).gather(1, run)
    log_probs = log_probs.gather(1, order)
    grad = (of_id - log_probs.exp() * scale.expand_as(ids).gather(1, order)) / temperature
    if cap is not None:
        grad = grad * (1 - ((log_probs + lse[:, None]) * temperature / cap).square())
    return ids, grad
