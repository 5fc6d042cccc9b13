"""Attention, experts and dropout as far as their tensors go: what `activations` counts.

Kernels and exchanges between ranks have no `meta` form. These stand for them, and make the same
tensors.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from hybridrl.config import Attention
from hybridrl.models.chunk_keys import ChunkKeys
from hybridrl.models.context_parallel import to_heads, to_tokens
from hybridrl.models.expert_parallel import LocalExperts
from hybridrl.models.packed_attention import capped_attention, gather_keys, with_sink
from hybridrl.models.paged_attention import PagedGroup, attend_scores
from hybridrl.models.recomputation import COUNTED_ATTENTION

ATTENTION = "hybridrl_counted"
"""The name of this attention, as `attn_implementation`; it takes a `CountedRow` as `packing`."""


_LIBRARY = torch.library.Library("hybridrl", "FRAGMENT")
_LIBRARY.define("counted_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)")


@torch.library.impl(_LIBRARY, "counted_attention", "Meta")
def _counted_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


counted_attention = torch.ops.hybridrl.counted_attention.default
"""A fused attention kernel as one operation without values, which `selective` keeps as a kernel's.

query [.., heads, dim], value likewise with its dim; the result, and a float32 for each query.
"""
assert counted_attention.name() == COUNTED_ATTENTION


class FusedAttention(torch.autograd.Function):
    """A fused kernel's tensors: its inputs, its result, and a float32 for each token and head."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor
        out, sums = counted_attention(query, key, value)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class FusedDropout(nn.Dropout):
    """As torch computes it on GPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.native_dropout(x, self.p, self.training)[0]
        return out


class _Exchange(torch.autograd.Function):
    """An all-to-all: as much arrives as is sent."""

    @staticmethod
    def forward(ctx: Any, messages: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(messages)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grad)


class _Resized(torch.autograd.Function):
    """As many `tokens` of x [1, .., features]: those of all ranks, or a rank's share of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.shape = x.shape
        return x.new_empty(1, tokens, x.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.new_empty(ctx.shape), None


def split_tokens(layer: nn.Module, tp: int) -> None:
    """Have a decoder layer's blocks gather the tokens of `tp` ranks, and return a rank's share.

    As `models.tensor_parallel` does for sequence parallelism.
    """

    def gathered(x: torch.Tensor) -> Any:
        return _Resized.apply(x, x.shape[1] * tp)

    def share(x: torch.Tensor) -> Any:
        return _Resized.apply(x, x.shape[1] // tp)

    def gather(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if args:
            return (gathered(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": gathered(kwargs["hidden_states"])}

    def scatter(module: nn.Module, args: Any, output: Any) -> Any:
        is_plain = isinstance(output, torch.Tensor)
        return share(output) if is_plain else (share(output[0]), *output[1:])

    for block in (layer.self_attn, layer.mlp):
        assert isinstance(block, nn.Module)
        block.register_forward_pre_hook(gather, with_kwargs=True)
        block.register_forward_hook(scatter)


class GroupedProducts(TorchDispatchMode):
    """Products of experts in every format: torch's `meta` kernel knows bfloat16 alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default:
            return func(*args, **(kwargs or {}))
        left, right, ends = args[:3]
        shape = left.shape[0], right.shape[-1]
        return left.new_empty(shape if right.ndim == 3 else (len(ends), *shape))


class SpreadExperts:
    """Experts as `expert_parallel` computes them, if every rank gets as many tokens as it sends."""

    def __init__(self, module: nn.Module, ep: int, tp: int) -> None:
        self._module, self._ep, self._tp = module, ep, tp
        for name, parameter in [*module.named_parameters(recurse=False)]:
            own = torch.empty_like(parameter[: len(parameter) // ep])
            module.register_parameter(name, nn.Parameter(own, parameter.requires_grad))

    def __call__(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As transformers': tokens [tokens, features], their experts and weights [tokens, k]."""
        (tokens, features), k = hidden.shape, chosen.shape[1]
        share = -(-tokens // self._tp)
        hidden, weights = hidden[:share], weights[:share]
        experts, order = chosen[:share].flatten().sort(stable=True)
        rows = hidden[order // k]
        rows = rows if self._ep == 1 else _Exchange.apply(rows)
        outputs = LocalExperts(self._module)(rows, experts[:, None], torch.ones_like(rows[:, :1]))
        outputs = outputs if self._ep == 1 else _Exchange.apply(outputs)
        outputs = outputs * weights.flatten()[order, None]
        sums = outputs[order.argsort()].view(share, k, features).sum(1)
        if self._tp == 1:
            return sums
        # The tokens of all ranks of tp.
        return sums.repeat(self._tp, 1)[:tokens]


@dataclass(frozen=True, slots=True)
class CountedRow:
    """How a row is attended: by `cp` ranks that share it, and as a `chunk` of a sequence.

    With shared prompts its sequences attend to so many `keys` in all, which are gathered; 0: each
    to its own tokens.
    """

    attention: Attention
    cp: int = 1
    chunk: ChunkKeys | None = None
    keys: int = 0

    def sequence_keys(self) -> list[torch.Tensor]:
        """Keys and values of the chunk's sequence, and their gradients."""
        if self.chunk is None:
            return []
        sequence = self.chunk.sequence
        return [
            x for side in (sequence.kept, sequence.gradients) for x in tree_leaves([*side.values()])
        ]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    packing: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention`, as far as its tensors go; `packing` is a `CountedRow`.

    The row is one sequence: capped scores are then most. Or `packing` are the prompts of a prefill,
    as in `paged_attention`.
    """
    if isinstance(packing, PagedGroup):
        return _prefill(packing, query, key, value, softcap, s_aux), None
    row, tensors = packing, (query[0], key[0], value[0])
    if row.keys:
        of_row = query.new_empty(row.keys, dtype=torch.long)
        q, k, v = tensors
        tensors = q, gather_keys(k, of_row), gather_keys(v, of_row)
    gathers = len(query[0]) % row.cp > 0
    if row.cp > 1 and not gathers:
        tensors = to_heads(*tensors, row.cp, _Exchange.apply)
        s_aux = None if s_aux is None else s_aux[: len(tensors[0])]

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        if row.keys and softcap is not None:  # of no sequence there are more scores than these
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        is_masked = not row.keys  # else masks are of sequences, once for all layers
        tensors = q[None], k[None], v[None]
        return _attend(row.attention, *tensors, scaling, softcap, sinks, is_masked)[0]

    def attend_to_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(q, k.repeat(1, row.cp, 1), v.repeat(1, row.cp, 1), s_aux)

    if row.chunk is None and gathers:
        out = checkpoint(attend_to_row, *tensors, use_reentrant=False, preserve_rng_state=False)
    elif row.chunk is None:
        out = attend(*tensors, s_aux)
    else:
        q, k, v = tensors
        if gathers:
            k, v = (x.repeat(1, row.cp, 1) for x in (k, v))
        sequence = row.chunk.sequence
        for side in (sequence.kept, sequence.gradients):
            if module not in side:  # in the first pass, which is not counted
                sizes = [(sequence.tokens, len(x), x.shape[2]) for x in (k, v)]
                side[module] = query.new_empty(sizes[0]), query.new_empty(sizes[1])
        out = row.chunk.attend(module, q, k, v, s_aux, attend)
    if row.cp > 1 and not gathers:
        out = to_tokens(out, row.cp, _Exchange.apply)
    return out[None], None


def _attend(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    is_masked: bool,
) -> torch.Tensor:
    """The tensors of one sequence's attention, [1, tokens, heads, dim]; keys may be more."""
    if attention is not Attention.torch:
        out: torch.Tensor = FusedAttention.apply(*(x.transpose(1, 2) for x in (query, key, value)))
        return out
    if query.shape[1] > key.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    mask = None
    if is_masked and key.shape[2] > query.shape[2]:
        near = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
        mask = near.tril(key.shape[2] - query.shape[2])
    if softcap is not None:
        out = capped_attention(query, key, value, mask, scaling, softcap)
    elif sinks is not None:
        wide = with_sink(query, key, value, sinks)
        out = FusedAttention.apply(*wide)[..., 1:, : value.shape[-1]]
    else:
        out = FusedAttention.apply(query, key, value)
    return out.transpose(1, 2).contiguous()


def _prefill(
    prompts: PagedGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The tensors of `paged_attention`: keys and values to write, those read, and scores or mask.

    query [1, heads, tokens, head_dim], key and value likewise with kv_heads.
    """
    (_, heads, tokens, size), value_size = query.shape, value.shape[-1]
    width = max(size, value_size)
    if size != value_size:
        query, key, value = (
            nn.functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value)
        )
    new = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), 1)
    rows, num = prompts.rows, prompts.queries
    if softcap is None and sinks is None:
        kept = new.new_empty(2, *key.shape)
        prompts.mask(None, heads // key.shape[1], query.dtype)
        out = FusedAttention.apply(torch.empty_like(query), *kept)
        out = out.transpose(1, 2).contiguous()
    else:
        kept = new.new_empty(2, rows, key.shape[1], num, width)
        queries = query[0].transpose(0, 1)[: rows * num]
        read = attend_scores(queries, kept[0], prompts, 1.0, None, kept[1], softcap, sinks)
        out = read.new_empty(1, tokens, heads, width)
    return out[..., :value_size]


AttentionInterface.register(ATTENTION, _attention)
