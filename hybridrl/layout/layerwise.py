"""The weight switch one layer at a time, for destinations that cannot hold all of it at once.

An engine that repacks its weights has no memory for all incoming tensors. Each layer gets temporary
tensors, is filled, and is repacked before the next layer arrives.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from hybridrl.layout.layout import Layout
from hybridrl.layout.plan import Plan
from hybridrl.layout.weight_switch import BUCKET_BYTES, SwitchStats, Tensors, WeightSwitch


class LayerwiseSwitch:
    """A `WeightSwitch` for each of `layers` (names of parameters, the same lists on every rank).

    All ranks of the plan make one and call `switch` together. Buckets of one layer overlap, layers
    do not.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        dtype: torch.dtype,
        layers: Sequence[Sequence[str]],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Raises ValueError where `layers` do not name every parameter of the plan once."""
        if sorted(name for names in layers for name in names) != sorted(plan.dst.rules):
            raise ValueError("the layers must name every parameter of the plan once")
        self.layers = [tuple(names) for names in layers]
        self._switches = [
            WeightSwitch(subplan(plan, names), rank, dtype, bucket_bytes) for names in self.layers
        ]

    def switch(
        self,
        source: Tensors,
        destination_of: Callable[[Sequence[str]], AbstractContextManager[Tensors]],
    ) -> SwitchStats:
        """Fill, layer by layer, the tensors that `destination_of(names)` yields.

        `WeightSwitch.switch` says their shapes; they are complete when the context exits.
        `bytes_held` of the result is the largest size of one layer's tensors.
        """
        begun = time.perf_counter()
        total = SwitchStats("local", 0)
        paths: set[str] = set()
        for names, switch in zip(self.layers, self._switches, strict=True):
            with destination_of(names) as destination:
                inputs = {name: source[name] for name in names if name in source}
                stats = switch.switch(inputs, destination)
                held = sum(tensor.nbytes for tensor in destination.values())
            paths.update(stats.path.split("+"))
            total = replace(
                total,
                bytes_theory=total.bytes_theory + stats.bytes_theory,
                bytes_received=total.bytes_received + stats.bytes_received,
                scratch_bytes=max(total.scratch_bytes, stats.scratch_bytes),
                bytes_held=max(total.bytes_held, held),
                seconds_pack=total.seconds_pack + stats.seconds_pack,
                seconds_wait=total.seconds_wait + stats.seconds_wait,
                seconds_copy=total.seconds_copy + stats.seconds_copy,
            )
        path = "+".join(step for step in ("gather", "exchange") if step in paths) or "local"
        return replace(total, path=path, seconds=time.perf_counter() - begun)


def by_layer(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names of parameters in groups: one a decoder layer, one for each other parameter."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer_prefix = re.search(r"\.layers\.\d+\.", name)
        layers.setdefault(name[: layer_prefix.end()] if layer_prefix else name, []).append(name)
    return [tuple(layer) for layer in layers.values()]


def subplan(plan: Plan, names: Sequence[str]) -> Plan:
    """The plan restricted to the parameters `names`."""
    wanted = set(names)
    classes = (
        replace(cls, names=tuple(name for name in cls.names if name in wanted))
        for cls in plan.classes
    )
    return Plan(
        _restricted(plan.src, wanted),
        _restricted(plan.dst, wanted),
        tuple(cls for cls in classes if cls.names),
    )


def _restricted(layout: Layout, names: set[str]) -> Layout:
    return Layout(
        layout.mesh,
        {name: shape for name, shape in layout.shapes.items() if name in names},
        {name: rule for name, rule in layout.rules.items() if name in names},
    )
