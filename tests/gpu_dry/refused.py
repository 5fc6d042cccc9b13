"""What torch refuses on a GPU under `torch.use_deterministic_algorithms(True)`.

The table has the operators of torch's page on that function, by the names of the page. A fake GPU
raises for them in every case, since any run may have `deterministic=strict`. torch's kernels raise
for less than the page says. `COMPUTED` has what they compute, and why its bits are the same.
"""

from collections.abc import Mapping
from typing import Any

import torch

REFUSED: dict[str, tuple[str, ...]] = {
    "torch.nn.AvgPool3d": ("avg_pool3d_backward",),
    "torch.nn.AdaptiveAvgPool2d": ("_adaptive_avg_pool2d_backward",),
    "torch.nn.AdaptiveAvgPool3d": ("_adaptive_avg_pool3d_backward",),
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool2d": ("fractional_max_pool2d_backward",),
    "torch.nn.FractionalMaxPool3d": ("fractional_max_pool3d_backward",),
    "torch.nn.MaxUnpool1d": ("max_unpool2d",),
    "torch.nn.MaxUnpool2d": ("max_unpool2d",),
    "torch.nn.MaxUnpool3d": ("max_unpool3d",),
    "torch.nn.functional.interpolate": (
        "upsample_linear1d_backward",
        "upsample_bilinear2d_backward",
        "upsample_bicubic2d_backward",
        "upsample_trilinear3d_backward",
    ),
    "torch.nn.ReflectionPad1d": ("reflection_pad1d_backward",),
    "torch.nn.ReflectionPad2d": ("reflection_pad2d_backward",),
    "torch.nn.ReflectionPad3d": ("reflection_pad3d_backward",),
    "torch.nn.NLLLoss": ("nll_loss2d_forward",),
    "torch.nn.CTCLoss": ("_ctc_loss_backward",),
    "torch.nn.EmbeddingBag": ("_embedding_bag_dense_backward",),
    "torch.Tensor.put_": ("put_", "put"),
    "torch.histc": ("histc",),
    "torch.bincount": ("bincount",),
    "torch.median": ("median", "nanmedian"),
    "torch.nn.functional.grid_sample": ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "torch.cumsum": ("cumsum", "cumsum_"),
    "torch.Tensor.scatter_reduce": ("scatter_reduce", "scatter_reduce_"),
    "torch.Tensor.resize_": (),  # of quantized tensors
}
"""Operators as they are dispatched, by the function of torch that leads to them."""

COMPUTED = {
    "torch.cumsum": "a fixed order: torch 2.11 and later no longer refuse it (ScanUtils.cuh)",
    "torch.histc": "integers: their sum is the same in any order (SummaryOps.cu)",
    "torch.bincount": "without weights: it counts integers",
    "torch.median": "without indices",
    "torch.Tensor.scatter_reduce": "any reduction but a product",
    "torch.nn.EmbeddingBag": "any mode but max",
}
"""Calls of these functions that torch computes, and why their bits are the same."""

_OPERATORS = {name: of for of, names in REFUSED.items() for name in names}
_MAX_MODE = 2


def refusal(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the function of torch's page whose operator `func` is refused with these arguments."""
    of = _OPERATORS.get(name)
    if of is None or (of in COMPUTED and _is_computed(of, func, args, kwargs)):
        return None
    return of


def _is_computed(of: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call is one that `COMPUTED` describes."""

    def argument(wanted: str) -> Any:
        names = [a.name for a in func._schema.arguments]
        place = names.index(wanted)
        return args[place] if place < len(args) else kwargs.get(wanted)

    if of == "torch.cumsum":
        return True
    if of == "torch.histc":
        return not args[0].dtype.is_floating_point
    if of == "torch.bincount":
        return argument("weights") is None
    if of == "torch.median":
        return func._overloadname == "default"
    if of == "torch.Tensor.scatter_reduce":
        return argument("reduce") != "prod"
    assert of == "torch.nn.EmbeddingBag"
    return argument("mode") != _MAX_MODE


def refused_by_torchs_page() -> set[str]:
    """The functions that the page of this torch lists as refused."""
    page = torch.use_deterministic_algorithms.__doc__ or ""
    _, _, refused = page.partition("operations will throw a")
    refused, end, _ = refused.partition("In addition, several operations fill")
    assert end, "torch's page reads otherwise"
    entries = [line.strip() for line in refused.splitlines() if line.strip().startswith("* :")]
    return {entry.split("`")[1] for entry in entries}
