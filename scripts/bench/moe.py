"""Mixtures of experts: what router replay closes, and what a training step costs.

The gap. Random models generate in bfloat16 by the native engine, and the train engine computes the
same tokens' log-probabilities in float32. Sides are a mixture that trains with the experts of
generation (`trainer.router_replay=rollout`), the same with its own, and a dense model. The dense
one has the mixture's size in a token's eyes: its feed-forward layer is as wide as the experts that
a token takes. In one more side, with replay, the experts of a token have equal weights, so that
their scores do nothing. A round is a model of another seed.

The step. Real gloo processes train the mixture under ep 1, 2 and 4, and that dense model under the
same fsdp; sides take turns. Tokens a second are those of all ranks together. A side's time is that
of the slowest rank.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lines import line, show, take_turns
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.config import ModelConfig, RouterReplay, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence

CPU = torch.device("cpu")
RANKS, EPS = 4, (1, 2, 4)
EXPERTS, PER_TOKEN = 8, 2
SHAPES = {  # hidden size, width of an expert, layers, vocabulary; responses and their tokens
    "10m": (256, 192, 6, 2000, 48, 64),
    "tiny": (32, 16, 2, 60, 8, 8),
}


def write_model(folder: Path, shape: str, mixture: bool, seed: int) -> PreTrainedModel:
    """A Qwen3-MoE, or a Qwen3 of its active width, with weights that make peaked distributions."""
    hidden, width, layers, vocabulary, *_ = SHAPES[shape]
    experts = {
        "num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN, "norm_topk_prob": True,
        "moe_intermediate_size": width,
    }  # fmt: skip
    config = AutoConfig.for_model(
        "qwen3_moe" if mixture else "qwen3",
        hidden_size=hidden, intermediate_size=PER_TOKEN * width, num_hidden_layers=layers,
        vocab_size=vocabulary, num_attention_heads=4, num_key_value_heads=2,
        head_dim=hidden // 4, tie_word_embeddings=False, **(experts if mixture else {}),
    )  # fmt: skip
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def train_engine(folder: Path, replay: RouterReplay, fsdp: int = 1, ep: int = 1) -> TrainEngine:
    """A model in training, in float32."""
    trainer = TrainerConfig(layout=TrainLayoutConfig(fsdp=fsdp, ep=ep), router_replay=replay)
    return TrainEngine(str(folder), model=ModelConfig(), trainer=trainer, device=CPU)


# The gap


def generate(model: PreTrainedModel, shape: str, replay: RouterReplay) -> list[tuple[Any, Output]]:
    """Responses of the native engine in bfloat16, with their prompts."""
    *_, vocabulary, samples, tokens = SHAPES[shape]
    engine = NativeEngine(
        model.config, dtype=torch.bfloat16, device=CPU, max_running=samples, block_size=16,
        kv_cache_tokens=0, max_sequence=2 * tokens, router_replay=replay,
    )  # fmt: skip
    engine.load_weights(model.state_dict().items())
    prompts = torch.randint(0, vocabulary, (samples, tokens)).tolist()
    sampling = SamplingParams(tokens)
    engine.submit([Request(i, ids, sampling, stream_key(0, i)) for i, ids in enumerate(prompts)])
    outputs: list[Output] = []
    while len(outputs) < samples:
        outputs += engine.step()
    return [(prompts[int(str(output.id))], output) for output in outputs]


def gaps(engine: TrainEngine, responses: list[tuple[Any, Output]], replays: bool) -> torch.Tensor:
    """Differences of the two engines' log-probabilities [tokens]."""
    sequences = [
        TrainSequence(
            torch.tensor([*prompt, *output.token_ids]),
            len(output.token_ids),
            routed_experts=torch.from_numpy(output.routed_experts.whole())
            if replays and output.routed_experts is not None
            else None,
        )
        for prompt, output in responses
    ]
    trained = torch.cat(engine.log_probs(sequences))
    sampled = torch.cat([torch.tensor(output.log_probs) for _, output in responses])
    return (trained - sampled).abs()


def other_experts(engine: TrainEngine, responses: list[tuple[Any, Output]]) -> float:
    """The share of tokens that meet another expert in some layer of training."""
    ids = [torch.tensor([*prompt, *output.token_ids]) for prompt, output in responses]
    sequences = [TrainSequence(row, len(row) - 1) for row in ids]
    engine.log_probs(sequences, records_experts=True)
    differ = []
    for sequence, (_, output) in zip(sequences, responses, strict=True):
        assert sequence.routed_experts is not None
        assert output.routed_experts is not None
        generated = torch.from_numpy(output.routed_experts.whole())
        same = sequence.routed_experts.sort(-1).values == generated.sort(-1).values
        differ.append(~same.flatten(1).all(1))
    return float(torch.cat(differ).double().mean())


