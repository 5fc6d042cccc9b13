"""Keys and values of a sequence that is computed in chunks (ChunkFlow, arXiv 2503.02356).

A chunk attends to those of the earlier chunks, which are kept without their graph. So backward goes
through one chunk at a time, the last one first, and leaves the gradients of the others' keys and
values with them. The classes are no dataclasses, of which FSDP passes copies to the layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

KeysValues = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Attention of a query to keys and values, with sinks or None."""


class SequenceKeys:
    """Keys and values of a sequence of `tokens`, and their gradients, by attention module.

    They are stored as [tokens, kv_heads, dim], and go in and out as [kv_heads, tokens, dim]. Those
    `for_backward` stay until the backward pass of the first chunk.
    """

    def __init__(self, tokens: int, for_backward: bool) -> None:
        self.tokens, self.for_backward = tokens, for_backward
        self.kept: dict[nn.Module, KeysValues] = {}
        self.gradients: dict[nn.Module, KeysValues] = {}

    def write(self, module: nn.Module, start: int, pair: KeysValues) -> None:
        """Keep the keys and values of the tokens from `start` on."""
        if module not in self.kept:
            key, value = (x.new_empty(self.tokens, x.shape[0], x.shape[2]) for x in pair)
            self.kept[module] = key, value
        for buffer, x in zip(self.kept[module], pair, strict=True):
            buffer[start : start + x.shape[1]] = x.detach().transpose(0, 1)

    def joined(self, module: nn.Module, start: int, pair: KeysValues) -> KeysValues:
        """`pair` behind the keys and values of the tokens before `start`."""
        if not start:
            return pair
        key, value = self.kept[module]
        earlier = key[:start].transpose(0, 1), value[:start].transpose(0, 1)
        return torch.cat((earlier[0], pair[0]), 1), torch.cat((earlier[1], pair[1]), 1)

    def exchange(self, module: nn.Module, start: int, pair: KeysValues) -> list[torch.Tensor]:
        """The gradients of a chunk's own keys and values, from those of the joined ones.

        Gradients of later chunks are added to them; those before `start` are left for their chunks.
        """
        if start and module not in self.gradients:
            key, value = (torch.zeros_like(x) for x in self.kept[module])
            self.gradients[module] = key, value
        own = [x[:, start:] for x in pair]
        if module not in self.gradients:
            return own
        for index, (buffer, x) in enumerate(zip(self.gradients[module], pair, strict=True)):
            buffer[:start] += x[:, :start].transpose(0, 1)
            own[index] = own[index] + buffer[start : start + own[index].shape[1]].transpose(0, 1)
        return own

    def drop(self, module: nn.Module) -> None:
        """Free those of a module, to which nothing attends any more."""
        self.kept.pop(module, None)
        self.gradients.pop(module, None)


class ChunkKeys:
    """The tokens `start` to `stop` of a sequence, which attend to all tokens before them.

    A pass without a graph keeps its keys and values for later chunks. In scoring the last chunk's
    frees them. A backward pass leaves gradients to the earlier chunks, and takes up those that are
    left to it; the first chunk's frees them.

    Example of two chunks: a pass over the first without graph. A pass over the second and backward.
    A pass over the first and backward.
    """

    def __init__(self, sequence: SequenceKeys, start: int, stop: int) -> None:
        self.sequence, self.start, self.stop = sequence, start, stop

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        attend: Attend,
    ) -> torch.Tensor:
        """The result of `attend` with the keys and values of all chunks up to this one.

        The joined ones are not kept for backward, which joins them again and repeats `attend`:
        memory would grow with the number of chunks.
        """
        if torch.is_grad_enabled():
            out: torch.Tensor = _ChunkAttention.apply(
                query, key, value, sinks, module, self, attend
            )
            return out
        out = attend(query, *self.sequence.joined(module, self.start, (key, value)), sinks)
        if self.stop < self.sequence.tokens:
            self.sequence.write(module, self.start, (key, value))
        elif not self.sequence.for_backward:
            self.sequence.drop(module)
        return out


class _ChunkAttention(torch.autograd.Function):
    """`ChunkKeys.attend` with a graph. It is one node, which pipelines too run once."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        module: nn.Module,
        chunk: ChunkKeys,
        attend: Attend,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.call = module, chunk, attend
        return attend(query, *chunk.sequence.joined(module, chunk.start, (key, value)), sinks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        module, chunk, attend = ctx.call
        query, key, value, sinks = ctx.saved_tensors
        keys, start = chunk.sequence, chunk.start
        joined = keys.joined(module, start, (key, value))
        leaves = [x.detach().requires_grad_() for x in (query, *joined)]
        own_sinks = [] if sinks is None else [sinks.detach().requires_grad_()]
        with torch.enable_grad():
            out = attend(leaves[0], leaves[1], leaves[2], own_sinks[0] if own_sinks else None)
        of_query, of_key, of_value, *of_sinks = torch.autograd.grad(out, leaves + own_sinks, grad)
        own = keys.exchange(module, start, (of_key, of_value))
        if not start:
            keys.drop(module)
        return of_query, *own, of_sinks[0] if of_sinks else None, None, None, None
