"""Two ranks that work alike until one of them is stuck, for processes of their own."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.system import activity
from hybridrl.system.activity import begin_call, file_of, mark


def update(rank: int, how: str) -> None:
    """Three passes and the sum of their gradients; the second rank does not come to the third."""
    for number in range(3):
        mark("forward", number)
        if rank == 1 and number == 2:
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "held":
                sum(range(10**12))  # in C, with the interpreter
            elif how == "new":
                mark("compile")
            time.sleep(600)
        dist.all_reduce(torch.zeros(1))


def run_rank(rank: int, run_dir: Path, how: str) -> None:
    activity.record_to(file_of(run_dir, rank))
    store = dist.FileStore(str(run_dir / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    begin_call("update")
    update(rank, how)