@contextmanager
def equal_weights() -> Iterator[None]:
    """Let the experts of a token have equal weights, whatever their scores."""
    forward = Qwen3MoeTopKRouter.forward

    def equal(
        router: Qwen3MoeTopKRouter, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, experts = forward(router, hidden)
        return logits, torch.full_like(weights, 1 / PER_TOKEN), experts

    with patch.object(Qwen3MoeTopKRouter, "forward", equal):
        yield


def compare_gaps(shape: str, seeds: int) -> Iterable[dict[str, Any]]:
    """Lines of the gap."""
    sides = ("with", "without", "equal", "dense")
    figures: dict[str, list[torch.Tensor]] = {side: [] for side in sides}
    shares = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as directory:
            mixture, dense = Path(directory) / "mixture", Path(directory) / "dense"
            model = write_model(mixture, shape, True, seed)
            responses = generate(model, shape, RouterReplay.rollout)
            engine = train_engine(mixture, RouterReplay.rollout)
            figures["with"].append(gaps(engine, responses, replays=True))
            figures["without"].append(gaps(engine, responses, replays=False))
            shares.append(other_experts(engine, responses))
            with equal_weights():
                responses = generate(model, shape, RouterReplay.rollout)
                figures["equal"].append(gaps(engine, responses, replays=True))
            model = write_model(dense, shape, False, seed)
            responses = generate(model, shape, RouterReplay.off)
            engine = train_engine(dense, RouterReplay.off)
            figures["dense"].append(gaps(engine, responses, replays=False))
    share = round(sum(shares) / len(shares), 3)
    extra = {"tokens": sum(map(len, figures["with"])), "other_experts_share": share}
    for kind in ("mean", "max"):
        of_side = {
            side: [float(getattr(gap, kind)()) for gap in of_seeds]
            for side, of_seeds in figures.items()
        }
        for other in ("without", "dense"):
            name = f"moe_gap_{kind}_vs_{other}" + ("_replay" if other == "without" else "")
            yield line(name, "nats", "lower", of_side["with"], of_side[other], **extra)
        name = f"moe_gap_{kind}_equal_weights_vs_dense"
        yield line(name, "nats", "lower", of_side["equal"], of_side["dense"], **extra)


# The step


def timed_step(engine: TrainEngine, sequences: list[TrainSequence]) -> float:
    """Seconds of an update on the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    engine.update(sequences, ClippedLoss())
    seconds = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def work(rank: int, folder: Path, shape: str, rounds: int) -> None:
    """One process of the step."""
    torch.set_num_threads(1)
    file = folder / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    *_, vocabulary, samples, tokens = SHAPES[shape]
    random = torch.Generator().manual_seed(rank)
    fields: dict[str, Any] = {"advantages": 1.0, "old_log_probs": torch.full((tokens,), -5.0)}
    sequences = [
        TrainSequence(
            torch.randint(0, vocabulary, (2 * tokens,), generator=random), tokens, dict(fields)
        )
        for _ in range(samples // RANKS)
    ]
    off = RouterReplay.off
    engines = {f"ep{ep}": train_engine(folder / "mixture", off, fsdp=RANKS, ep=ep) for ep in EPS}
    engines["dense"] = train_engine(folder / "dense", off, fsdp=RANKS)
    sides = {name: partial(timed_step, engine, sequences) for name, engine in engines.items()}
    measured = take_turns(sides, rounds)
    if rank == 0:
        count = RANKS * sum(len(sequence.ids) for sequence in sequences)
        speeds = {side: [count / s for s in seconds] for side, seconds in measured.items()}
        torch.save((count, speeds), folder / "speeds")
    dist.barrier()
    dist.destroy_process_group()


def compare_steps(shape: str, rounds: int) -> Iterable[dict[str, Any]]:
    """Lines of the step."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name, mixture in (("mixture", True), ("dense", False)):
            write_model(folder / name, shape, mixture, seed=0)
        spawn(work, (folder, shape, rounds), nprocs=RANKS)
        count, speeds = torch.load(folder / "speeds", weights_only=True)
    extra = {"ranks": RANKS, "tokens": count}
    for ep in EPS:
        side = speeds[f"ep{ep}"]
        name = f"moe_train_tokens_per_s_ep{ep}"
        yield line(f"{name}_vs_dense", "tokens/s", "higher", side, speeds["dense"], **extra)
        if ep > 1:
            yield line(f"{name}_vs_ep1", "tokens/s", "higher", side, speeds["ep1"], **extra)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="10m")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each side")
    parser.add_argument("--seeds", type=int, default=3, help="random models of the gap")
    parser.add_argument("--only", choices=("gap", "step"))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.only != "step":
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as directory:
            file = f"file://{directory}/rendezvous"
            dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)
            for record in compare_gaps(args.shape, args.seeds):
                show(record)
            dist.destroy_process_group()
    if args.only != "gap":
        for record in compare_steps(args.shape, args.rounds):
            show(record)


if __name__ == "__main__":
    main()
