"""What a layer costs, whatever the model's size: the one format of all sources of seconds.

A pass of n tokens over a layer takes

    call_s + flop_s F + element_s E + pair_s P

with F the floating-point operations of its matrices, E the elements that its other kernels touch (n
times hidden and feed-forward sizes), P the operations of attention (quadratic in lengths). So what
was measured for one layout and size predicts another. The head has costs of its own.

Sources: a roofline (`accelerators.py`), `hybridrl plan calibrate`, a recorded run.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRates:
    """Seconds of a pass over one layer, or over the head, on one accelerator."""

    call_s: float = 0.0
    flop_s: float = 0.0
    element_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, flops: float, elements: float, pairs: float = 0.0) -> float:
        """See the page's formula."""
        work = self.flop_s * flops + self.element_s * elements + self.pair_s * pairs
        return self.call_s + work


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRates:
    """Seconds of a decode step of an instance."""

    step_s: float = 0.0
    """The host's part, and that of sampling."""
    layer_s: float = 0.0
    """A layer's launches."""
    weight_byte_s: float = 0.0
    """Reading weights, a rank's share of them."""
    cached_byte_s: float = 0.0
    """Reading keys and values."""
    flop_s: float = 0.0
    """An operation of a row."""
    logit_s: float = 0.0
    """An element of a row's logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Costs of one accelerator; links are the cluster's."""

    source: str
    """`roofline`, `calibrated` or `recorded`, and of what."""
    forward: PassRates
    backward: PassRates
    """A whole backward pass. Its operations are those of forward, so that F and P are the same."""
    head_forward: PassRates
    head_backward: PassRates
    """Elements are logits."""
    row_s: float = 0.0
    """A micro-batch on a chunk, whatever is in it."""
    update_s: float = 0.0
    """An update, whatever is in it."""
    optimizer_element_s: float = 0.0
    """Of a trained element of a rank."""
    decode: DecodeRates
    prefill: PassRates = field(default_factory=PassRates)
    call_s: float = 0.0
    """A call of an instance."""
    round_trip_s: float = 0.0
    itemsize: int = 2
    """Bytes of an element in the compute format."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` takes back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LayerCosts":
        """Raises ValueError on a name that is unknown, and on a number below 0."""
        raise NotImplementedError
