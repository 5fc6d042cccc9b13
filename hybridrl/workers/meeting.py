"""Where the ranks of a process group find each other."""

from typing import Any


def meeting_place(host: str, port: int, *, listens: bool) -> Any:
    """A key-value store at `port` of `host`, held by the process that `listens`; 0: a free port."""
    import torch.distributed as dist

    store = dist.TCPStore  # type: ignore[attr-defined]
    return store(host, port, is_master=listens, wait_for_workers=False)
