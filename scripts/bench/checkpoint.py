"""What a checkpoint's state costs training: seconds that it stands still, against torch's ways.

Two gloo processes hold a Qwen3 of random parameters under FSDP2, in float32 with AdamW's moments:
`--mb` MB a rank (400). All sides write it to one folder, and take turns:

- `snapshot`: `checkpoint.distributed.StateCopy`, until the copies are there;
- `copy`: these bytes copied into memory that is there, which is the least;
- `save`: `torch.distributed.checkpoint.save`;
- `async_save`: `torch.distributed.checkpoint.async_save`, until the state is staged.

A later line has the seconds from begin to end, with the checksums that a snapshot also writes.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lines import line, show, take_turns
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.checkpoint.distributed import HostCopies, StateCopy, _tensors
from hybridrl.config import ModelConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence

RANKS = 2
WIDTH, VOCAB = 512, 1024


def write_model(folder: str, num_bytes: int) -> None:
    """A model whose parameters and moments are about so many bytes."""
    per_layer = 4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=8,
        num_key_value_heads=8, head_dim=WIDTH // 8, tie_word_embeddings=True,
        num_hidden_layers=max(1, round((num_bytes / 12 - VOCAB * WIDTH) / per_layer)),
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Sides:
    """The ways to write one engine's state, on one rank; `whole` has the seconds to the end."""

    def __init__(self, model: str, folder: Path) -> None:
        self.folder = folder
        self.engine = TrainEngine(
            model,
            model=ModelConfig(),
            trainer=TrainerConfig(layout=TrainLayoutConfig(fsdp=RANKS)),
            device=torch.device("cpu"),
        )
        fields: dict[str, torch.Tensor | float] = {
            "advantages": 1.0,
            "old_log_probs": torch.zeros(8),
        }
        self.engine.update([TrainSequence(torch.arange(16), 8, fields)], ClippedLoss())
        tensors = [tensors[0] for _, tensors in _tensors(self.engine)]
        self.local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        self.room = [torch.empty_like(tensor).fill_(0) for tensor in self.local]
        # The shards' own storage is FSDP2's, which torch's stagers cannot copy on a CPU.
        rank = dist.get_rank()
        self.state = {f"rank {rank}, {i}": tensor for i, tensor in enumerate(self.room)}
        self.copies = HostCopies()
        # The default stager's cache wants a GPU.
        self.stager = BlockingAsyncStager(cache_staged_state_dict=False)
        self.whole: dict[str, list[float]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes on this rank."""
        return sum(tensor.nbytes for tensor in self.local)

    def copy(self) -> float:
        """The plain copy."""

        def begin() -> Callable[[], None]:
            torch._foreach_copy_(self.room, self.local)
            return _nothing

        return self._timed("copy", begin)

    def snapshot(self) -> float:
        """Ours; the write follows on this thread, which takes what it takes."""

        def begin() -> Callable[[], None]:
            snapshot = StateCopy(self.folder / "snapshot", self.engine, {}, self.copies)

            def end() -> None:
                snapshot.write()
                snapshot.finish()

            return end

        return self._timed("snapshot", begin)

    def save(self) -> float:
        """torch's, which waits for the files."""

        def begin() -> Callable[[], None]:
            state_dict_saver.save(self.state, checkpoint_id=self.folder / "save")
            return _nothing

        return self._timed("save", begin)

    def async_save(self) -> float:
        """torch's, which waits for a copy."""

        def begin() -> Callable[[], None]:
            path = self.folder / "async_save"
            begun = state_dict_saver.async_save(
                self.state, checkpoint_id=path, async_stager=self.stager
            )
            written: Any = begun
            if isinstance(begun, AsyncSaveResponse):
                begun.staging_completion.result()
                written = begun.upload_completion
            return lambda: _nothing(written.result())

        return self._timed("async_save", begin)

    def _timed(self, name: str, begin: Callable[[], Callable[[], None]]) -> float:
        """Seconds of `begin` on the slowest rank; the whole includes the end that it gives."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        os.sync()
        dist.barrier()
        start = time.perf_counter()
        end = begin()
        stall = time.perf_counter() - start
        end()
        seconds = torch.tensor([stall, time.perf_counter() - start])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.whole.setdefault(name, []).append(float(seconds[1]))
        return float(seconds[0])


def _nothing(*_: object) -> None:
    """Do nothing."""


def work(rank: int, model: str, folder: str, rounds: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    file = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=RANKS)
    sides = Sides(model, Path(folder))
    ways = {
        "snapshot": sides.snapshot,
        "copy": sides.copy,
        "save": sides.save,
        "async_save": sides.async_save,
    }
    stalls = take_turns(ways, rounds)
    if rank == 0:
        extra: dict[str, Any] = {"mb_a_rank": round(sides.num_bytes / 1e6)}
        for other in ("copy", "save", "async_save"):
            name = f"checkpoint_stall_against_{other}"
            show(line(name, "s", "lower", stalls["snapshot"], stalls[other], **extra))
        for other in ("save", "async_save"):
            whole = sides.whole["snapshot"][1:], sides.whole[other][1:]
            show(line(f"checkpoint_whole_against_{other}", "s", "lower", *whole, **extra))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=400, help="MB of state on each rank")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(f"{folder}/model", args.mb * 10**6 * RANKS)
        spawn(work, (f"{folder}/model", folder, args.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
