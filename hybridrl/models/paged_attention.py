"""Attention over a paged KV cache, as an attention function of transformers.

All tokens of a forward pass ride in one row of `input_ids` [1, tokens] with their own
`position_ids`; a `PagedBatch`, handed to the model as the keyword argument `paged`, says where
their keys and values go and which pages each sequence reads.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

NAME = "hybridrl_paged"


class KVPool:
    """Keys and values of all layers: `blocks` [layers, blocks, block_size, 2, kv_heads, head_dim].

    Keys and values of a token lie side by side, so that one gather fetches both.
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
    ) -> None:
        self.block_size = block_size
        shape = (layers, blocks, block_size, 2, kv_heads, head_dim)
        # Zeros, since masked positions are multiplied by 0 and what is uninitialised may be NaN.
        if device.type == "cpu":
            # numpy takes zeroed pages from the system: memory is spent as blocks are first used.
            size = int(np.prod(shape)) * dtype.itemsize
            self.blocks = torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
        else:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.slots = [layer.view(-1, 2, kv_heads, head_dim) for layer in self.blocks]
        self.pages = [layer.view(blocks, -1) for layer in self.blocks]

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy whole blocks, of all layers, between two lists of block numbers."""
        self.blocks[:, destination] = self.blocks[:, source]


@dataclass(slots=True)
class PagedGroup:
    """Sequences with equally many queries that are attended together.

    Their tokens are `start : start + rows * queries` of the row. `pages` [rows * num_pages] are
    their block tables, padded with block 0; `positions` [rows, queries] those of the queries.
    """

    start: int
    rows: int
    queries: int
    pages: torch.Tensor
    positions: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, keys: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive causal mask [rows, 1, heads * queries or 1, keys], made once per window."""
        if window not in self.masks:
            key = torch.arange(keys, device=self.positions.device)
            query = self.positions[:, :, None]
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, torch.finfo(dtype).min)
            if self.queries > 1:
                mask = mask.repeat(1, heads, 1)
            self.masks[window] = mask[:, None]
        return self.masks[window]


@dataclass(slots=True)
class PagedBatch:
    """One forward pass: `slots` [tokens] are where keys and values are written, in the pool."""

    pool: KVPool
    slots: torch.Tensor
    groups: list[PagedGroup]


def attend(
    pool: KVPool,
    layer: int,
    query: torch.Tensor,
    group: PagedGroup,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of one group: `query` [rows * queries, heads, head_dim], result likewise.

    The query heads that share a kv head become query rows of it: keys are never repeated.
    """
    tokens, heads, head_dim = query.shape
    rows, queries = group.rows, group.queries
    kv_heads = pool.slots[layer].shape[2]
    shared = heads // kv_heads
    pages = pool.pages[layer].index_select(0, group.pages)
    keys, values = pages.view(rows, -1, 2, kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    if queries == 1:
        query = query.view(rows, kv_heads, shared, head_dim)
    else:
        query = query.view(rows, queries, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
        query = query.reshape(rows, kv_heads, shared * queries, head_dim)
    mask = group.mask(window, keys.shape[2], shared, query.dtype)
    out = functional.scaled_dot_product_attention(query, keys, values, mask, scale=scaling)
    if queries > 1:
        out = out.view(rows, kv_heads, shared, queries, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(tokens, heads, head_dim)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    paged: PagedBatch,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values, attend over the pages.

    `query` [1, heads, tokens, head_dim], `key` and `value` [1, kv_heads, tokens, head_dim]; gives
    [1, tokens, heads, head_dim]. The mask follows from the positions, `attention_mask` is unused.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    new = torch.stack((key[0].transpose(0, 1), value[0].transpose(0, 1)), 1)
    paged.pool.slots[layer].index_copy_(0, paged.slots, new)
    query = query[0].transpose(0, 1)
    outs = [
        attend(
            paged.pool,
            layer,
            query[group.start : group.start + group.rows * group.queries],
            group,
            scaling,
            sliding_window,
        )
        for group in paged.groups
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out[None], None


AttentionInterface.register(NAME, paged_attention)
