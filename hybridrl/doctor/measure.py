"""Measurements of `hybridrl doctor`: file systems, and the links between ranks."""

import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, ConfigError, JailKind
from hybridrl.costs.links import LinkTable
from hybridrl.sandbox import jail
from hybridrl.system.node_info import NodeInfo, node_name, read_node_info
from hybridrl.system.owned_folder import temporary_folder
from hybridrl.system.rendezvous import join_group, open_store

_DISK_BYTES = 32 * 2**20
_NUM_FILES = 50
# Up to the size of a bucket of the weight switch (rollout.layout.bucket_mb), on GPUs beyond.
_CPU_SIZES, _GPU_SIZES = (8, 2**16, 2**20, 2**24), (8, 2**20, 2**24, 2**28)
_CPU_LINK_BYTES, _GPU_LINK_BYTES = 2**22, 2**26
_REPEATS = {8: 50}
_FEW = 4
_MESSAGE_BYTES = 8
_ALL_PAIRS = 16
"""Up to so many ranks every pair is measured: 120 pairs, a few milliseconds each."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory's file system as one node sees it; sizes in bytes, speeds in bytes a second."""

    node: str
    role: str
    """`run.dir`, or `scratch` (temporary files)."""
    path: str
    kind: str
    """`ext4`, `nfs4`, `tmpfs`, ..."""
    total: int
    free: int
    write: float
    """With fsync."""
    read: float
    """From the cache, if the system caches it."""
    replace_s: float
    """To replace a small file for good: write, fsync, rename."""
    files_per_s: float
    """Small files created, read (stat) and removed."""


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer between ranks: `all_reduce` of all of them, or `send` from one to another.

    A `message` is a send of a few bytes.
    """

    kind: str
    ranks: tuple[int, ...]
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second that each rank sends, as nccl-tests' bus bandwidth counts them.

        An all-reduce of n ranks cannot do with less than 2 (n-1) / n of the message from each.
        """
        n = len(self.ranks)
        factor = 2 * (n - 1) / n if self.kind == "all_reduce" else 1
        return factor * self.nbytes / self.seconds


