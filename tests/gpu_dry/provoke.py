"""Mistakes that a dry run must find: each is made here, and the error that it raised noted.

Copies between the device and each kind of host memory are made here, too.
"""

from collections.abc import Callable

import torch
from torch.nn.attention import varlen

from gpu_dry.fake_device import FakeDevice
from gpu_dry.world import kernels, mirrors_without_values
from hybridrl.engines.train.pinned import pinned_bytes


def _two_devices() -> None:
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2)


def _two_dtypes() -> None:
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda", dtype=torch.bfloat16)


def _condition() -> None:
    if torch.ones((), device="cuda") > 0:
        pass


def _mask() -> None:
    x = torch.ones(2, device="cuda")
    x[x > 0].sum()


def _numpy() -> None:
    torch.ones(2, device="cuda").numpy()


def _read_in_a_capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(2, device="cuda").sum().item()


def _upload_in_a_capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(2).to("cuda")


def _flash_in_float32() -> None:
    from flash_attn import flash_attn_varlen_func

    x = torch.ones(4, 2, 8, device="cuda")
    starts = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    flash_attn_varlen_func(x, x, x, starts, starts, 4, 4)


def _varlen_in_float32() -> None:
    x = torch.ones(4, 2, 8, device="cuda")
    starts = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    varlen.varlen_attn(x, x, x, starts, starts, 4, 4)


def _varlen_without_grouped_heads() -> None:
    query = torch.ones(4, 2, 8, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, 4], dtype=torch.int32, device="cuda")
    varlen.varlen_attn(query, query[:, :1], query[:, :1], starts, starts, 4, 4)


def _weighted_bincount() -> None:
    ids = torch.ones(4, device="cuda", dtype=torch.int64)
    torch.bincount(ids, ids.float(), minlength=2)


def _histogram() -> None:
    torch.histc(torch.ones(4, device="cuda"), bins=2)


def _median_with_indices() -> None:
    torch.ones(4, device="cuda").median(0)


def _product_by_index() -> None:
    x = torch.ones(4, device="cuda")
    x.scatter_reduce(0, torch.zeros(4, device="cuda", dtype=torch.int64), x, "prod")


def _attention_mask_of_another_dtype() -> None:
    x = torch.ones(1, 2, 4, 8, device="cuda", dtype=torch.bfloat16)
    mask = torch.zeros(4, 4, device="cuda")
    torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)


MISTAKES: dict[str, Callable[[], None]] = {
    "two devices": _two_devices,
    "two dtypes": _two_dtypes,
    "if tensor": _condition,
    "index by a mask": _mask,
    "numpy": _numpy,
    "read in a capture": _read_in_a_capture,
    "upload in a capture": _upload_in_a_capture,
    "flash-attn in float32": _flash_in_float32,
    "varlen_attn in float32": _varlen_in_float32,
    "varlen_attn without grouped heads": _varlen_without_grouped_heads,
    "a mask of another dtype": _attention_mask_of_another_dtype,
    "bincount with weights": _weighted_bincount,
    "a histogram of floats": _histogram,
    "a median with indices": _median_with_indices,
    "a product by index": _product_by_index,
}


def provoke(device: FakeDevice) -> dict[str, str]:
    """The error's class by mistake; empty where none was raised."""
    raised = {}
    with kernels(device, flash=True), device:
        for name, mistake in MISTAKES.items():
            try:
                mistake()
            except Exception as error:
                raised[name] = type(error).__name__
            else:
                raised[name] = ""
    return raised


def copies_of_host_memory(device: FakeDevice) -> dict[str, dict[str, int]]:
    """What copies in and out that are not to be waited for count as, by kind of host memory."""
    cuda = torch.device("cuda", 0)
    counted = {}
    with device, mirrors_without_values(device):
        on_device = torch.ones(4, dtype=torch.uint8, device=cuda)
        ordinary = torch.ones(4, dtype=torch.uint8)
        kinds = {
            "ordinary": ordinary,
            "pin_memory()": ordinary.pin_memory(),
            "pin_memory=True": torch.empty(4, dtype=torch.uint8, pin_memory=True),
            "converted": ordinary.pin_memory().float(),
            "pinned_bytes": pinned_bytes(4, cuda),
            "pinned_bytes of a CPU": pinned_bytes(4, torch.device("cpu")),
            "copied out": on_device.to("cpu", non_blocking=True),
            "read": on_device.cpu(),
        }
        for name, memory in kinds.items():
            with device.phase({}, name) as counts:
                memory[1:].to(cuda, non_blocking=True)
                memory[1:].copy_(on_device[1:], non_blocking=True)
            counted[name] = {
                kind.split(": ")[1]: number
                for kind, number in (counts.syncs + counts.copies).items()
            }
    return counted
