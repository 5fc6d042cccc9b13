"""Rendezvous of the ranks of a process group."""

import os
from typing import Any


def open_store(host: str, port: int, *, listens: bool) -> Any:
    """A key-value store at `port` of `host`, held by the process that `listens`; 0: a free port."""
    import torch.distributed as dist

    store = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=listens, wait_for_workers=False)


def join_group(rank: int, size: int, store: Any) -> Any:
    """Join the default process group as `rank`: gloo, and NCCL if there are GPUs.

    Returns this process's torch.device. Under Ray a process sees only its own GPU; without Ray,
    LOCAL_RANK is its index.
    """
    import torch
    import torch.distributed as dist

    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        # Before the first attention. On sm_90 and above torch prefers cuDNN's attention, which
        # plans anew (25 ms and more) for each length of keys: in decoding, at every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return device
