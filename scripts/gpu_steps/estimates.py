"""What an H100 was estimated to measure before one ran, and what would follow from a difference.

They are arithmetic for the model `1.5b`, none was measured. A decode step without a graph has 6 us
of host time for each of 524 kernels, and 1.5 ms besides. A graph of 287 kernels
(`tests/gpu_dry/counts.json`, 28 layers) reads weights, keys and values at 2.7 TB/s, with up to 3 us
between kernels. Weights and moments are 18.5 GB, at the speed of a pinned copy. All else is from
datasheets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CARD = "H100"
MODEL = "1.5b"
NOTE = (
    "Estimates are arithmetic for one H100 of 80 GB with the model 1.5b, made before any was"
    " measured."
)
_TOLERANCE = 1.25
"""An estimate is not better than that."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A range; seconds are better below it, all else is above. `worse` is what would follow."""

    low: float
    high: float
    unit: str
    worse: str

    def off_by(self, measured: float) -> float:
        """How many times `measured` is beyond the nearer end of the range; 1 within it."""
        return measured / min(max(measured, self.low), self.high)

    def follows(self, measured: float) -> str:
        """What follows from the difference; "" where there is none."""
        gain = self.off_by(measured)
        gain = 1 / gain if self.unit == "s" else gain
        if gain < 1 / _TOLERANCE:
            return self.worse
        return "better than estimated: the model of costs is too slow" if gain > _TOLERANCE else ""


_OFFLOAD = "copies are pageable or wait for each other: fewer and pinned ones"
_LAUNCHES = "decoding is bound by kernel launches: fewer kernels a layer"
_GRAPHS = "kernels of a graph are slow or far apart: look at paged attention, then at the draw"
ESTIMATES = {
    ("bandwidth", "copy_h2d_pinned"): Estimate(
        50, 55, "GB/s", "the link is no PCIe 5 x16, so offloading costs more"
    ),
    ("bandwidth", "copy_d2h_pinned"): Estimate(
        50, 55, "GB/s", "the link is no PCIe 5 x16, so offloading costs more"
    ),
    ("bandwidth", "copy_h2d_pageable"): Estimate(
        5, 12, "GB/s", "the host's memory is slow: rank and GPU may be on different sockets"
    ),
    ("bandwidth", "copy_d2h_pageable"): Estimate(
        5, 12, "GB/s", "the host's memory is slow: rank and GPU may be on different sockets"
    ),
    ("flops", "matmul_bfloat16"): Estimate(
        700, 800, "TFLOP/s", "the clock is limited (power, heat): hold all figures against this one"
    ),
    ("decode", "decode_1"): Estimate(500, 700, "tokens/s", _GRAPHS),
    ("decode", "decode_64"): Estimate(27_000, 35_000, "tokens/s", _GRAPHS),
    ("decode", "decode_256"): Estimate(70_000, 85_000, "tokens/s", _GRAPHS),
    ("decode_without_graphs", "eager_decode_1"): Estimate(215, 215, "tokens/s", _LAUNCHES),
    ("decode_without_graphs", "eager_decode_64"): Estimate(12_500, 12_500, "tokens/s", _LAUNCHES),
    ("decode_without_graphs", "eager_decode_256"): Estimate(
        32_000, 32_000, "tokens/s", "the KV cache is read too often: look at the gather of pages"
    ),
    ("switch", "switch_1_to_1x1_s"): Estimate(
        0.005, 0.005, "s", "the host issues too many copies: larger buckets (layout.bucket_mb)"
    ),
    ("switch", "switch_1_to_1x1_enter_generation_s"): Estimate(0.1, 0.5, "s", _OFFLOAD),
    ("train", "train"): Estimate(
        35_000, 35_000, "tokens/s", "look at attention of mixed lengths, then at the trace's gaps"
    ),
    ("train", "mfu_of_measured"): Estimate(
        0.40, 0.40, "", "element-wise kernels take the time: fused norms, rotary, SwiGLU"
    ),
    ("train", "mfu_of_datasheet"): Estimate(
        0.32, 0.32, "", "element-wise kernels take the time: fused norms, rotary, SwiGLU"
    ),
    ("offload", "offload_s"): Estimate(0.33, 0.4, "s", _OFFLOAD),
    ("offload", "onload_s"): Estimate(0.33, 0.4, "s", _OFFLOAD),
}
"""By step and figure."""


def compared(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every estimate beside what the report measured; none where they are of another card.

    `measured`, `off_by` and `follows` are None for what was not measured.
    """
    if not is_comparable(report):
        return []
    return list(_compared(report["steps"]))


def is_comparable(report: dict[str, Any]) -> bool:
    """Return whether the estimates are of this report's GPU and model."""
    names = [gpu["name"] for gpu in report["machine"]["gpus"]]
    is_card = report["device"] == "cuda" and any(CARD in name for name in names)
    return is_card and report["model"] == MODEL


def _compared(steps: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for (step, name), estimate in ESTIMATES.items():
        figures = steps.get(step, {}).get("figures", ())
        values = [x["value"] for x in figures if x["name"] == name and "value" in x]
        measured = values[0] if values else None
        yield {
            "step": step,
            "figure": name,
            "estimate": [estimate.low, estimate.high],
            "unit": estimate.unit,
            "measured": measured,
            "off_by": None if measured is None else round(estimate.off_by(measured), 3),
            "follows": None if measured is None else estimate.follows(measured),
        }
