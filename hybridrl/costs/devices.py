"""Accelerators by their datasheets, and sizes of known models.

Kernels reach a share of a datasheet's figures (`costs.layers`). Only the order of magnitude and the
scaling are claimed: a run's scales correct them (`costs.scales`).
"""

from dataclasses import dataclass

from hybridrl.costs.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator, by its datasheet."""

    flops: float
    """Dense bfloat16 operations per second."""
    memory_bytes_per_s: float
    memory_bytes: float
    network_bytes_per_s: float
    """To other nodes, one accelerator's share."""
    node_bytes_per_s: float
    """To accelerators of the same node, each way."""
    host_bytes_per_s: float
    """To the host's memory, each way."""
    launch_s: float = 6.5e-6
    """The host's part of a kernel, from Python to its launch: an assumption."""
    message_s: float = 5e-6
    """A small message to another accelerator; an all-reduce of eight takes three of them."""
    replays: bool = True
    """Whether it can replay a sequence of kernels."""


ACCELERATORS = {
    # NVIDIA H100 SXM5 datasheet: NVLink 900 GB/s and PCIe 128 GB/s in both directions together;
    # 400 Gb/s a GPU.
    "h100": Accelerator(989e12, 3.35e12, 80e9, 50e9, 450e9, 64e9),
    # An H100 SXM5 with NVLink of 400 GB/s; 400 Gb/s a GPU.
    "h800": Accelerator(989e12, 3.35e12, 80e9, 50e9, 200e9, 64e9),
    # The Hopper of RLHFuse's testbed is not named further; its network is 8 x 200 Gb/s a node.
    "hopper-200g": Accelerator(989e12, 3.35e12, 80e9, 25e9, 450e9, 64e9),
    # NVIDIA A100 SXM4 80 GB datasheet: NVLink 600 GB/s, PCIe 64 GB/s; 200 Gb/s a GPU.
    "a100": Accelerator(312e12, 2.04e12, 80e9, 25e9, 300e9, 32e9),
    # One core with gloo through its memory: round numbers, which a run's scales correct.
    "cpu": Accelerator(
        5e10, 1e10, 16e9, 1e9, 1e9, 1e18, launch_s=2e-5, message_s=2e-4, replays=False
    ),
}


# LLaMA (arXiv 2302.13971, table 2); 8b and 70b are Llama 3 (arXiv 2407.21783, table 3). Qwen2.5:
# arXiv 2412.15115, table 1, and the models' config.json.
MODELS = {
    "7b": ModelShape(32, 4096, 11_008, 32, 32),
    "13b": ModelShape(40, 5120, 13_824, 40, 40),
    "33b": ModelShape(60, 6656, 17_920, 52, 52),
    "65b": ModelShape(80, 8192, 22_016, 64, 64),
    "8b": ModelShape(32, 4096, 14_336, 32, 8, 128_256),
    "70b": ModelShape(80, 8192, 28_672, 64, 8, 128_256),
    "qwen2.5-7b": ModelShape(28, 3584, 18_944, 28, 4, 152_064),
    "qwen2.5-14b": ModelShape(48, 5120, 13_824, 40, 8, 152_064),
    "qwen2.5-32b": ModelShape(64, 5120, 27_648, 40, 8, 152_064),
}


def device_of(name: str) -> str:
    """The sheet nearest to a device by the name that its driver gives, `cpu` for an empty one."""
    if not name:
        return "cpu"
    return "a100" if "A100" in name else "h100"
