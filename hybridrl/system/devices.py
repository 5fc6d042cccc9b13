"""GPUs of this node, and the one of them that a rank computes on."""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def local_gpus() -> int:
    """GPUs of this node that torch can use; CUDA_VISIBLE_DEVICES may hide some."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def local_index(assigned: Sequence[str], visible: str | None) -> int:
    """The index of a rank's GPU among those that its process sees.

    `assigned` holds the names that Ray has given the rank: of CUDA_VISIBLE_DEVICES, `visible`,
    where Ray started with one (numbers, or UUIDs of GPUs or MIG devices), else numbers. Raises
    RuntimeError for a MIG device that CUDA hides.
    """
    (name,) = assigned
    index = visible.split(",").index(name) if visible else int(name)
    if name.startswith("MIG-") and index:
        raise RuntimeError(
            f"cluster.device=cuda: this rank is on {name}, and CUDA shows a process only the first"
            f" MIG device of CUDA_VISIBLE_DEVICES ({visible}); name one for each node of Ray"
        )
    return index


def own_device() -> Any:
    """The torch.device of this rank: the GPU whose index is in LOCAL_RANK.

    Raises RuntimeError where torch does not find it.
    """
    import torch

    index, count = int(os.environ.get("LOCAL_RANK", "0")), local_gpus()
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise RuntimeError(
            f"cluster.device=cuda: this rank is on GPU {index} of its node, and torch"
            f" {torch.__version__} finds {count} there (CUDA_VISIBLE_DEVICES: {visible})"
        )
    return torch.device("cuda", index)


def prepare_gpu(device: Any, num_threads: int) -> None:
    """Settle this rank on its GPU: its cores, its CPU threads (0: its share)."""
    import torch

    cores = bind_to_gpu(device)
    torch.set_num_threads(num_threads or cores)


def bind_to_gpu(device: Any) -> int:
    """Keep this process on the cores next to its GPU; returns its share of the node's cores.

    A rank on the other socket copies to its GPU at some 0.6 of the speed. Cores that the process
    may not use, by Slurm or a container, are left out. Where none is left it stays as it is.
    """
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    allowed = os.sched_getaffinity(0)
    address = (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    )
    if near := allowed & cores_beside(address):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), near)
    logger.debug("%s (%s) has %d of %d cores next to it", device, address, len(near), len(allowed))
    return max(1, len(allowed) // local_gpus())


def cores_beside(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Cores next to the PCI device at `address` (`0000:3b:00`), none where the system does not say.

    Linux writes them as `0-15,32-47`.
    """
    try:
        text = (devices / f"{address}.0" / "local_cpulist").read_text().strip()
    except OSError:
        return set()
    ranges = [entry.partition("-") for entry in text.split(",") if entry]
    return {core for low, _, high in ranges for core in range(int(low), int(high or low) + 1)}


def compute_deterministically() -> None:
    """Have torch, cuBLAS and NCCL compute the same bits each time, for deterministic=strict.

    Only a GPU needs it. Call it before the first product of matrices and the first process group:
    torch then keeps NCCL from sums in NVLink's switch (NVLS), whose order varies. An operation that
    torch cannot compute so raises RuntimeError. With `warn_only` it would warn instead, and the
    backward passes of torch's attention would add atomically.
    """
    import torch

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
