"""Rendezvous of the ranks of a process group."""

import logging
import os
import socket
from datetime import timedelta
from typing import Any

from hybridrl.config import ClusterConfig, Device
from hybridrl.system.devices import own_device

logger = logging.getLogger(__name__)


def open_store(host: str, port: int, *, listens: bool) -> Any:
    """A key-value store at `port` of `host`, held by the process that `listens`; 0: a free port."""
    import torch.distributed as dist

    store = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=listens, wait_for_workers=False)


def join_group(rank: int, size: int, store: Any, host: str, config: ClusterConfig) -> Any:
    """Join the default process group as `rank`: over gloo, and over NCCL too on GPUs.

    The first rank listens on `host`. Returns this process's torch.device. Raises RuntimeError where
    torch finds no GPU for a rank that `config` wants on one.
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
