"""Ceilings of the device: bytes a second of copies, operations a second of matrix products."""

from collections.abc import Callable
from functools import partial

import torch

from gpu_steps.figures import Figures
from gpu_steps.steps import Settings
from gpu_steps.timing import median_seconds

_COPIES = ("copy_h2d_pinned", "copy_h2d_pageable", "copy_d2h_pinned", "copy_d2h_pageable")
_CPU_BYTES, _GPU_BYTES = 2**26, 2**30
_CPU_WIDTH, _GPU_WIDTH = 128, 8192  # many CPUs have no unit for bfloat16


def bandwidth(settings: Settings, figures: Figures) -> None:
    """Copies between host and device, and within the device."""
    device = torch.device(settings.device)
    size = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES
    here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    rate = 2 * size / median_seconds(lambda: there.copy_(here), device, calls=10)
    figures.add("copy_on_device", rate / 1e9, "GB/s", bytes=size, counts="read and written")
    if device.type == "cpu":
        for name in _COPIES:
            figures.skip(name, "there is no GPU to copy to")
        return
    pageable = torch.ones(size, dtype=torch.uint8)
    sides = {"pinned": pageable.pin_memory(), "pageable": pageable}
    copies: dict[str, Callable[[], object]] = {}
    for name in _COPIES:
        host = sides[name.rpartition("_")[2]]
        to, source = (here, host) if "h2d" in name else (host, here)
        copies[name] = partial(to.copy_, source, non_blocking=True)
    for name, copy in copies.items():
        figures.add(name, size / median_seconds(copy, device) / 1e9, "GB/s", bytes=size)
    fresh = size / median_seconds(here.cpu, device)
    figures.add(
        "copy_d2h_fresh", fresh / 1e9, "GB/s", bytes=size, counts="memory allocated each time"
    )


def flops(settings: Settings, figures: Figures) -> None:
    """Products of square matrices in bfloat16, in float32, and in TF32."""
    device = torch.device(settings.device)
    figures.add("matmul_bfloat16", matmul_rate(device, torch.bfloat16) / 1e12, "TFLOP/s")
    figures.add("matmul_float32", matmul_rate(device, torch.float32) / 1e12, "TFLOP/s")
    if device.type == "cpu":
        figures.skip("matmul_tf32", "TF32 is a format of GPUs")
        return
    torch.set_float32_matmul_precision("high")
    figures.add("matmul_tf32", matmul_rate(device, torch.float32) / 1e12, "TFLOP/s")


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of two large square matrices."""
    width = _GPU_WIDTH if device.type == "cuda" else _CPU_WIDTH
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * width**3 / median_seconds(lambda: torch.mm(a, b, out=out), device, calls=5)
