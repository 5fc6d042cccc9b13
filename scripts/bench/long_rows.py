"""Longest trainable sequence at a fixed memory: cp, chunks, recomputed and offloaded activations.

`make bench-long`. Two gloo ranks of one thread, fsdp 2, a random Qwen3 in float32. Memory is the
tensors of a rank, weights and optimizer included. It is counted, so each run gives the same; copies
on the host, which a CPU cannot tell apart, are left out. The baseline keeps all activations of a
sequence on one rank. `update_s` is an update on the longest sequence, `same_s` one on the
baseline's longest: CPU seconds of the busiest rank, the best of three. `same_ratio` is what that
costs against the baseline.
"""

import argparse
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lines import show
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.config import ActivationMode, ModelConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.train import activation_offload
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.activations import PeakMemory

RANKS, PROMPT, STEP, CLOSE = 2, 16, 16, 0.97
SIDES: dict[str, tuple[int, bool, ActivationMode]] = {
    "keep": (1, False, ActivationMode.keep),
    "recompute": (1, False, ActivationMode.recompute),
    "offload": (1, False, ActivationMode.offload),
    "cp2": (2, False, ActivationMode.keep),
    "cp2_offload": (2, False, ActivationMode.offload),
    "chunks": (1, True, ActivationMode.keep),
    "cp2_chunks": (2, True, ActivationMode.keep),
}


class DeviceMemory(PeakMemory):
    """Counts the tensors of a rank without the activations that are on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.on_host = 0

    def _update_peak_stats(self, peak_state: Any) -> None:
        for place, sizes in self._curr_mem_snap.items():
            size = sizes["Total"] - self.on_host
            self._peak_mem[place] = max(self._peak_mem.get(place, 0), size)

    def most(self) -> int:
        """The largest count so far, in bytes."""
        return max(self._peak_mem.values())

    def forget(self, size: int) -> None:
        """A copy of so many bytes has left the host."""
        self.on_host -= size

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count, and tell copies on the host apart."""
        copy_out = activation_offload._Block.copy_out

        def copy(block: activation_offload._Block) -> None:
            with self.unchanged():
                copy_out(block)
                for storage in block.alive():
                    assert storage.host is not None
                    size = storage.host.nbytes
                    self.on_host += size
                    weakref.finalize(storage.host, self.forget, size)

        with patch.object(activation_offload._Block, "copy_out", copy), self:
            yield


def engine_of(path: str, side: str, chunk: int) -> TrainEngine:
    """A new engine."""
    cp, in_chunks, activations = SIDES[side]
    trainer = TrainerConfig(
        max_tokens_per_micro_batch=chunk,
        chunk_tokens=chunk if in_chunks else 0,
        activations=activations,
        layout=TrainLayoutConfig(fsdp=RANKS, cp=cp),
    )
    return TrainEngine(path, model=ModelConfig(), trainer=trainer, device=torch.device("cpu"))


def share(tokens: int) -> list[TrainSequence]:
    """One sequence, on the first rank."""
    ids = torch.arange(tokens) % 500
    fields: dict[str, torch.Tensor | float] = {
        "advantages": 1.0,
        "old_log_probs": torch.full((tokens - PROMPT,), -6.0),
    }
    return [TrainSequence(ids, tokens - PROMPT, fields)] if dist.get_rank() == 0 else []


def peak(path: str, side: str, chunk: int, tokens: int) -> int:
    """Most bytes on a rank in one update."""
    memory = DeviceMemory()
    with memory.counting():
        engine_of(path, side, chunk).update(share(tokens), ClippedLoss())
    most = torch.tensor(memory.most())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def seconds(path: str, side: str, chunk: int, tokens: int) -> float:
    """CPU seconds of the busiest rank in the best of three updates, after one that warms up."""
    engine = engine_of(path, side, chunk)
    of_updates = []
    for _ in range(4):
        start = time.process_time()
        engine.update(share(tokens), ClippedLoss())
        busiest = torch.tensor(time.process_time() - start, dtype=torch.float64)
        dist.all_reduce(busiest, dist.ReduceOp.MAX)
        of_updates.append(float(busiest))
    return min(of_updates[1:])


def longest(bytes_at: Callable[[int], int], limit: int, start: int) -> tuple[int, int]:
    """The most tokens that fit `limit` bytes, within 3 % of it, and what they take.

    Raises ValueError where `start` tokens do not fit.
    """
    fits, fits_bytes = start, bytes_at(start)
    if fits_bytes > limit:
        raise ValueError(f"{limit} bytes: {start} tokens take {fits_bytes}")
    low, low_bytes, too_long, guess = 0, 0, 0, 2 * start
    while True:
        size = bytes_at(guess)
        if size > limit:
            too_long = guess
        else:
            low, low_bytes, fits, fits_bytes = fits, fits_bytes, guess, size
        other, other_bytes = (too_long, size) if size > limit else (low, low_bytes)
        slope = (other_bytes - fits_bytes) / (other - fits)
        guess = (fits + int((limit - fits_bytes) / max(slope, 1e-9))) // STEP * STEP
        if too_long:
            guess = min(guess, (fits + too_long) // 2 // STEP * STEP)
        if guess <= fits or fits_bytes >= CLOSE * limit:
            return fits, fits_bytes
        guess = min(guess, 4 * fits)


def work(rank: int, folder: str, args: argparse.Namespace) -> None:
    """One process."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    baseline: dict[str, float] = {}
    for side in args.sides:
        case = (f"{folder}/model", side, args.chunk)
        limit = round(args.mib * 2**20)
        tokens, size = longest(partial(peak, *case), limit, args.start)
        own = seconds(*case, tokens)
        baseline = baseline or {"tokens": tokens, "seconds": own}
        is_baseline = baseline["tokens"] == tokens
        same = own if is_baseline else seconds(*case, int(baseline["tokens"]))
        if rank == 0:
            show(
                {
                    "name": f"longest_sequence_{side}",
                    "value": tokens,
                    "unit": "tokens",
                    "baseline": baseline["tokens"],
                    "ratio": round(tokens / baseline["tokens"], 2),
                    "better": "higher",
                    "peak_mib": round(size / 2**20, 1),
                    "update_s": round(own, 2),
                    "same_s": round(same, 2),
                    "same_ratio": round(same / baseline["seconds"], 2),
                }
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=64.0, help="of tensors on a rank")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a micro-batch and chunk")
    parser.add_argument("--start", type=int, default=256, help="tokens that surely fit")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        max_position_embeddings=2**20,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(Path(folder) / "model")
        spawn(work, (folder, args), nprocs=RANKS)


if __name__ == "__main__":
    main()
