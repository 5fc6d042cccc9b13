"""vLLM as the rollout engine: what its parts cost, each against what one would else take.

- `vllm_tokens_per_s_vs_native`: the same samples from the native engine.
- `vllm_tokens_per_s_vs_own_sampler`: the same engine, but vLLM draws the tokens itself, from a
  generator per request, and reports their log-probabilities.
- `vllm_switch_s_vs_reload`: on two ranks, FSDP shards to tensor parallelism, shard by shard,
  against every parameter gathered whole on every rank and handed to vLLM's `reload_weights`.

The first two are measured with `--samples` rows and with 8. Sides take turns in one process. Prints
one JSON object a line.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lines import line, show, take_turns
from rollout import run_engine, tiny
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig

from hybridrl.config import ModelConfig, TrainerConfig
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.vllm.engine import VOCAB_MULTIPLE, VLLMEngine
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout.layerwise import LayerwiseSwitch
from hybridrl.layout.switching import Switch, plan_switch
from hybridrl.models.shard import GenParallel

BLOCK = 32
FEW = 8
"""Rows of a tail, measured beside `--samples` of them."""


class Rank:
    """One rank: the model in training, and in vLLM with `tp` ranks an instance."""

    def __init__(self, path: str, tp: int, args: argparse.Namespace) -> None:
        self.path, self.args = path, args
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
        self.config = AutoConfig.from_pretrained(path)
        self.train = TrainEngine(
            path, model=ModelConfig(), trainer=TrainerConfig(), device=self.device, gen_tp=tp
        )
        self.switch = self.plan(tp, vocab_multiple=VOCAB_MULTIPLE, ascending=True)
        self.vllm = VLLMEngine(path, self.config, self.switch.plan.dst, **self.settings())
        self.moves = LayerwiseSwitch(self.switch.plan, dist.get_rank(), args.dtype, self.device)

    def plan(self, tp: int, **options: Any) -> Switch:
        """From training to instances of `tp` ranks."""
        return plan_switch(self.train.parameters, self.train.dims.axes, 1, tp, **options)

    def settings(self) -> dict[str, Any]:
        """Settings of every engine."""
        args = self.args
        longest = args.prompt + args.new
        return {
            "dtype": args.dtype,
            "device": self.device,
            "max_running": args.samples,
            "block_size": BLOCK,
            "kv_cache_tokens": args.samples * -(-longest // BLOCK) * BLOCK,
            "max_sequence": longest,
        }

    def update(self) -> Any:
        """Shard by shard."""
        return self.moves.switch(self.train.named_shards(), self.vllm.load)

    def reload(self) -> None:
        """Every parameter whole on every rank, through vLLM's own loaders."""
        engine = self.vllm._engine
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._whole()})
        engine.reset_prefix_cache()

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shard in self.train.named_shards().items():
            full = shard.full_tensor() if isinstance(shard, DTensor) else shard
            full = full[tuple(map(slice, self.train.shapes()[name]))].to(self.args.dtype)
            yield name, full
            if name == "model.embed_tokens.weight" and self.config.tie_word_embeddings:
                yield "lm_head.weight", full  # else the CPU backend keeps its old packed head


def own_sampler(rank: Rank, new: int) -> Callable[[list[list[int]]], int]:
    """An engine of vLLM's as it comes, for prompts: seeds, its sampler, its log-probabilities."""
    from vllm import EngineArgs, SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    settings = rank.settings()
    blocks = settings["kv_cache_tokens"] // BLOCK + 1
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=rank.path, skip_tokenizer_init=True, load_format="dummy",
            dtype=str(rank.args.dtype).removeprefix("torch."),
            max_model_len=settings["max_sequence"],
            max_num_seqs=rank.args.samples, distributed_executor_backend="external_launcher",
            block_size=BLOCK, num_gpu_blocks_override=blocks,
            kv_cache_memory_bytes=blocks * BLOCK * rank.vllm.stats().kv_bytes_per_token,
            enforce_eager=rank.device.type == "cpu", async_scheduling=False, disable_log_stats=True,
            generation_config="vllm", logprobs_mode="processed_logprobs",
        )
    )  # fmt: skip
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": rank._whole()})
    calls = iter(range(10**9))

    def run(prompts: list[list[int]]) -> int:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=1.0, seed=i, logprobs=0, max_tokens=new, ignore_eos=True,
                detokenize=False, output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            engine.add_request(str(next(calls)), tokens_input(prompt), params)
        tokens = 0
        while engine.has_unfinished_requests():
            tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
        return tokens

    return run