def measure_disk(role: str, folder: Path, node: str) -> Disk:
    """Write, read and remove files below `folder`, which exists, for about a second.

    Raises OSError if it is not writable.
    """
    usage = shutil.disk_usage(folder)
    with temporary_folder(folder, ".doctor") as directory:
        size = min(_DISK_BYTES, usage.free // 4)
        written, read = _throughput(directory / "large", size)
        replaced = _replacing(directory / "small")
        start = time.perf_counter()
        for number in range(_NUM_FILES):
            (directory / str(number)).write_bytes(b"x")
            (directory / str(number)).stat()
        for number in range(_NUM_FILES):
            (directory / str(number)).unlink()
        rate = _NUM_FILES / (time.perf_counter() - start)
    return Disk(
        node, role, str(folder), _file_system(folder), usage.total, usage.free,
        written, read, replaced, rate,
    )  # fmt: skip


def _throughput(file: Path, size: int) -> tuple[float, float]:
    """Bytes a second of writing, with fsync, and of reading."""
    block = os.urandom(2**20)
    count = max(1, size // len(block))
    start = time.perf_counter()
    with file.open("wb", buffering=0) as opened:
        for _ in range(count):
            opened.write(block)
        os.fsync(opened.fileno())
    written = count * len(block) / (time.perf_counter() - start)
    start = time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while opened.read(len(block)):
            pass
    return written, count * len(block) / (time.perf_counter() - start)


def _replacing(file: Path) -> float:
    """Seconds to replace a file for good, the median of five times."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        new = file.with_suffix(".new")
        with new.open("wb") as opened:
            opened.write(b"x" * 4096)
            opened.flush()
            os.fsync(opened.fileno())
        new.replace(file)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _file_system(folder: Path) -> str:
    """The type of the file system that `folder` is on."""
    resolved = folder.resolve()
    mounts = {
        Path(partition.mountpoint): partition.fstype
        for partition in psutil.disk_partitions(all=True)
    }
    return next(
        (mounts[path] for path in (resolved, *resolved.parents) if path in mounts), "unknown"
    )


def find_jail(kind: JailKind) -> tuple[str, str]:
    """What confines a model's programs here under `reward.jail=kind`, and why nothing does."""
    try:
        return str(jail.choose(kind)), ""
    except ConfigError as error:
        return "none", error.allowed


def link_table(links: Sequence[Link], ranks: int) -> LinkTable | None:
    """The table of the sends between all pairs; None where a pair was not measured."""
    rates = [[0.0] * ranks for _ in range(ranks)]
    seconds = [[0.0] * ranks for _ in range(ranks)]
    messages = {link.ranks: link.seconds for link in links if link.kind == "message"}
    sends = [link for link in links if link.kind == "send"]
    for link in sends:
        a, b = link.ranks
        message_s = min(messages[a, b], link.seconds / 2)  # else noise would leave none for bytes
        seconds[a][b] = seconds[b][a] = message_s
        rates[a][b] = rates[b][a] = link.nbytes / (link.seconds - message_s)
    if not sends or len(sends) < ranks * (ranks - 1) // 2:
        return None
    return LinkTable.from_json({"bytes_per_s": rates, "message_s": seconds})


class Probe:
    """One rank of a measurement: it reads its node's facts, joins the others, and measures links.

    Ranks of a run join in the same way (`ActorWorker.listen`, `setup`), over gloo, or NCCL if they
    are on GPUs.
    """

    def __init__(self, rank: int, size: int, cluster: ClusterConfig) -> None:
        self.rank, self.size, self.cluster = rank, size, cluster
        self._store: Any = None
        self._device = "cpu"
        verl.claim_gpu()

    def look(self) -> tuple[NodeInfo, str, str]:
        """The node; why torch cannot use its GPUs, and which torch was built for."""
        info = read_node_info()
        problem, built_for = gpu_problem() if info.gpus else ("", "")
        return info, problem, built_for

    def jail(self, kind: JailKind) -> tuple[str, str]:
        """What confines a model's programs on this node, and why nothing does."""
        return find_jail(kind)

    def peak(self, dtype: str) -> float:
        """This rank's operations a second in large products of a format, as a run measures them."""
        import torch

        from hybridrl.system.peak_flops import measure_peak

        torch.set_num_threads(self.cluster.threads_per_rank or 1)
        return measure_peak(torch.device(self.cluster.device.value), getattr(torch, dtype))

    def clock(self) -> float:
        """Unix seconds."""
        return time.time()

    def disks(self, run_dir: str) -> list[Disk]:
        """The file systems of the run directory and of temporary files.

        A missing directory is skipped: `sees` reports it.
        """
        places = {"run.dir": Path(run_dir), "scratch": Path(tempfile.gettempdir())}
        return [
            measure_disk(role, path, node_name()) for role, path in places.items() if path.is_dir()
        ]

    def sees(self, file: str) -> bool:
        """Whether this node sees a file that another node has written."""
        return Path(file).is_file()

    def listen(self) -> tuple[str, int]:
        """Open the store of the rendezvous: this node's address in the cluster, and its port."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = open_store(host, 0, listens=True)
        return host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Join the process group."""
        import torch

        torch.set_num_threads(1)
        store = self._store or open_store(host, port, listens=False)
        self._device = join_group(self.rank, self.size, store, host, self.cluster).type

    def measure(self, messages: bool = False, all_pairs: bool = False) -> list[Link]:
        """All-reduces of several sizes, then sends between all pairs of ranks, one after the other.

        Of more than 16 ranks each sends to the next one only, unless `all_pairs`. With `messages`
        also of a few bytes. Every rank returns its own times of all-reduces; only a sender returns
        its time.
        """
        import torch.distributed as dist

        gpu = self._device == "cuda"
        sizes, nbytes = (_GPU_SIZES, _GPU_LINK_BYTES) if gpu else (_CPU_SIZES, _CPU_LINK_BYTES)
        links = [self._all_reduce(size) for size in sizes]
        pairs = [(rank, (rank + 1) % self.size) for rank in range(self.size)]
        if all_pairs or self.size <= _ALL_PAIRS:
            pairs = list(itertools.combinations(range(self.size), 2))
        for a, b in sorted({(min(pair), max(pair)) for pair in pairs}):
            dist.barrier()
            for kind, size in (("send", nbytes), ("message", _MESSAGE_BYTES))[: 1 + messages]:
                if self.rank in (a, b):
                    seconds = self._ping(a, b, size)
                    if self.rank == a:
                        links.append(Link(kind, (a, b), size, seconds))
        dist.barrier()
        dist.destroy_process_group()
        return links

    def _all_reduce(self, nbytes: int) -> Link:
        import torch
        import torch.distributed as dist

        tensor = torch.ones(max(1, nbytes // 4), device=self._device)
        seconds: list[float] = []
        for _ in range(2 + _REPEATS.get(nbytes, _FEW)):
            dist.barrier()
            with self._timed(seconds):
                dist.all_reduce(tensor)
        # The first two make connections and warm up.
        return Link(
            "all_reduce", tuple(range(self.size)), tensor.nbytes, statistics.median(seconds[2:])
        )

    def _ping(self, a: int, b: int, nbytes: int) -> float:
        """Seconds of one way."""
        import torch
        import torch.distributed as dist

        tensor = torch.ones(nbytes // 4, device=self._device)
        seconds: list[float] = []
        for _ in range(2 + _REPEATS.get(nbytes, _FEW)):
            with self._timed(seconds):
                if self.rank == a:
                    dist.send(tensor, b)
                    dist.recv(tensor, b)
                else:
                    dist.recv(tensor, a)
                    dist.send(tensor, a)
        return statistics.median(seconds[2:]) / 2

    @contextmanager
    def _timed(self, seconds: list[float]) -> Iterator[None]:
        import torch

        start = time.perf_counter()
        yield
        if self._device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)


def gpu_problem() -> tuple[str, str]:
    """Why torch cannot use the GPUs here ("" if it can), and which CUDA it is built for."""
    import torch

    built_for = torch.version.cuda or ""
    if not built_for:
        return f"this torch ({torch.__version__}) is built without CUDA", ""
    try:
        torch.cuda.init()
        major, minor = torch.cuda.get_device_capability(0)
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0], built_for
    known = [arch.partition("_")[2] for arch in torch.cuda.get_arch_list() if arch[:3] == "sm_"]
    runs = any(int(n[:-1]) == major and int(n[-1]) <= minor for n in known if n.isdigit())
    if not runs:
        return f"torch has no kernels for compute capability {major}.{minor}", built_for
    return "", built_for
