"""A decode step of two instances as one, against one of them alone, on two real ranks.

The first rank decodes `rows` samples, as the other one idles; then both do together, with tensor
parallelism 2 (`rollout.tail_tp=2`). Weights are random: their size counts, not what they say. A
step moves nothing but sums, whose time alone is measured, too. The bound of the
ratio is a half and those sums over a step alone. Less would take cores that are faster together.
Prints one JSON object per line.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lines import line, show, take_turns
from torch.multiprocessing.spawn import spawn
from transformers import PretrainedConfig, Qwen3Config

from hybridrl.config import DType, RolloutConfig
from hybridrl.engines.rollout.interface import EngineParts, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.wide import WideEngine
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.wide import wide_mesh
from hybridrl.models.parallel import model_parameters
from hybridrl.models.shard import GenParallel

SIZES = {  # hidden, feed-forward, layers, heads, key-value heads, vocabulary
    "1m": (192, 512, 3, 6, 2, 128),
    "30m": (768, 2048, 4, 12, 4, 4096),
    "135m": (576, 1536, 30, 8, 4, 49_152),  # SmolLM2's, with heads that 2 divides
}
PROMPT, CPU = 64, torch.device("cpu")


def config_of(size: str) -> PretrainedConfig:
    """A Qwen3 of that size."""
    hidden, ffn, layers, heads, kv_heads, vocabulary = SIZES[size]
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def engines_of(config: PretrainedConfig, steps: int) -> tuple[NativeEngine, WideEngine]:
    """The rank's own engine, and that of both ranks together."""
    longest = PROMPT + steps + 2
    parts = EngineParts(
        rollout=RolloutConfig(max_running=16, dtype=DType.float32),
        model_path="",
        model_config=config,
        layout=cast(Any, None),
        parallel=GenParallel(),
        device=CPU,
        stops=None,
        max_sequence=longest,
        deterministic=False,
    )
    own = NativeEngine(
        config,
        dtype=torch.float32,
        device=CPU,
        max_running=16,
        block_size=16,
        kv_cache_tokens=0,
        max_sequence=longest,
    )
    own.parts = parts
    for parameter in own.parameters().values():  # uninitialized
        parameter.normal_(std=0.02)
    gen = Mesh((("instance", 2), ("pp", 1), ("tp", 1)))
    parallel = GenParallel.make(wide_mesh(gen, (0, 1)), "cpu")
    by_name = {parameter.name: parameter for parameter in model_parameters(config)}
    return own, WideEngine(own, by_name, parallel)


def step_seconds(engine: NativeEngine, rows: int, steps: int) -> float:
    """Seconds of a decode step of `rows` samples; the first step prefills them."""
    sampling = SamplingParams(steps + 2)
    prompt = list(range(1, PROMPT + 1))
    engine.submit([Request(i, prompt, sampling, stream_key(0, i)) for i in range(rows)])
    engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = (time.perf_counter() - start) / steps
    engine.park(range(rows))
    return seconds


def alone_seconds(engine: NativeEngine, rows: int, steps: int) -> float:
    """`step_seconds` of the first rank; the other one waits for it."""
    return step_seconds(engine, rows, steps) if dist.get_rank() == 0 else 0.0


def wide_seconds(engine: WideEngine, rows: int, steps: int) -> float:
    """`step_seconds` of both ranks together."""
    engine.join()
    seconds = step_seconds(engine, rows, steps)
    engine.leave()
    return seconds


def sums_seconds(config: PretrainedConfig, rows: int, steps: int) -> float:
    """Seconds of the sums of a step, two a layer, alone."""
    x = torch.zeros(rows, config.hidden_size)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        for _ in range(2 * config.num_hidden_layers):
            dist.all_reduce(x)
    return (time.perf_counter() - start) / steps


def of_slower(seconds: Callable[[], float]) -> Callable[[], float]:
    """Seconds of the slower rank, on both."""

    def run() -> float:
        both = torch.tensor(seconds(), dtype=torch.float64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return float(both)

    return run


def measure(rank: int, store: str, options: argparse.Namespace) -> None:
    """All sizes and rows; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for size in options.sizes:
        config, steps = config_of(size), options.steps
        own, wide = engines_of(config, steps)
        for rows in options.rows:
            sides = {
                "alone": of_slower(partial(alone_seconds, own, rows, steps)),
                "wide": of_slower(partial(wide_seconds, wide, rows, steps)),
                "sums": of_slower(partial(sums_seconds, config, rows, steps)),
            }
            times = take_turns(sides, options.rounds)
            if rank == 0:
                # The least of each: what else the machine does makes both ranks wait.
                alone, wide_s, sums = (min(times[name]) for name in ("alone", "wide", "sums"))
                extra = {
                    "least_ms": [round(1e3 * x, 3) for x in (wide_s, alone)],
                    "least_ratio": round(wide_s / alone, 3),
                    "least_sums_ms": round(1e3 * sums, 3),
                    "bound": round((alone / 2 + sums) / alone, 3),
                }
                ms = {name: [1e3 * x for x in values] for name, values in times.items()}
                name = f"wide_tail/{size}/rows{rows}"
                show(line(name, "ms a step", "lower", ms["wide"], ms["alone"], **extra))
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (str(Path(folder) / "store"), options), nprocs=2)


if __name__ == "__main__":
    main()
