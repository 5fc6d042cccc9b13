"""States of recurrent layers: slots beside the cache of keys and values, and passes over them.

A state is what a layer keeps of all tokens before: the last inputs of a convolution, and a matrix
or vector for each head. Its size does not depend on the length of the sequence.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

StateShapes = list[list[tuple[torch.Size, torch.dtype]]]
"""For each mixer the shapes and formats of a sequence's states: the convolution's comes first."""

_BY_INDEX = "number_of_states" in inspect.signature(LinearAttentionLayer.__init__).parameters
"""Whether transformers (from 5.16 on) has the states of a layer in dicts."""


class _PreciseLayer(LinearAttentionLayer):
    """A layer of transformers' cache whose recurrent state keeps its format.

    transformers 5.10 makes it in the format of the convolution: bfloat16 in a model of bfloat16.
    """

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        """The new states [sequences, ...], as they are."""
        self.recurrent_states = recurrent_states
        self.is_recurrent_states_initialized = True
        return recurrent_states


class LayerStates(Cache):
    """The states of the sequences of one call of a mixer, as transformers' cache of one layer."""

    def __init__(self, states: Sequence[torch.Tensor] | None) -> None:
        """`states` [sequences, ...]: the convolution's, then the recurrent one; None: no tokens."""
        layer: Any = LinearAttentionLayer() if _BY_INDEX else _PreciseLayer()
        super().__init__(layers=[layer])
        if states is None:
            return
        convolution, recurrent = states[0], states[1] if len(states) > 1 else None
        layer.dtype, layer.device = convolution.dtype, convolution.device
        if _BY_INDEX:
            layer.conv_states[0], layer.recurrent_states[0] = convolution, recurrent
            layer.is_conv_states_initialized[0] = layer.has_previous_state[0] = True
            layer.is_recurrent_states_initialized[0] = recurrent is not None
            layer.conv_kernel_size[0] = convolution.shape[-1]
        else:
            layer.conv_states, layer.recurrent_states = convolution, recurrent
            layer.is_conv_states_initialized = layer.has_previous_state = True
            layer.is_recurrent_states_initialized = recurrent is not None
            layer.conv_kernel_size = convolution.shape[-1]
            layer.max_batch_size = convolution.shape[0]

    def tensors(self) -> list[torch.Tensor]:
        """The states after the call."""
        layer: Any = self.layers[0]
        states = layer.conv_states, layer.recurrent_states
        values = [state[0] for state in states] if _BY_INDEX else states
        return [state for state in values if state is not None]


class StateCache:
    """The states of all mixers of a rank: for each its tensors [slots, ...], on the device.

    Slot 0 is no sequence's. Recurrent states are in float32: they are sums over all tokens. Where
    the model `continues` its mixers take several tokens on a state at a time, else one.
    """

    def __init__(
        self, shapes: StateShapes, slots: int, device: torch.device, continues: bool
    ) -> None:
        """Room for so many `slots` besides the first."""
        self.continues = continues
        self.layers = [
            [torch.zeros(slots + 1, *shape, dtype=dtype, device=device) for shape, dtype in layer]
            for layer in shapes
        ]
        self._tensors = [tensor for layer in self.layers for tensor in layer]

    def reset(self, slots: Sequence[int]) -> None:
        """Sequences without a token: their states are zero."""
        for tensor in self._tensors:
            tensor[slots] = 0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states from slots to others: (source, destination), each."""
        sources, destinations = [source for source, _ in pairs], [to for _, to in pairs]
        for tensor in self._tensors:
            tensor[destinations] = tensor[sources]

    def read(self, slot: int) -> torch.Tensor:
        """A sequence's states on the host, as bytes [bytes]."""
        return torch.cat([_bytes(tensor[slot]) for tensor in self._tensors]).cpu()

    def write(self, slot: int, kept: torch.Tensor) -> None:
        """The reverse of `read`."""
        kept, start = kept.to(self._tensors[0].device), 0
        for tensor in self._tensors:
            size = tensor[slot].nbytes
            values = kept[start : start + size].clone().view(tensor.dtype)
            tensor[slot] = values.view(tensor.shape[1:])
            start += size


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def state_bytes(shapes: StateShapes) -> int:
    """The bytes of one sequence's states."""
    return sum(shape.numel() * dtype.itemsize for layer in shapes for shape, dtype in layer)