def rates(rank: Rank) -> None:
    """Tokens/s of the three."""
    args = rank.args
    rank.update()
    native = NativeEngine(rank.config, parallel=GenParallel(), **rank.settings())
    moves = LayerwiseSwitch(rank.plan(1).plan, dist.get_rank(), args.dtype, rank.device)
    moves.switch(rank.train.named_shards(), native.load)
    every = torch.randint(2, rank.config.vocab_size, (args.samples, args.prompt)).tolist()
    sampler = own_sampler(rank, args.new)

    def rate(run: Callable[[], int]) -> Callable[[], float]:
        def measure() -> float:
            begun = time.perf_counter()
            return run() / (time.perf_counter() - begun)

        return measure

    for rows in (args.samples, FEW):
        prompts, lengths = every[:rows], [args.new] * rows
        sides = {
            "vllm": partial(run_engine, rank.vllm, prompts, lengths),
            "native": partial(run_engine, native, prompts, lengths),
            "own_sampler": partial(sampler, prompts),
        }
        measured = take_turns({name: rate(run) for name, run in sides.items()}, args.rounds)
        about = {"samples": rows, "new": args.new, "dtype": str(args.dtype)}
        at = f"_{rows}_rows" if rows == FEW else ""
        for other in ("native", "own_sampler"):
            name = f"vllm_tokens_per_s{at}_vs_{other}"
            show(line(name, "tokens/s", "higher", measured["vllm"], measured[other], **about))


def switches(rank: Rank) -> None:
    """Seconds of an update, and its bytes."""

    def timed(run: Callable[[], Any]) -> Callable[[], float]:
        def measure() -> float:
            dist.barrier()
            begun = time.perf_counter()
            run()
            seconds = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            return seconds.item()

        return measure

    stats = rank.update()
    sides = {"ours": timed(rank.update), "reload": timed(rank.reload)}
    measured = take_turns(sides, rank.args.rounds)
    ranks, size = dist.get_world_size(), rank.train.num_parameters
    if dist.get_rank() == 0:
        show(
            line(
                "vllm_switch_s_vs_reload", "s", "lower", measured["ours"], measured["reload"],
                parameters=size, ranks=ranks, received=stats.bytes_received,
                received_theory=stats.bytes_theory, held=stats.bytes_held,
                scratch=stats.scratch_bytes,
                received_by_reload=4 * size * (ranks - 1) // ranks,  # float32 shards
            )
        )  # fmt: skip


def work(number: int, ranks: int, folder: str, args: argparse.Namespace) -> None:
    """A process."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    torch.set_num_threads(args.threads)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = f"file://{folder}/store{ranks}"
    dist.init_process_group(backend, init_method=store, rank=number, world_size=ranks)
    rank = Rank(f"{folder}/model", ranks, args)
    (rates if ranks == 1 else switches)(rank)
    rank.vllm.close()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="3m", help="1m or 3m: million parameters")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    parser.add_argument("--only", choices=("rates", "switch"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny(args.shape, torch.float32).save_pretrained(f"{folder}/model")
        for ranks, what in ((1, "rates"), (2, "switch")):
            if args.only in (None, what):
                spawn(work, (ranks, folder, args), ranks)


if __name__ == "__main__":
    main()
