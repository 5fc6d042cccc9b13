"""Keys and values of a sequence that is computed in chunks (ChunkFlow, arXiv 2503.02356).

A chunk attends to those of the earlier chunks, which are kept without their graph. So backward goes
through one chunk at a time, the last one first, and leaves the gradients of the others' keys and
values with them. The classes are no dataclasses, of which FSDP passes copies to the layers.
"""

from collections.abc import Callable, Sequence
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

    def before(self, module: nn.Module, stop: int) -> list[torch.Tensor]:
        """Keys and values of the tokens before `stop`, none for 0."""
        return [x[:stop].transpose(0, 1) for x in self.kept[module]] if stop else []

    def leave_gradients(self, module: nn.Module, gradients: Sequence[torch.Tensor]) -> None:
        """Add `gradients` of the first tokens' keys and values to those of other chunks."""
        if module not in self.gradients:
            key, value = (torch.zeros_like(x) for x in self.kept[module])
            self.gradients[module] = key, value
        for buffer, x in zip(self.gradients[module], gradients, strict=True):
            buffer[: x.shape[1]] += x.transpose(0, 1)

    def with_later(self, module: nn.Module, start: int, pair: KeysValues) -> list[torch.Tensor]:
        """A chunk's gradients of its keys and values, with those that later chunks have left."""
        later = self.gradients.get(module)
        if later is None:
            return [*pair]
        return [
            x + buffer[start : start + x.shape[1]].transpose(0, 1)
            for buffer, x in zip(later, pair, strict=True)
        ]

    def drop(self, module: nn.Module) -> None:
        """Free those of a module, to which nothing attends any more."""
        self.kept.pop(module, None)
        self.gradients.pop(module, None)

    def drop_all(self) -> None:
        """Free what no backward pass has: those in front of all that is trained."""
        self.kept.clear()
        self.gradients.clear()


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
        out = attend(query, *_joined(key, value, *self.sequence.before(module, self.start)), sinks)
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
        earlier = chunk.sequence.before(module, chunk.start)
        return attend(query, *_joined(key, value, *earlier), sinks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        module, chunk, attend = ctx.call
        query, key, value, sinks = ctx.saved_tensors
        keys, start = chunk.sequence, chunk.start

        # The joined keys and values are held no longer than attention holds them.
        inputs = [query, key, value, *keys.before(module, start)]
        leaves = [x.detach().requires_grad_() for x in inputs]
        own_sinks = [] if sinks is None else [sinks.detach().requires_grad_()]
        with torch.enable_grad():
            out = attend(leaves[0], *_joined(*leaves[1:]), own_sinks[0] if own_sinks else None)
        gradients = torch.autograd.grad(out, leaves + own_sinks, grad)

        of_query, of_key, of_value = gradients[:3]
        if start:
            keys.leave_gradients(module, gradients[3:5])
        own = keys.with_later(module, start, (of_key, of_value))
        if not start:
            keys.drop(module)
        return of_query, *own, gradients[-1] if own_sinks else None, None, None, None


def _joined(key: torch.Tensor, value: torch.Tensor, *earlier: torch.Tensor) -> KeysValues:
    """Keys and values behind the `earlier` ones, if there are any."""
    if not earlier:
        return key, value
    return torch.cat((earlier[0], key), 1), torch.cat((earlier[1], value), 1)
