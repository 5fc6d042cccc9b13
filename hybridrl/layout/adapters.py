"""The weight switch of a model with adapters: base weights are sent once, then adapters alone.

Generation uses W + scaling B A in one tensor, so it costs the same as without adapters. A copy of
W stays in host memory in the generation layout. Each switch starts from that copy, so rounding
errors do not add up, and freed device weights can be restored.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hybridrl.layout.layerwise import Fill, LayerwiseSwitch, Load, by_layer
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.plan import Plan
from hybridrl.layout.proof import SwitchProof
from hybridrl.layout.weight_switch import BUCKET_BYTES, SwitchStats, Tensors, WeightSwitch


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """A rank's shards of W by name, in host memory, and the names of A and B of those with both."""

    base: Mapping[str, torch.Tensor]
    pairs: Mapping[str, tuple[str, str]]
    scaling: float

    @torch.no_grad()
    def fill(self, tensors: Tensors, adapters: Tensors) -> None:
        """W + scaling B A, the product and the sum in float32 and rounded once."""
        for name, base in self.base.items():
            if name not in tensors:
                continue
            tensor = tensors[name]
            if name in self.pairs:
                a, b = (adapters[adapter].float() for adapter in self.pairs[name])
                # Converted on the device: in one call the host would convert, and wait.
                weight = base.to(tensor.device, non_blocking=True).float()
                tensor.copy_(torch.addmm(weight, b, a, alpha=self.scaling))
            else:
                tensor.copy_(base, non_blocking=True)


class AdapterSwitch:
    """Moves what a rank needs to generate with a model that has adapters.

    States: created -> `load` -> `switch`, any number of times. All ranks of the plans make one and
    call both together. `pairs` names A and B of each weight with adapters. A rank holds shards of
    W, B and A. One of B and A is replicated, so their product needs no other rank
    (`models.adapters.adapter_parameters`).

    Example: W [1024, 1024] in bf16 with adapters of rank 8; generation halves W along its rows. A
    rank holds 1 MiB of W. A switch brings it B [512, 8] and A [8, 1024], less the elements that it
    holds already: at most 24 KiB.
    """

    def __init__(
        self,
        base: Plan,
        adapters: Plan,
        pairs: Mapping[str, tuple[str, str]],
        scaling: float,
        rank: int,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`base` moves the weights, `adapters` the pairs; `dtype` is the generation weights'."""
        self.dtype = dtype
        self._base_plan, self._bucket_bytes, self._rank = base, bucket_bytes, rank
        self._precise = base.dst.precise
        self._adapter_names = adapters.src.shapes.keys()
        self._shapes = {
            name: shape
            for layout in (base.dst, adapters.dst)
            for name in layout.rules
            if (shape := LocalTensor(layout.local(name, rank)).shape) is not None
        }
        self._switch = WeightSwitch(adapters, rank, dtype, bucket_bytes)
        self._proof = SwitchProof(adapters, rank, dtype)
        self._loaded: SwitchStats | None = None
        self.base: dict[str, torch.Tensor] = {}
        """The rank's shard of W by name, in host memory; read-only."""
        self._merged = MergedWeights(self.base, pairs, scaling)

    def load(self, source: Tensors, device: torch.device) -> None:
        """Bring the base weights, layer by layer over `device`; `source` may hold more names."""

        def take(fill: Fill) -> None:
            for names in by_layer(self._base_plan.dst.rules):
                tensors = {
                    name: torch.zeros(
                        self._shapes[name],
                        dtype=torch.float32 if name in self._precise else self.dtype,
                        device=device,
                    )
                    for name in names
                    if name in self._shapes
                }
                fill(tensors, names)
                on_cpu = device.type == "cpu"
                # Not in a loop, whose variable would hold a tensor while the next layer is filled.
                self.base |= {n: x if on_cpu else x.cpu().pin_memory() for n, x in tensors.items()}

        settings = self._rank, self.dtype, device, self._bucket_bytes
        self._loaded = LayerwiseSwitch(self._base_plan, *settings).switch(source, take)

    def switch(self, source: Tensors, load: Load, device: torch.device) -> SwitchStats:
        """Bring the adapters and let `load` fill the generation weights on `device`.

        The result counts the adapters' bytes; the first call's also counts those of `self.load`.
        Proven are the base weights and the adapters, not their product.
        """
        assert self.base or not self._base_plan.dst.rules, "load comes first"
        begun = time.perf_counter()
        inputs = {name: source[name] for name in self._adapter_names if name in source}
        adapters = {
            name: torch.empty(self._shapes[name], dtype=self.dtype, device=device)
            for name in self._adapter_names
            if name in self._shapes
        }
        stats = self._switch.switch(inputs, adapters, waits=False)
        self._proof.begin(device)
        self._proof.received(adapters)
        self._proof.compare(inputs)
        held = sum(tensor.nbytes for tensor in adapters.values())
        load(lambda tensors, names=None: self._merged.fill(tensors, adapters))
        if device.type == "cuda":
            # So that `seconds` counts work, not launches: its own, and not what leaves meanwhile.
            torch.cuda.current_stream(device).synchronize()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            stats = replace(
                stats,
                path=loaded.path,
                bytes_theory=stats.bytes_theory + loaded.bytes_theory,
                bytes_received=stats.bytes_received + loaded.bytes_received,
                scratch_bytes=max(stats.scratch_bytes, loaded.scratch_bytes),
                proof_seconds=loaded.proof_seconds,
                proof_bytes=loaded.proof_bytes,
            )
        return replace(
            stats,
            bytes_held=held,
            seconds=time.perf_counter() - begun - self._proof.seconds,
            proof_seconds=stats.proof_seconds + self._proof.seconds,
            proof_bytes=stats.proof_bytes + self._proof.num_bytes,
        )