@dataclass(frozen=True, slots=True)
class StateRun:
    """Rows of a pass that a mixer computes in one call: equally many tokens each.

    `places` [rows, tokens] are those of their tokens in the pass, `slots` [rows] their states',
    which are `fresh` where no token came before: then a call makes them anew.
    """

    places: torch.Tensor
    slots: torch.Tensor
    fresh: bool


@dataclass(slots=True)
class StateBatch:
    """The `runs` of a pass, in order: a row's later tokens may be in a later run.

    With `keeps` every run is of one token a row, the first run has all rows, and each later one
    the first of these. Then the states behind every token are kept until `accept` says how many of
    a row's tokens count.
    """

    cache: StateCache
    runs: list[StateRun]
    keeps: bool = False
    _kept: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)

    def keep(self, layer: int, states: list[torch.Tensor]) -> None:
        """The states [rows, ...] of a layer behind the tokens of its next run."""
        self._kept.setdefault(layer, []).append(states)

    def accept(self, counts: Sequence[int]) -> None:
        """The first `counts` [rows] tokens of the rows count, one at least: undo what follows."""
        numbers = np.array(counts)
        for token in range(numbers.max(initial=0)):
            rows = torch.from_numpy(np.flatnonzero(numbers == token + 1))
            slots = self.runs[0].slots[rows.to(self.runs[0].slots.device)]
            for layer, runs in self._kept.items():
                for tensor, values in zip(self.cache.layers[layer], runs[token], strict=True):
                    tensor[slots] = values[rows.to(values.device)].to(tensor.dtype)
        self._kept.clear()


@dataclass(frozen=True, slots=True)
class StateRows:
    """Consecutive rows of a pass: `counts` [rows] tokens each, in `width` places from `start` on.

    `slots` [rows] are those of their states, `begins` [rows] the tokens before.
    """

    start: int
    width: int
    counts: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]


def state_batch(
    cache: StateCache, groups: Sequence[StateRows], device: torch.device, continues: bool
) -> StateBatch:
    """The runs of a pass that computes whole rows; a final state sees no padding.

    Without `continues` a mixer is wrong for several tokens on a state: they go one by one.
    """
    runs = []
    for group in groups:
        kinds = np.stack((group.counts, group.begins == 0), 1)
        for count, fresh in np.unique(kinds, axis=0).tolist():
            rows = np.flatnonzero((kinds == (count, fresh)).all(1))
            places = (group.start + rows * group.width)[:, None] + np.arange(count)
            # A state of zeros is that of no tokens, for a single one.
            apart = count == 1 or not (fresh or continues)
            for columns in np.split(places, count, 1) if apart and count else [places]:
                if count:
                    runs.append(_run(columns, group.slots[rows], fresh and not apart, device))
    return StateBatch(cache, runs)


def draft_states(
    cache: StateCache, groups: Sequence[StateRows], device: torch.device
) -> StateBatch:
    """The runs of a pass over drafts, token by token; rows with most tokens come first."""
    starts = np.concatenate([g.start + np.arange(len(g.counts)) * g.width for g in groups])
    counts = np.concatenate([group.counts for group in groups])
    slots = np.concatenate([group.slots for group in groups])
    runs = []
    for token in range(counts[0]):
        rows = int((counts > token).sum())
        runs.append(_run(starts[:rows, None] + token, slots[:rows], False, device))
    return StateBatch(cache, runs, keeps=True)


def _run(
    places: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    fresh: bool,
    device: torch.device,
) -> StateRun:
    at = torch.from_numpy(np.ascontiguousarray(places)).to(device)
    return StateRun(at, torch.from_numpy(np.ascontiguousarray(slots)).to(device), fresh)
