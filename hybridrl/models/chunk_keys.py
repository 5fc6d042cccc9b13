"""Keys and values of a sequence that is computed in chunks (ChunkFlow, arXiv 2503.02356).

A chunk attends to those of the earlier chunks, which are kept without their graph. So backward goes
through one chunk at a time, the last one first, and leaves the gradients of the others' keys and
values with them.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
KeysValues = tuple[torch.Tensor, torch.Tensor]


class ChunkKeys:
    """Keys and values of one chunk, by attention module, each [kv_heads, tokens, dim].

    A pass over the chunk sets them. `keep` stores them for later chunks, whose backward passes then
    leave gradients. `gradients` pairs those with the keys and values of another pass.

    Example of two chunks: a pass over the first without graph, and `keep`. A pass over the second
    and backward. A pass over the first, and backward from its outputs and its `gradients()`.
    """

    def __init__(self, before: "ChunkKeys | None" = None) -> None:
        self._earlier: tuple[ChunkKeys, ...] = () if before is None else before.up_to_here
        self._kept: dict[nn.Module, KeysValues] = {}
        self._of_pass: dict[nn.Module, KeysValues] = {}

    @property
    def up_to_here(self) -> "tuple[ChunkKeys, ...]":
        """The chunks of the sequence up to this one."""
        return (*self._earlier, self)

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
        pairs = [*(chunk._kept[module] for chunk in self._earlier), (key, value)]

        def run(query: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
            keys, values = tensors[: len(pairs)], tensors[len(pairs) :]
            return attend(query, torch.cat(keys, 1), torch.cat(values, 1))

        tensors = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
        if not torch.is_grad_enabled():
            return run(query, *tensors)
        out: torch.Tensor = checkpoint(
            run, query, *tensors, use_reentrant=False, preserve_rng_state=False
        )
        return out

    def keep(self) -> None:
        """Store what the last pass has computed, for later chunks and their gradients."""
        self._kept = {
            module: (key.detach().requires_grad_(), value.detach().requires_grad_())
            for module, (key, value) in self._of_pass.items()
        }
        self._of_pass = {}

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each of the last pass's keys and values, with the gradient from later chunks."""
        return [
            (own, kept.grad)
            for module, pair in self._of_pass.items()
            for own, kept in zip(pair, self._kept.get(module, ()), strict=False)
            if kept.grad is not None
        ]

    def free(self) -> None:
        """Forget everything: backward has been here."""
        self._kept, self._of_pass = {}, {}
