"""The weight switch as its destination wants it: all at once, or one layer at a time.

An engine that repacks its weights has no memory for all incoming tensors. Each layer gets temporary
tensors, is filled, and is repacked before the next layer arrives.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from hybridrl.layout.plan import Plan, subplan
from hybridrl.layout.proof import SwitchProof
from hybridrl.layout.weight_switch import BUCKET_BYTES, SwitchStats, Tensors, WeightSwitch


class Fill(Protocol):
    """Writes the rank's shards of weights, in place."""

    def __call__(self, tensors: Tensors, names: Sequence[str] | None = None, /) -> None:
        """Fill the rank's `tensors` of the parameters `names`; None: of the whole model.

        `names` are a layer's of `by_layer`, of which a rank may hold some, or none. All ranks make
        the same calls, which name every layer once.
        """
        ...


Load = Callable[[Fill], None]
"""Hands the destination's tensors to a `Fill`, all at once or in several calls."""

Held = Callable[[], Tensors]
"""Gives the weights that an engine generates with, by name, once it has loaded them."""


class LayerwiseSwitch:
    """A `WeightSwitch` for each layer that a destination is filled with, or one for all.

    All ranks of the plan make one and call `switch` together. Buckets of one layer overlap, layers
    do not. The rounds are computed once, at the first switch. Every switch ends with a proof
    (`layout.proof`), of which all ranks make one.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`device` is that of the process group, on which a switch is proven."""
        self.plan, self._device = plan, device
        self._proof = SwitchProof(plan, rank, dtype)
        self._settings = rank, dtype, bucket_bytes
        self._layers = {frozenset(names) for names in by_layer(plan.dst.rules)}
        self._switches: dict[frozenset[str] | None, WeightSwitch] = {}

    def switch(self, source: Tensors, load: Load, held: Held | None = None) -> SwitchStats:
        """Let `load` fill its tensors from `source`; `WeightSwitch.switch` says their shapes.

        What is proven is what an engine has `held` after `load`; without that, what its tensors
        were filled with, since it may have repacked them.

        `bytes_held` of the result is the largest size of one layer's tensors, 0 where all are
        filled at once. Raises ValueError before anything of a layer is sent that is not the plan's,
        or has come before; and at the end where one was left out. Raises WeightsDiffer, on all
        ranks, where a rank has other weights than were sent.
        """
        begun, planning = time.perf_counter(), 0.0
        total, left = SwitchStats("local", 0), {*self._layers}
        self._proof.begin(self._device)

        def fill(tensors: Tensors, names: Sequence[str] | None = None) -> None:
            nonlocal total, planning
            layers = self._layers if names is None else {frozenset(names)}
            if not layers <= left:
                shown = "all layers" if names is None else ", ".join(names)
                raise ValueError(f"{shown}: no layer of the plan, or one that has come before")
            left.difference_update(layers)
            start = time.perf_counter()
            switch = self._switch_of(names)
            planning += time.perf_counter() - start
            own = source if names is None else {n: source[n] for n in names if n in source}
            stats = switch.switch(own, tensors)
            num_bytes = 0 if names is None else sum(tensor.nbytes for tensor in tensors.values())
            total = total.followed_by(replace(stats, bytes_held=num_bytes))
            if held is None:
                self._proof.received(tensors)

        load(fill)
        if left:
            raise ValueError(f"{len(left)} layers of the plan were left out")
        seconds = time.perf_counter() - begun - planning - self._proof.seconds
        if held is not None:
            self._proof.received(held())
        self._proof.compare(source)
        proof = self._proof.seconds, self._proof.num_bytes
        return replace(total, seconds=seconds, proof_seconds=proof[0], proof_bytes=proof[1])

    def _switch_of(self, names: Sequence[str] | None) -> WeightSwitch:
        """The switch of a layer, made at its first use."""
        key = None if names is None else frozenset(names)
        if key not in self._switches:
            plan = self.plan if names is None else subplan(self.plan, names)
            self._switches[key] = WeightSwitch(plan, *self._settings)
        return self._switches[key]


def by_layer(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names of parameters in groups: one a decoder layer, one for each other parameter."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer_prefix = re.search(r"\.layers\.\d+\.", name)
        layers.setdefault(name[: layer_prefix.end()] if layer_prefix else name, []).append(name)
    return [tuple(layer) for layer in layers.values()]
