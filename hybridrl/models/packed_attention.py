"""Attention over one row of packed sequences, through transformers' attention interface.

All sequences of a micro-batch are concatenated in one row, so no padding token is computed. A
micro-batch is described once (`Packing`); every layer gets the description as an extra keyword of
the model's call. Three implementations, of which `attention_choice` takes one:

- `flash`: flash-attn's variable-length kernel, on a GPU. A layer makes one call;
- `varlen`: the same kernel in torch's own build, which needs no flash-attn;
- `torch`: the row is sorted by length, so sequences of one length are a contiguous block. A call of
  torch's causal attention gets it as a batch [sequences, heads, length, head_dim]. So there is one
  call per distinct length, no padding and no mask over the row.

Where scores are capped, torch's kernels do not serve: that block's scores exist as a tensor.

A row may hold a prompt once for several responses (`SharedPrompts`). Then the keys and values of a
response are those of its prompt and its own, gathered from the row. All implementations attend to
them alike, as a chunk attends to the tokens before it.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from hybridrl.config import Attention
from hybridrl.models.attention_shape import NOT_HANDED_ON, check_keywords
from hybridrl.models.chunk_keys import ChunkKeys
from hybridrl.models.context_parallel import (
    OwnTokens,
    all_to_all,
    gather_tokens,
    own_heads,
    to_heads,
    to_tokens,
)

NAME = "hybridrl_packed"
"""The attention's name in transformers' interface."""
_MASK_STEP = 256


@dataclass(frozen=True, slots=True)
class Packing:
    """The positions of sequences in a packed row, in the order of ascending length.

    `blocks` holds (number of sequences, length) of each run of equal lengths. `starts` [sequences +
    1] has the first token of each sequence (int32, on the row's device) and the end, `longest` the
    length of the longest. The ranks of `group` share the row's tokens, if there is one; `own` are
    this rank's.

    A row that is a `chunk` has tokens of one sequence. Then `key_starts` and `longest` count its
    earlier tokens, too.

    With `shared` prompts a sequence is a prompt, or a response whose keys begin with those of its
    prompt. Sequences of a block have equally many such keys, too. `key_starts` and `longest` count
    them.
    """

    implementation: Attention
    blocks: tuple[tuple[int, int], ...]
    starts: torch.Tensor
    longest: int
    group: ProcessGroup | None = None
    own: OwnTokens | None = None
    chunk: ChunkKeys | None = None
    key_starts: torch.Tensor | None = None
    shared: "SharedPrompts | None" = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens of each sequence."""
        return tuple(length for number, length in self.blocks for _ in range(number))

    @property
    def before(self) -> tuple[int, ...]:
        """The tokens that each sequence attends to besides its own: those of a shared prompt."""
        if self.shared is None:
            return (0,) * len(self.lengths)
        of_blocks = zip(self.blocks, self.shared.before, strict=True)
        return tuple(more for (number, _), more in of_blocks for _ in range(number))


class SharedPrompts:
    """Where the sequences of a row begin: with the tokens of a prompt that others share, or none.

    A sequence attends to `before` tokens that are not its own, which begin at the row's position
    `starts`; 0 of them for a prompt, and for a sequence that shares none. `before` [blocks] is that
    of each block of a `Packing`. `keys` [keys] are the positions in the row of all that each
    sequence attends to, in the order of the sequences. The class is no dataclass, of which FSDP
    passes copies to the layers.

    Example: a prompt of 2 tokens and two responses of 1 and 2. The row has 5 tokens: those of the
    first response (position 0), of the prompt (1 and 2), of the second response (3 and 4). `keys`
    are 1 2 0, 1 2, 1 2 3 4.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        before: Sequence[int],
        starts: Sequence[int],
        device: torch.device,
    ) -> None:
        """The `lengths`, tokens `before` and their `starts` are those of each sequence."""
        sizes = [own + more for own, more in zip(lengths, before, strict=True)]
        begins = [*accumulate(lengths, initial=0)][:-1]
        ends = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.before = tuple(n for (_, n), _ in groupby(zip(lengths, before, strict=True)))
        self.keys = seen_tokens(begins, lengths, before, starts).to(device)
        self.key_starts, self.longest = ends.to(device), max(sizes)
        self._most = max(lengths), max(before)

    def mask(
        self, length: int, before: int, window: int | None, like: torch.Tensor
    ) -> torch.Tensor:
        """What torch's kernels add to scores [length, before + length].

        A mask of truth values would become these numbers anew in each layer, which keeps them. All
        are parts of one, which is that of rows of like sizes, too.
        """
        most, earlier = (-(-n // _MASK_STEP) * _MASK_STEP for n in self._most)
        whole = _added(most, earlier, window, like.dtype, like.device)
        return whole[:length, earlier - before : earlier + length]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The keys, or values, [kv_heads, keys, dim] of all sequences from the row's tokens'."""
        return gather_keys(x, self.keys)


def seen_tokens(
    begins: Sequence[int], lengths: Sequence[int], before: Sequence[int], starts: Sequence[int]
) -> torch.Tensor:
    """The positions in a row of what each of its sequences attends to, one after the other.

    A sequence has `lengths` tokens from `begins` on, and `before` them others from `starts` on.
    """
    own, more = torch.tensor(lengths), torch.tensor(before)
    sizes = own + more
    place = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    of_own = (torch.tensor(begins) - more).repeat_interleave(sizes) + place
    of_others = torch.tensor(starts).repeat_interleave(sizes) + place
    return torch.where(place < more.repeat_interleave(sizes), of_others, of_own)


def gather_keys(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The tokens `keys` [keys] of `x` [kv_heads, tokens, dim], some of them several times."""
    gathered: torch.Tensor = _GatheredKeys.apply(x, keys)
    return gathered


class _GatheredKeys(torch.autograd.Function):
    """`gather_keys`, whose gradients are summed in float32 at least, as products are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(keys)
        ctx.tokens = x.shape[1]
        return x.index_select(1, keys)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (keys,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(len(grad), ctx.tokens, grad.shape[2], dtype=wide)
        return total.index_add_(1, keys, grad.to(wide)).to(grad.dtype), None


def make_packing(
    lengths: Sequence[int],
    implementation: Attention,
    device: torch.device,
    group: ProcessGroup | None = None,
) -> Packing:
    """Describe a row of sequences of these `lengths`, which must ascend."""
    assert list(lengths) == sorted(lengths), "sequences must be packed by ascending length"
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    blocks = tuple((len(list(group)), length) for length, group in groupby(lengths))
    own = None if group is None else OwnTokens(blocks, group, device)
    return Packing(implementation, blocks, ends.to(device), lengths[-1], group, own)


def make_shared_packing(
    lengths: Sequence[int],
    before: Sequence[int],
    starts: Sequence[int],
    implementation: Attention,
    device: torch.device,
) -> Packing:
    """Describe a row of prompts and responses, whose `lengths` must ascend: `SharedPrompts`."""
    shared = SharedPrompts(lengths, before, starts, device)
    runs = groupby(zip(lengths, before, strict=True))
    return replace(
        make_packing(lengths, implementation, device),
        blocks=tuple((len([*run]), length) for (length, _), run in runs),
        longest=shared.longest,
        key_starts=shared.key_starts,
        shared=shared,
    )


def make_chunk_packing(
    chunk: ChunkKeys,
    implementation: Attention,
    device: torch.device,
    group: ProcessGroup | None = None,
) -> Packing:
    """Describe a row of the tokens of one chunk."""
    packing = make_packing([chunk.stop - chunk.start], implementation, device, group)
    starts = torch.tensor([0, chunk.stop], dtype=torch.int32, device=device)
    own = None if group is None else OwnTokens(packing.blocks, group, device, chunk.start)
    return replace(packing, longest=chunk.stop, chunk=chunk, key_starts=starts, own=own)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence of the row; transformers' signature.

    query [1, heads, tokens, head_dim], key likewise with kv_heads, and value [1, kv_heads, tokens,
    value_dim]; the result is [1, tokens, heads, value_dim]. Of a row that ranks share, tokens are
    this rank's. Dropout is never applied: log-probabilities must be those of the policy that
    generated. `sliding_window` counts the attending token itself. A `softcap` c makes c tanh(s / c)
    of a score s. `s_aux` [heads] are attention sinks: the score, before the softmax, of a key
    without a value. Raises ValueError for a keyword that is not computed, for a cap together with
    sinks, and without `packing`.
    """
    check_keywords(module, kwargs)
    if softcap is not None and s_aux is not None:
        raise ValueError(f"{type(module).__name__}: softcap with s_aux is not supported")
    if packing is None:
        raise ValueError(NOT_HANDED_ON)
    window = sliding_window if sliding_window and sliding_window < packing.longest else None

    def attend(
        packing: Packing,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if packing.shared is not None:
            k, v = packing.shared.gather(k), packing.shared.gather(v)
        if packing.implementation is Attention.torch:
            return _torch(q, k, v, packing, scaling, window, softcap, sinks)
        assert sinks is None, "FlashAttention has no attention sinks"
        return _variable_length(q, k, v, packing, scaling, window, softcap)

    # Views: the gradient of `query[0]` would be copied into zeros.
    tensors = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    group = packing.group
    if group is not None and len(query[0]) % group.size():
        return _gathered(module, *tensors, s_aux, packing, group, attend)[None], None
    if group is not None:
        ranks, exchange = group.size(), partial(all_to_all, group=group)
        tensors = to_heads(*tensors, ranks, exchange)
        s_aux = None if s_aux is None else own_heads(s_aux, group)
    if packing.chunk is not None:
        out = packing.chunk.attend(module, *tensors, s_aux, partial(attend, packing))
    else:
        out = attend(packing, *tensors, s_aux)
    if group is not None:
        out = to_tokens(out, ranks, exchange)
    return out[None], None


def _gathered(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    packing: Packing,
    group: ProcessGroup,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The result of `attend` for this rank's tokens of a row, with the keys of all ranks.

    The gathered ones are not kept for backward, but those of a chunk.
    """
    own = packing.own
    assert own is not None
    queries, keys = own.starts()
    described = replace(packing, blocks=own.blocks, starts=queries, key_starts=keys)

    def attend_to_seen(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        return attend(described, q, k[:, own.keys], v[:, own.keys], sinks)

    if packing.chunk is not None:
        whole = gather_tokens(key, value, group)
        return packing.chunk.attend(module, query, *whole, sinks, attend_to_seen)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend_to_seen(q, *gather_tokens(k, v, group), sinks)

    if not torch.is_grad_enabled():
        return run(query, key, value)
    out: torch.Tensor = checkpoint(
        run, query, key, value, use_reentrant=False, preserve_rng_state=False
    )
    return out


def _torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    dtype = query.dtype
    if query.device.type == "cpu":
        # torch's CPU kernel in bf16 takes 62 ms forward and backward where float32 takes 29
        # (32 sequences of about 60 tokens, 9 heads of 64, one thread).
        wide = torch.promote_types(dtype, torch.float32)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    groups = query.shape[0] // key.shape[0]
    sizes = [count * length for count, length in packing.blocks]
    outputs = []
    # One split, not slices: the backward of a slice would write zeros for the whole row.
    if packing.shared is not None:
        before = packing.shared.before
        counted = zip(sizes, packing.blocks, before, strict=True)
        of_keys = [size + count * more for size, (count, _), more in counted]
    else:
        of_keys = [*sizes]
        of_keys[0] += key.shape[1] - query.shape[1]  # of the first block's sequence, which is alone
    rows = zip(query.split(sizes, 1), key.split(of_keys, 1), value.split(of_keys, 1), strict=True)
    for (count, length), (q, k, v) in zip(packing.blocks, rows, strict=True):
        q, k, v = (x.unflatten(1, (count, -1)).transpose(0, 1) for x in (q, k, v))
        earlier = k.shape[2] - length
        if groups > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        mask = None
        cuts = window if window is not None and length + earlier > window else None
        is_plain = softcap is None and sinks is None
        if packing.shared is not None and is_plain and (cuts is not None or earlier):
            mask = packing.shared.mask(length, earlier, cuts, q)
        elif cuts is not None or earlier:
            mask = _seen(length, earlier, cuts, q.device)
        if softcap is not None:
            out = capped_attention(q, k, v, mask, scaling, softcap)
        elif sinks is not None:
            out = _sink_attention(q, k, v, mask, scaling, sinks)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        outputs.append(out.transpose(1, 2).reshape(count * length, *out.shape[1::2]))
    return torch.cat(outputs).to(dtype)


@lru_cache(maxsize=2)
def _added(
    length: int, earlier: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """0 where `_seen`, else minus infinity."""
    seen = _seen(length, earlier, window, device)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _seen(length: int, earlier: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Whether each of `length` queries sees a key [length, earlier + length], within a `window`."""
    near = torch.ones(length, length + earlier, dtype=torch.bool, device=device).tril(earlier)
    return near if window is None else near.triu(earlier + 1 - window)


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with scores c tanh(s / c), as a tensor [.., heads, queries, keys] in float32.

    Causal, or where `mask` [queries, keys] is True.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * (scaling / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = (softcap * scores.tanh()).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value


def _sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention with a sink for each head, by torch's kernels."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is not None:
        mask = F.pad(mask, (0, 0, 1, 0))
        mask = F.pad(mask, (1, 0), value=True)
    out = F.scaled_dot_product_attention(
        *with_sink(query, key, value, sinks.to(query.dtype) / scaling),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return out[..., 1:, : value.shape[-1]]


def with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three [sequences, heads, tokens, dim] with a token before the first one: the sink.

    One more feature has the `sinks` [heads] in every query, and 1 in the sink's key alone. So their
    product is the sink, the mask stays causal, and the sink's value is zero. Widths are a multiple
    of 8, and equal, since the fused kernels ask for it.
    """
    size, width = query.shape[-1], max(query.shape[-1] + 1, value.shape[-1])
    width += -width % 8
    feature = sinks[:, None, None].expand(*query.shape[:-1], 1)
    wide_query = F.pad(torch.cat((query, feature), -1), (0, width - size - 1, 1, 0))
    wide_key = F.pad(key, (0, width - size, 1, 0))
    is_sink = torch.zeros_like(wide_key[0, 0], dtype=torch.bool)
    is_sink[0, size] = True
    wide_value = F.pad(value, (0, width - value.shape[-1], 1, 0))
    return wide_query, wide_key.masked_fill(is_sink, 1), wide_value


def _variable_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of the whole row by one call of FlashAttention, which has one width of heads.

    The backward pass of `varlen_attn` is deterministic where torch's algorithms are: it asks
    itself. flash-attn's adds atomically unless it is told so.
    """
    size, value_size = query.shape[-1], value.shape[-1]
    if size != value_size:
        scaling = size**-0.5 if scaling is None else scaling
        width = max(size, value_size)
        query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [tokens, heads, dim]
    key_starts = packing.starts if packing.key_starts is None else packing.key_starts
    if packing.implementation is Attention.flash:
        from flash_attn import flash_attn_varlen_func

        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=packing.starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=packing.longest,
            max_seqlen_k=packing.longest,
            softmax_scale=scaling,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        assert softcap is None, "varlen_attn has no capped scores"
        out = varlen_attn(
            q,
            k,
            v,
            packing.starts,
            key_starts,
            packing.longest,
            packing.longest,
            scale=scaling,
            window_size=(-1, 0) if window is None else (window - 1, 0),
            **_grouped_heads(),
        )
    assert isinstance(out, torch.Tensor)
    return out if size == value_size else out[..., :value_size]


@cache
def _grouped_heads() -> dict[str, Any]:
    """What tells `varlen_attn` that several query heads share one of keys.

    torch 2.11 has no such argument and does not ask: its kernel takes them as they are.
    """
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    return {"enable_gqa": True} if "enable_gqa" in parameters else {}


AttentionInterface.register(NAME, packed_attention)
