"""Seconds of a dry run's operators by the roofline of a GPU: predicted, nothing is measured.

An operator takes the longer of two times: that of its operations, and that of the bytes of its
inputs and results, each counted once. A phase takes the sum, and no less than the host needs for
its launches. What ranks send is a time besides: the part that is hidden is not known.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from gpu_dry.fake_device import Counts, FakeDevice
from hybridrl.costs.devices import Accelerator

_GATHERS = {"embedding", "index", "index_select", "gather"}
"""They read as much as they write, of tensors that may be larger."""
_PER_NODE = 8
_FORWARD, _BACKWARD = 4, 10
"""Operations of attention by query, key, head and number: two products, and five backward."""
# Parts of what a collective's ranks send, by its name's beginning: the result or the input, times
# so much of it. All-reduce is a reduce-scatter and an all-gather.
_SENT = {"allreduce": 2, "all_reduce": 2}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator: what it computes, reads and writes, or sends to other ranks."""

    name: str
    flops: float = 0.0
    nbytes: float = 0.0
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a phase: of the device, of the links, and of the host's launches."""

    device_s: float
    sent_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        """All of it, if nothing that is sent is hidden and all launches are."""
        return max(self.device_s + self.sent_s, self.host_s)

    def at_depth(self, other: "Prediction", steps: float) -> "Prediction":
        """On the line through this and an `other` of more layers, `steps` of the distance on."""
        pairs = ((getattr(self, n), getattr(other, n)) for n in ("device_s", "sent_s", "host_s"))
        return Prediction(*(a + steps * (b - a) for a, b in pairs))


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of a datasheet's operations, and of bytes of memory and links, that are reached."""

    flops: float = 1.0
    memory: float = 1.0
    links: float = 1.0


class RooflineDevice(FakeDevice):
    """A fake GPU that notes the `operations` of phases by name.

    A dry run's tensors have no values, so no lengths of sequences: `context` are the cached tokens
    of each row that decodes, and `sequence` the tokens of each sequence of a packed row.
    """

    def __init__(self, context: int, sequence: int) -> None:
        super().__init__()
        self.context, self.sequence = context, sequence
        self.operations: dict[str, list[Operation]] = {}
        self._noted: list[Operation] = []
        self._captured: dict[int, list[Operation]] = {}

    @contextmanager
    def phase(self, counts: dict[str, Counts], name: str) -> Iterator[Counts]:
        """Note the operations of the body, too."""
        with self._noting() as self.operations[name], super().phase(counts, name) as counted:
            yield counted

    @contextmanager
    def capture(self) -> Iterator[Counts]:
        """Note the operations of a graph, which its replays run."""
        with self._noting() as noted, super().capture() as counted:
            self._captured[id(counted)] = noted
            yield counted

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the body does is part of no phase."""
        with self._noting(), super().uncounted():
            yield

    @contextmanager
    def _noting(self) -> Iterator[list[Operation]]:
        before, self._noted = self._noted, []
        try:
            yield self._noted
        finally:
            self._noted = before

    def replay(self, captured: Counts) -> None:
        """Launch the kernels of a graph, as one launch of the host."""
        super().replay(captured)
        self._noted += self._captured[id(captured)]

    def launch(self, name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        """A kernel that torch does not dispatch; `_count` has noted those that it does."""
        super().launch(name, arguments)
        if arguments:
            self._noted.append(self._kernel(name, arguments))

    def _count(self, func: Any, name: str, inputs: Any, out: Any) -> None:
        before = self.counts.kernels
        super()._count(func, name, inputs, out)
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self._noted.append(Operation(name, sent=_sent(name, inputs[0], out)))
        elif self.counts.kernels > before:
            self._noted.append(self._operator(func, name, *inputs, out))

    def _operator(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any, out: Any
    ) -> Operation:
        """An operator that torch dispatches."""
        if "attn" in name or name == "counted_attention":
            factor = _BACKWARD if "backward" in name else _FORWARD
            return Operation(name, self._packed(factor, args[0]), _bytes((args, out)))
        flops, packet = 0.0, func._overloadpacket
        if packet in flop_registry:
            flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
        if name in _GATHERS:
            return Operation(name, flops, 2 * _bytes(out))
        written = out if tree_leaves(out) else _mutated(func, args)
        return Operation(name, flops, _bytes((args, kwargs)) + _bytes(written))

    def _packed(self, factor: int, query: torch.Tensor) -> float:
        """Operations of causal attention over a packed row: each query sees half of a sequence."""
        return factor * query.numel() * self.sequence / 2

    def _kernel(self, name: str, named: Mapping[str, Any]) -> Operation:
        """A kernel of ours, of flash-attn, or torch's fused norm."""
        if name == "attention_backward":
            flops = self._packed(_BACKWARD, named["query"])
            return Operation(name, flops, _bytes([*named.values()]) + 3 * _bytes(named["query"]))
        own = _KERNELS.get(name)
        if own is not None and (name != "_rotate_kernel" or "cache" in named):
            return own(self, name, named)
        return Operation(name, 0.0, _bytes([*named.values()]))


