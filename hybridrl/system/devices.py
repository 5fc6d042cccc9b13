"""GPUs of this node, and the one of them that a rank computes on."""

import os
from collections.abc import Sequence
from typing import Any


def local_gpus() -> int:
    """GPUs of this node that torch can use; CUDA_VISIBLE_DEVICES may hide some."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def local_index(assigned: Sequence[str], visible: str | None) -> int:
    """The index of a rank's GPU among those that its process sees.

    `assigned` holds the names that Ray has given the rank: of CUDA_VISIBLE_DEVICES, `visible`,
    where Ray started with one (numbers, or UUIDs of GPUs or MIG devices), else numbers.
    """
    (name,) = assigned
    return visible.split(",").index(name) if visible else int(name)


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
