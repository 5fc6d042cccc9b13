"""What a node affords."""

from types import SimpleNamespace

import pytest

from hybridrl.system import node_info


@pytest.mark.parametrize(
    ("wanted_mb", "memory", "free", "size"),
    [
        (100, 64 * 2**30, 60 * 2**30, 100 * 2**20),
        (0, 100 * 2**30, 90 * 2**30, 30 * 2**30),  # of the memory
        (0, 100 * 2**30, 10 * 2**30, 8 * 2**30),  # of /dev/shm
        (0, 100 * 2**30, 64 * 2**20, 512 * 2**20),  # a container's default: it goes to a file
    ],
)
def test_rays_object_store_takes_what_the_node_affords(
    wanted_mb: int, memory: int, free: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_info, "usable_memory", lambda: memory)
    monkeypatch.setattr(
        node_info.shutil, "disk_usage", lambda path: SimpleNamespace(free=free, total=free)
    )
    assert node_info.object_store_bytes(wanted_mb) == size