def _bytes(tensors: Any) -> float:
    leaves = (x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor))
    return float(sum(x.numel() * x.element_size() for x in leaves))


def _mutated(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """The arguments that an operator without a result writes."""
    pairs = zip(func._schema.arguments, args, strict=False)
    return [x for argument, x in pairs if argument.alias_info and argument.alias_info.is_write]


def _sent(name: str, args: tuple[Any, ...], out: Any) -> float:
    """Bytes that a rank sends, by a ring: of n ranks it does not send its own n-th part."""
    sizes = [_bytes(tensors) for tensors in (args, out)]
    ranks = _group_size(args)
    factor = next((f for start, f in _SENT.items() if name.startswith(start)), 1)
    whole = max(sizes) if factor == 1 else sizes[1] or sizes[0]
    return factor * whole * (ranks - 1) / ranks


def _group_size(args: tuple[Any, ...]) -> int:
    for value in args:
        if isinstance(value, str) and not value.startswith(("sum", "avg", "max", "min")):
            return int(_resolve_process_group(value).size())
        if isinstance(value, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(value).size())
            except RuntimeError:  # an operator of a reduction
                continue
    return dist.get_world_size()


# Kernels that touch a part of what they are given


def _rotation(_: RooflineDevice, name: str, named: Mapping[str, Any]) -> Operation:
    return Operation(name, 0.0, 2 * _bytes(named["qkv"]))


def _attention_of_splits(device: RooflineDevice, name: str, named: Mapping[str, Any]) -> Operation:
    query, cache = named["query"], named["cache"]
    tokens, pairs = len(query), device.context * query.numel()
    keys = 2 * tokens * device.context * cache.shape[2] * cache.shape[-1] * cache.element_size()
    return Operation(name, float(_FORWARD * pairs), keys + 2 * _bytes(query))


def _joined_splits(device: RooflineDevice, name: str, named: Mapping[str, Any]) -> Operation:
    used = math.ceil(device.context / named["SPLIT"]) / named["splits"]
    return Operation(name, 0.0, used * _bytes(named["split_values"]) + _bytes(named["out"]))


def _draw(_: RooflineDevice, name: str, named: Mapping[str, Any]) -> Operation:
    """One chunk of each row's logits."""
    logits = named["logits"]
    chunk = len(logits) * named["CHUNK"] * logits.element_size()
    return Operation(name, 0.0, chunk + _bytes([named["maxima"], named["sums"]]))


def _log_probs(_: RooflineDevice, name: str, named: Mapping[str, Any]) -> Operation:
    hidden, weight = named["hidden"], named["weight"]
    flops = 2.0 * hidden.numel() * len(weight)
    return Operation(name, flops, _bytes([hidden, weight, named["out"]]))


def _experts(_: RooflineDevice, name: str, named: Mapping[str, Any]) -> Operation:
    """Pairs of tokens and experts fall on experts by chance, of which some have none."""
    weight, pairs = named["weight"], len(named["order"])
    chosen = 1 - (1 - 1 / len(weight)) ** pairs
    flops = 2.0 * pairs * weight[0].numel()
    return Operation(name, flops, chosen * _bytes(weight) + _bytes([named["x"], named["out"]]))


_KERNELS: Mapping[str, Callable[[RooflineDevice, str, Mapping[str, Any]], Operation]] = {
    "_rotate_kernel": _rotation,
    "_split_kernel": _attention_of_splits,
    "_join_kernel": _joined_splits,
    "_draw_kernel": _draw,
    "_partial_kernel": _log_probs,
    "_grad_logits_kernel": _log_probs,
    "_product_kernel": _experts,
}


def predict(
    operations: list[Operation], launches: int, gpu: Accelerator, shares: Shares, nodes: int = 1
) -> Prediction:
    """Seconds of a phase with so many launches of the host.

    Between nodes the GPUs of each share their links, and NVLink is no slower than all of them.
    """
    link = gpu.node_bytes_per_s
    if nodes > 1:
        link = min(link, _PER_NODE * gpu.network_bytes_per_s)
    flop_s, byte_s = 1 / (shares.flops * gpu.flops), 1 / (shares.memory * gpu.memory_bytes_per_s)
    return Prediction(
        device_s=sum(max(x.flops * flop_s, x.nbytes * byte_s) for x in operations),
        sent_s=sum(x.sent for x in operations) / (shares.links * link),
        host_s=launches * gpu.launch_s,
    )
