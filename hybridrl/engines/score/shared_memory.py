"""Memory that processes of one node share, without a name in any file system.

One process creates it, and the others open it through the creator's `/proc` entry. The kernel frees
it with the last process that maps it, however that process ends: nothing can be left behind. The
size of `/dev/shm`, which is 64 MB in many containers, does not bound it.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path


def node_key() -> tuple[str, int]:
    """Equal for processes that can open each other's memory: one kernel, one space of pids."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip(), Path("/proc/self/ns/pid").stat().st_ino


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """Where other processes of the node find a `SharedMemory`, while its creator keeps it open."""

    pid: int
    descriptor: int
    inode: int
    size: int


class SharedMemory:
    """`size` bytes of this node's memory: `create` it, or `open` another process's.

    States: open -> `close` (its maps stay valid). Example: `SharedMemory.create(10).map()[:2] =
    b"ab"` in one process; in another `SharedMemory.open(address).map(private=True)[:2]`.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self.size = descriptor, size

    @classmethod
    def create(cls, size: int) -> "SharedMemory":
        """Take the memory now. Raises OSError where the node has too little, or is no Linux."""
        if not hasattr(os, "memfd_create"):
            raise OSError("anonymous files need Linux")
        descriptor = os.memfd_create("hybridrl", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor, size)

    @classmethod
    def open(cls, address: MemoryAddress) -> "SharedMemory":
        """Another process's memory. Raises OSError where that cannot be seen from here."""
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if (status.st_ino, status.st_size) != (address.inode, address.size):
            os.close(descriptor)
            raise OSError(f"{path} is another process's file")
        return cls(descriptor, address.size)

    @property
    def address(self) -> MemoryAddress:
        """What `open` takes."""
        status = os.fstat(self._descriptor)
        return MemoryAddress(os.getpid(), self._descriptor, status.st_ino, self.size)

    def map(self, private: bool = False) -> mmap.mmap:
        """The memory in this process. What is written to a `private` map stays in this process."""
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
        return mmap.mmap(self._descriptor, self.size, access=access)

    def close(self) -> None:
        """Forget the descriptor: afterwards no other process can open it."""
        os.close(self._descriptor)
