"""Attention over a paged KV cache, as an attention function of transformers.

All tokens of a forward pass are in one row of `input_ids` [1, tokens] with their own
`position_ids`. The keyword argument `paged` of the model's call, a `PagedBatch`, says which cache
rows get their keys and values, and which pages each sequence reads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

from hybridrl.models.attention_shape import NOT_HANDED_ON, check_keywords
from hybridrl.models.states import StateBatch, StateCache

NAME = "hybridrl_paged"

Places = tuple[torch.Tensor, torch.Tensor]
"""Places of tokens in the cache: their blocks [tokens] and their offsets [tokens] in those."""


def reads_whole_pages(device: torch.device) -> bool:
    """Whether attention on the device reads keys page by page; a CPU computes only what counts."""
    return device.type != "cpu"


class KVCache:
    """Keys and values of all layers: `blocks` [layers, blocks, 2, kv_heads, block_size, head_dim].

    The tokens of a block are contiguous per head, so that gathered blocks are, too. Recurrent
    layers have `states` instead; the layers here are those with keys.

    On a GPU attention reads whole pages, so that shapes change once a page, and masks have the
    alignment that its kernels want. The cache then also has room for what `gather` copies: a layer
    more. A copy that grows with the sequences would leave dead blocks in torch's allocator, beside
    a cache that has taken all other memory.
    """

    def __init__(
        self,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        lender: "KVCache | None" = None,
    ) -> None:
        """`lender` is a cache whose memory this one shares; else it takes some of its own."""
        self.block_size, self.kv_heads, self.head_dim = block_size, kv_heads, head_dim
        self._whole_pages = reads_whole_pages(device)
        copied = 1 if self._whole_pages else 0
        shape = (layers + copied, blocks, 2, kv_heads, block_size, head_dim)
        self._memory: torch.Tensor
        # Zeros, since masked positions are multiplied by 0 and uninitialized memory may be NaN.
        if lender is not None:
            self._memory = lender._memory.view(-1)[: prod(shape)].view(shape)
        elif device.type == "cpu":
            # numpy takes zeroed pages from the system: memory is spent as blocks are first used.
            # A stage of a hybrid may have no layer with keys: an array without bytes has no format.
            elements = prod(shape)
            pages = torch.from_numpy(np.zeros(max(1, elements) * dtype.itemsize, np.uint8))
            self._memory = pages.view(dtype)[:elements].view(shape)
        else:
            self._memory = torch.zeros(shape, dtype=dtype, device=device)
        self.blocks = self._memory[:layers]
        # By block, and by the token in it.
        self._tokens = [layer.permute(0, 3, 1, 2, 4) for layer in self.blocks]
        self._pages = [layer.view(-1, block_size * head_dim) for layer in self.blocks]
        self._gathered = self._memory[layers].view(-1) if self._whole_pages else None
        self._heads = torch.arange(2 * kv_heads, device=device)
        self.states: StateCache | None = None
        self._arenas: dict[int, torch.Tensor] = {}

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy whole blocks, of all layers, between two lists of block numbers."""
        self.blocks[:, destination] = self.blocks[:, source]

    def read_blocks(self, blocks: list[int], tokens: int) -> torch.Tensor:
        """The first `tokens` of a sequence that has `blocks`, on the host.

        [layers, 2, kv_heads, tokens, head_dim], contiguous.
        """
        kept = self.blocks.new_empty(len(self.blocks), 2, self.kv_heads, tokens, self.head_dim)
        full, partly = divmod(tokens, self.block_size)
        full_blocks = kept[:, :, :, : full * self.block_size].unflatten(3, (full, self.block_size))
        full_blocks.copy_(self.blocks[:, blocks[:full]].permute(0, 2, 3, 1, 4, 5))
        if partly:
            kept[:, :, :, full * self.block_size :] = self.blocks[:, blocks[full], :, :, :partly]
        return kept.cpu()

    def write_blocks(self, blocks: list[int], kept: torch.Tensor) -> None:
        """The reverse of `read_blocks`: `kept` [layers, 2, kv_heads, tokens, head_dim]."""
        kept = kept.to(self.blocks.device)
        full, partly = divmod(kept.shape[3], self.block_size)
        full_blocks = kept[:, :, :, : full * self.block_size].unflatten(3, (full, self.block_size))
        self.blocks[:, blocks[:full]] = full_blocks.permute(0, 3, 1, 2, 4, 5)
        if partly:
            self.blocks[:, blocks[full], :, :, :partly] = kept[:, :, :, full * self.block_size :]

    def write(self, layer: int, places: Places, new: torch.Tensor) -> None:
        """Store `new` [tokens, 2, kv_heads, head_dim] at `places`."""
        self._tokens[layer].index_put_(places, new)

    def arena(self, tokens: int, lane: int = 0) -> torch.Tensor:
        """Memory [layers, tokens * 2 * kv_heads * head_dim], the same one at every call for a lane.

        Kept, since fresh memory of that size costs a page fault per 4 kB. Its numbers are finite.
        """
        size = tokens * len(self._heads) * self.head_dim
        arena = self._arenas.get(lane)
        if arena is None or arena.shape[1] < size:
            arena = self.blocks.new_zeros(len(self.blocks), size + size // 2)
            self._arenas[lane] = arena
        return arena[:, :size]

    def keys(self, longest: int) -> int:
        """The keys that attention reads of sequences of at most `longest` tokens."""
        return self.num_pages(longest) * self.block_size if self._whole_pages else longest

    def num_pages(self, tokens: int) -> int:
        """Blocks of a sequence of so many tokens."""
        return -(-tokens // self.block_size)

    def rows_at_once(self, rows: int, pages: int) -> int:
        """How many of `rows`, each of so many `pages`, `gather` has memory for: one at least."""
        if self._gathered is None:
            return rows
        return max(1, min(rows, self.blocks.shape[1] // pages))

    def pages(self, tables: torch.Tensor) -> torch.Tensor:
        """The index [2, rows, kv_heads, pages] by which layers gather `tables` [rows, pages]."""
        return tables[:, None] * len(self._heads) + self._heads.view(2, 1, -1, 1)

    def gather(
        self, layer: int, pages: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The blocks of `pages` (see there): [2, rows, kv_heads, pages * block_size, head_dim].

        Contiguous; in the memory of `out`, if passed. On a GPU it is valid until the next call.
        """
        shape = pages.numel(), self.block_size * self.head_dim
        if out is not None:
            out = out.view(shape)
        elif self._gathered is not None:
            out = self._gathered[: prod(shape)].view(shape)
        gathered = torch.index_select(self._pages[layer], 0, pages.view(-1), out=out)
        return gathered.view(*pages.shape[:3], -1, self.head_dim)


class Workspace:
    """The gathered keys and values of a decode group, kept from step to step.

    A step reads them in place and writes one token a row, instead of copying every block. Rows come
    (`add`) and go (`vacate`), up to `capacity`, each of up to `pages` blocks. `flush` copies what
    was written to the cache. `memory` is a slice of the cache's arena. Costs a second copy of the
    running sequences' cache.
    """

    def __init__(self, cache: KVCache, capacity: int, pages: int, memory: torch.Tensor) -> None:
        self.capacity, self.width = capacity, pages * cache.block_size
        shape = (2, capacity, cache.kv_heads, self.width, cache.head_dim)
        self._cache, self._head_dim = cache, cache.head_dim
        self._memory = memory.unflatten(1, shape)
        self._layers = self._memory.unbind(0)
        self._tokens = memory.unflatten(1, (-1, cache.head_dim)).unbind(0)
        self._positions = torch.zeros(capacity, dtype=torch.int64)  # of the next tokens
        self._written = torch.zeros(capacity, dtype=torch.int64)  # tokens that the cache has
        lines = torch.arange(2 * capacity * cache.kv_heads) * self.width
        # A token is [2, kv_heads]; the lines of row 0 come first in each half.
        self._lines = lines.view(2, capacity, cache.kv_heads).transpose(0, 1)
        self._arrange(0)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the rows' next tokens [rows]; `advance` changes them in place."""
        return self._positions[: self._rows]

    def _arrange(self, rows: int) -> None:
        self._rows = rows
        self.longest = int(self.positions.max()) if rows else -1
        self._new = (self._lines[:rows] + self.positions[:, None, None]).reshape(-1)
        self._look()

    def _look(self) -> None:
        """The keys and values that the next step reads, of each layer."""
        read = self._memory[:, :, : self._rows, :, : self.longest + 1].flatten(2, 3)
        keys, values = read.unbind(1)
        self._read = list(zip(keys.unbind(0), values.unbind(0), strict=True))

    def add(self, rows: list[int], tables: torch.Tensor, positions: torch.Tensor) -> None:
        """Gather rows from the blocks of `tables` [rows, pages], up to their `positions`.

        Their places are vacated ones, or the next ones.
        """
        at = torch.tensor(rows)
        self._positions[at] = self._written[at] = positions
        width, pages = tables.shape[1] * self._cache.block_size, self._cache.pages(tables)
        gathered = None  # by one layer after the other, in the same memory
        for layer, kept in enumerate(self._layers):
            gathered = self._cache.gather(layer, pages, gathered)
            kept[:, :, :, :width].index_copy_(1, at, gathered)
        self._arrange(max(self._rows, *(row + 1 for row in rows)))

    def vacate(self, rows: list[int]) -> None:
        """These rows have left; `add` or `close` gives their places to others before a step."""
        at = torch.tensor(rows)
        self._positions[at] = self._written[at] = 0
        self.longest = int(self.positions.max())

    def close(self, sources: list[int], targets: list[int], rows: int) -> None:
        """Move rows to the places of others; `rows` remain."""
        if sources:
            source, target = torch.tensor(sources), torch.tensor(targets)
            stop = int(self._positions[source].max())
            for kept in self._layers:
                short = kept[:, :, :, :stop]
                short.index_copy_(1, target, short.index_select(1, source))
            self._positions[target] = self._positions[source]
            self._written[target] = self._written[source]
        self._arrange(rows)

    def fetch(self, layer: int, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows * kv_heads, longest + 1, head_dim] with `new` among them.

        `new` is [rows, 2, kv_heads, head_dim].
        """
        self._tokens[layer].index_copy_(0, self._new, new.reshape(-1, self._head_dim))
        return self._read[layer]

    def advance(self) -> None:
        """The step is done: the next one is at the next positions."""
        self.positions.add_(1)
        self._new += 1
        self.longest += 1
        self._look()

    def flush(self, rows: torch.Tensor, tables: torch.Tensor) -> None:
        """Write what `rows` have that the cache lacks, to the blocks of `tables` [rows, pages]."""
        first, stop = self._written[rows], self._positions[rows]
        which = torch.repeat_interleave(stop - first)
        if not len(which):
            return
        before = (stop - first).cumsum(0) - (stop - first)
        positions = torch.arange(len(which)) + (first - before)[which]
        blocks = tables[which, positions // self._cache.block_size]
        places = blocks, positions % self._cache.block_size
        lines = self._lines[rows[which]] + positions[:, None, None]
        for layer, kept in enumerate(self._tokens):
            self._cache.write(layer, places, kept[lines])
        self._written[rows] = stop


@dataclass(slots=True)
class PagedGroup:
    """Sequences with equally many queries that are attended together.

    Their tokens are `start : start + rows * queries` of the row; `positions` [rows, queries] those
    of the queries, `keys` is what they attend to: the longest sequence's, see `KVCache.keys`.
    `pages` [2, rows, kv_heads, pages] are those of their blocks (`KVCache.pages`), block 0 as
    padding; a decode group on CPU has a `workspace` in their place. Sequences that are `whole` have
    all their tokens among the queries, from the first on.
    """

    start: int
    rows: int
    queries: int
    keys: int
    positions: torch.Tensor
    pages: torch.Tensor | None = None
    workspace: Workspace | None = None
    whole: bool = False
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, copies: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive causal mask [rows, copies * queries, keys], made once per window."""
        if (window, copies) not in self.masks:
            key = torch.arange(self.keys, device=self.positions.device)
            query = self.positions[:, :, None]
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, torch.finfo(dtype).min)
            self.masks[window, copies] = mask.repeat(1, copies, 1) if copies > 1 else mask
        return self.masks[window, copies]

    def attend(
        self,
        cache: KVCache,
        layer: int,
        query: torch.Tensor,
        new: torch.Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`PagedBatch.attend` for the group's own tokens, which the cache or the workspace gets.

        The query heads that share a kv head become query rows of it: keys are never repeated.
        """
        tokens, heads, head_dim = query.shape
        rows, queries, kv_heads = self.rows, self.queries, new.shape[2]
        plain = softcap is None and sinks is None
        if self.whole and plain and (window is None or window >= queries):
            return self._attend_new(query, new, scaling)
        if self.workspace is None:
            assert self.pages is not None
            gathered = cache.gather(layer, self.pages)
            keys, values = gathered[:, :, :, : self.keys].flatten(1, 2)
        else:
            keys, values = self.workspace.fetch(layer, new)
        if not plain:
            keys, values = (x.unflatten(0, (rows, kv_heads)) for x in (keys, values))
            return attend_scores(query, keys, self, scaling, window, values, softcap, sinks)
        shared = heads // kv_heads
        # 15 % less time than SDPA for one query (64 rows, 160 keys, one thread).
        in_steps = queries == 1 and query.dtype == torch.float32 and query.device.type == "cpu"
        copies = kv_heads if in_steps else shared if queries > 1 else 1
        mask = self.masks.get((window, copies))  # most layers find it: no call
        if mask is None:
            mask = self.mask(window, copies, query.dtype)
        if in_steps:
            query = query.reshape(rows * kv_heads, shared, head_dim)
            mask = mask.view(rows * kv_heads, 1, -1)
            scores = torch.baddbmm(mask, query, keys.mT, alpha=scaling)
            return torch.bmm(scores.softmax(-1), values).view(tokens, heads, head_dim)
        keys, values = (x.unflatten(0, (rows, kv_heads)) for x in (keys, values))
        query = query.reshape(rows, queries, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
        query = query.reshape(rows, kv_heads, shared * queries, head_dim)
        out = functional.scaled_dot_product_attention(
            query, keys, values, mask[:, None], scale=scaling
        )
        out = out.view(rows, kv_heads, shared, queries, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(tokens, heads, head_dim)

    def _attend_new(self, query: torch.Tensor, new: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of whole sequences to their own tokens: without a mask, half of it is skipped.

        Padding is behind a row's tokens, so none of these attends to it.
        """
        query, keys, values = (
            x.unflatten(0, (self.rows, self.queries)).transpose(1, 2)
            for x in (query, *new.unbind(1))
        )
        if (shared := query.shape[1] // keys.shape[1]) > 1:
            keys, values = (x.repeat_interleave(shared, 1) for x in (keys, values))
        out = functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling
        )
        return out.transpose(1, 2).flatten(0, 1)


@dataclass(slots=True)
class PagedBatch:
    """One forward pass: keys and values are written to `places`, None if workspaces hold them.

    `states` are those of recurrent layers.
    """

    cache: KVCache
    places: Places | None
    groups: list[PagedGroup]
    states: StateBatch | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        new: torch.Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write `new` [tokens, 2, kv_heads, head_dim], then attend over the pages.

        `query` [tokens, heads, head_dim], result likewise. Token i attends to the
        last `window` positions of its sequence, its own included. `softcap` and `sinks` [heads] are
        those of `packed_attention`.
        """
        if self.places is not None:
            self.cache.write(layer, self.places, new)
        outs = []
        for group in self.groups:
            own = slice(group.start, group.start + group.rows * group.queries)
            tokens = query[own], new[own], scaling, window, softcap, sinks
            outs.append(group.attend(self.cache, layer, *tokens))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def attention(self) -> Callable[..., torch.Tensor]:
        """What is called as `attend`: a group's own method, where there is nothing around it."""
        if self.places is None and len(self.groups) == 1:
            return partial(self.groups[0].attend, self.cache)
        return self.attend


def attend_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    group: PagedGroup,
    scaling: float,
    window: int | None,
    values: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`PagedGroup.attend` with scores as a tensor in float32, which are capped or have a sink.

    `query` [tokens, heads, head_dim], `keys` and `values` [rows, kv_heads, keys, head_dim].
    """
    tokens, heads, head_dim = query.shape
    rows, queries, kv_heads = group.rows, group.queries, keys.shape[1]
    shared = heads // kv_heads
    query = query.reshape(rows, queries, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    query = query.reshape(rows, kv_heads, shared * queries, head_dim)
    scores = (query @ keys.transpose(-1, -2)).float() * scaling
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores += group.mask(window, shared, query.dtype)[:, None]
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(kv_heads, shared, 1).expand(-1, -1, queries)
        sink = sink.reshape(kv_heads, -1, 1).expand(rows, -1, -1, -1)
        scores = torch.cat((scores, sink), -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype)
    out = (weights @ values).view(rows, kv_heads, shared, queries, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(tokens, heads, head_dim)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    paged: PagedBatch | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; see `PagedBatch.attend`.

    `query` [1, heads, tokens, head_dim], `key` likewise with kv_heads, and `value` [1, kv_heads,
    tokens, value_dim]; gives [1, tokens, heads, value_dim]. The narrower ones are padded: the cache
    has one width. The mask follows from the positions, `attention_mask` is unused. Raises
    ValueError for a keyword that is not computed, and without `paged`.
    """
    check_keywords(module, kwargs)
    if paged is None:
        raise ValueError(NOT_HANDED_ON)
    layer: int = module.layer_idx  # type: ignore[assignment]
    size, value_size = key.shape[-1], value.shape[-1]
    if size != value_size:
        width = max(size, value_size)
        query, key, value = (
            functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value)
        )
    new = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), 1)
    query = query[0].transpose(0, 1)
    out = paged.attend(layer, query, new, scaling, sliding_window, softcap, s_aux)
    return out[None, ..., :value_size], None


AttentionInterface.register(NAME, paged_attention)
