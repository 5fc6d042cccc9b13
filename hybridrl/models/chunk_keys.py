"""Keys and values of a sequence that is computed in chunks (ChunkFlow, arXiv 2503.02356).

A chunk attends to those of the earlier chunks, which are kept without their graph. So backward goes
through one chunk at a time, the last one first, and leaves the gradients of the others' keys and
values with them. The classes are no dataclasses, of which FSDP passes copies to the layers.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
KeysValues = tuple[torch.Tensor, torch.Tensor]


class SequenceKeys:
    """Keys and values of a sequence of `tokens`, and their gradients, by attention module.

    They are stored as [tokens, kv_heads, dim], and go in and out as [kv_heads, tokens, dim].
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
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
        """Keys and values of the tokens before `stop`, none for 0; backward adds to `gradients`."""
        if not stop:
            return []
        leaves = [x[:stop].detach() for x in self.kept[module]]
        if torch.is_grad_enabled():
            if module not in self.gradients:
                key, value = (torch.zeros_like(x) for x in self.kept[module])
                self.gradients[module] = key, value
            for leaf, gradient in zip(leaves, self.gradients[module], strict=True):
                leaf.requires_grad_().grad = gradient[:stop]
        return [leaf.transpose(0, 1) for leaf in leaves]


class ChunkKeys:
    """Keys and values of the tokens `start` to `stop` of a sequence.

    A pass over the chunk sets them. `keep` stores them for later chunks, whose backward passes then
    leave gradients. `gradients` pairs those with the keys and values of another pass.

    Example of two chunks: a pass over the first without graph, and `keep`. A pass over the second
    and backward. A pass over the first, and backward from its outputs and its `gradients()`.
    """

    def __init__(self, sequence: SequenceKeys, start: int, stop: int) -> None:
        self.sequence, self.start, self.stop = sequence, start, stop
        self._of_pass: dict[nn.Module, KeysValues] = {}

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """The result of `attend` with the keys and values of all chunks up to this one.

        The joined ones are not kept for backward, which joins them again and repeats `attend`:
        memory would grow with the number of chunks.
        """
        self._of_pass[module] = key, value
        earlier = self.sequence.before(module, self.start)

        def run(query: torch.Tensor, *pairs: torch.Tensor) -> torch.Tensor:
            return attend(query, torch.cat(pairs[::2], 1), torch.cat(pairs[1::2], 1))

        if not torch.is_grad_enabled():
            return run(query, *earlier, key, value)
        out: torch.Tensor = checkpoint(
            run, query, *earlier, key, value, use_reentrant=False, preserve_rng_state=False
        )
        return out

    def keep(self) -> None:
        """Store what the last pass has computed, for later chunks."""
        for module, pair in self._of_pass.items():
            self.sequence.write(module, self.start, pair)
        self._of_pass = {}

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each of the last pass's keys and values, with the gradient from later chunks."""
        if self.stop == self.sequence.tokens:
            return []
        return [
            (own, gradient[self.start : self.stop].transpose(0, 1))
            for module, pair in self._of_pass.items()
            for own, gradient in zip(pair, self.sequence.gradients[module], strict=True)
        ]

    def free(self) -> None:
        """Forget the pass, and with the first chunk the sequence: nothing comes after it."""
        self._of_pass = {}
        if not self.start:
            self.sequence.kept, self.sequence.gradients = {}, {}
