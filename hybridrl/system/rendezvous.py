"""Rendezvous of the ranks of a process group."""

import logging
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from hybridrl.config import ClusterConfig, Device
from hybridrl.system.devices import compute_deterministically, own_device

logger = logging.getLogger(__name__)

NCCL_TRACE = "nccl-"
"""How the files of NCCL's last collectives begin, in the logs of a run."""
COLLECTIVES_KEPT = 2000
"""Collectives that NCCL keeps of each rank: a few steps, in under 1 MB."""


def open_store(host: str, port: int, *, listens: bool) -> Any:
    """A key-value store at `port` of `host`, held by the process that `listens`; 0: a free port."""
    import torch.distributed as dist

    store = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=listens, wait_for_workers=False)


def join_group(
    rank: int, size: int, store: Any, host: str, config: ClusterConfig, strict: bool = False
) -> Any:
    """Join the default process group as `rank`: over gloo, and over NCCL too on GPUs.

    The first rank listens on `host`. A GPU computes deterministically from here on if `strict`.
    Returns this process's torch.device. Raises RuntimeError where torch finds no GPU for a rank
    that `config` wants on one.
    """
    import torch
    import torch.distributed as dist

    on_gpu = config.device is Device.cuda
    use_interface(host)
    device = own_device() if on_gpu else torch.device("cpu")
    if on_gpu:
        # A habit of Megatron's users. With several communicators on one queue, collectives of pp
        # can stand behind those of tp that wait for them.
        if os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None):
            logger.warning("CUDA_DEVICE_MAX_CONNECTIONS is set; this rank ignores it")
        torch.cuda.set_device(device)
        # Before the first attention. On sm_90 and above torch prefers cuDNN's attention, which
        # plans anew (25 ms and more) for each length of keys: in decoding, at every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if strict:
            compute_deterministically()
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    logger.debug("rank %d joins the process group of %d ranks, %s", rank, size, backend)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=config.timeout_s),
    )
    logger.debug("the process group of all ranks is up")
    return device


def record_collectives(prefix: Path, rank: int) -> None:
    """Have NCCL keep its last collectives, and write them to `prefix`RANK after a timeout.

    This is torch's flight recorder. It reads these variables when the group of all ranks is made,
    and appends the `rank` in it. Variables that the user has set are kept. `torchfrtrace` reads the
    files of all ranks. One of an earlier run is removed.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}{rank}").unlink(missing_ok=True)
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(COLLECTIVES_KEPT))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(prefix))


def recorded_collectives(logs: Path) -> list[Path]:
    """The files of `record_collectives` in `logs`, those of ranks that saw a timeout."""
    return sorted(logs.glob(f"{NCCL_TRACE}*"))


def address_here(peer: str) -> str:
    """This node's address on the way to the node `peer`."""
    family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # nothing is sent
        probe.connect(address)
        host: str = probe.getsockname()[0]
    return host


def use_interface(host: str) -> None:
    """Make gloo and NCCL use the network interface on the way to `host`.

    gloo would take what this node's name resolves to, which may be 127.0.1.1 or another network.
    Variables that the user has set are kept. Without psutil gloo and NCCL choose for themselves.
    """
    try:
        import psutil
    except ImportError:
        logger.warning("psutil is not installed: gloo and NCCL choose their network interface")
        return
    address = address_here(host)
    for name, addresses in psutil.net_if_addrs().items():
        if address in (entry.address for entry in addresses):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
            logger.debug("%s, on the way to %s, is of interface %s", address, host, name)
