"""A real actor and critic of pp 2 on two gloo ranks of one thread: together against one by one.

Both are random Qwen3 models of one size; the critic runs the other way. `gain` is the share of the
separate updates' time that is saved, `simulated_gain` that of the plan against 1F1B in turn.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lines import show
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.algorithms.critic import ValueLoss
from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.config import ModelConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.fused_update import FusedUpdate, UpdateInputs
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.pipelines.evaluation import evaluate
from hybridrl.pipelines.problem import PipelinedModel, PipelinePlan, PipelineProblem
from hybridrl.pipelines.search import search
from hybridrl.pipelines.standard import one_f_one_b

RANKS, TOKENS, PROMPT, ROUNDS = 2, 512, 64, 5


def _share(rows: int) -> list[TrainSequence]:
    """This rank's part of so many rows of one sequence each, with the fields of both losses."""
    size = TOKENS - PROMPT
    fields: dict[str, torch.Tensor | float] = {
        "advantages": 1.0,
        "old_log_probs": torch.full((size,), -6.0),
        "returns": torch.ones(size),
        "values": torch.zeros(size),
    }
    own = range(dist.get_rank(), rows, RANKS)
    return [TrainSequence((torch.arange(TOKENS) + i) % 500, size, fields) for i in own]


def _engine(path: str, critic: bool) -> TrainEngine:
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=TOKENS, layout=TrainLayoutConfig(pp=RANKS, fsdp=1)
        ),
        device=torch.device("cpu"),
        gives_values=critic,
        reverse=critic,
    )


class _Planner:
    """Searches, and keeps the gain that it predicts."""

    gain = 0.0

    def __call__(self, problem: PipelineProblem) -> PipelinePlan:
        result = search(problem, budget_s=0.5)
        separate = 0.0
        for model in problem.models:
            own = PipelinedModel(name=model.name, ranks=(0, 1), costs=model.costs)
            alone = PipelineProblem(models=[own], num_ranks=RANKS)
            separate += evaluate(alone, one_f_one_b(own)).seconds
        self.gain = 1 - result.times.seconds / separate
        return result.plan


def _run(rank: int, store: str, path: str, counts: tuple[int, ...], out: str) -> None:
    """One rank: rounds of both ways in turn, whose seconds the first rank writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    engines, planner = [_engine(path, False), _engine(path, True)], _Planner()
    together = FusedUpdate(engines, planner)
    results: list[dict[str, Any]] = []
    for rows in counts:
        losses = (ClippedLoss(), ValueLoss())
        pairs = [
            (engine, UpdateInputs(sequences=_share(rows), loss=loss))
            for engine, loss in zip(engines, losses, strict=True)
        ]
        seconds: dict[str, list[float]] = {"separate": [], "together": []}
        for _ in range(ROUNDS + 1):  # the first one warms up
            for side, times in seconds.items():
                dist.barrier()
                began = time.perf_counter()
                if side == "separate":
                    for engine, inputs in pairs:
                        inputs.train(engine)
                else:
                    together.update(pairs)
                dist.barrier()
                times.append(time.perf_counter() - began)
        medians = {side: statistics.median(times[1:]) for side, times in seconds.items()}
        results.append({"rows": rows, "simulated": planner.gain, **medians})
    if rank == 0:
        torch.save(results, out)
    dist.destroy_process_group()


def compare_engines(counts: tuple[int, ...] = (2, 4, 8)) -> None:
    """A line for each number of micro-batches."""
    shape = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        AutoModelForCausalLM.from_config(shape).save_pretrained(path)
        out = f"{folder}/results.pt"
        spawn(_run, (f"{folder}/store", str(path), counts, out), nprocs=RANKS)
        results = torch.load(out)
    for result in results:
        gain = 1 - result["together"] / result["separate"]
        show(
            {
                "name": f"fused_update_real_{result['rows']}_rows",
                "value": round(result["together"], 3),
                "baseline": round(result["separate"], 3),
                "ratio": round(result["together"] / result["separate"], 4),
                "gain": round(gain, 4),
                "simulated_gain": round(result["simulated"], 4),
                "share_of_simulated": round(gain / result["simulated"], 3),
                "unit": "s",
                "better": "lower",
            }
        )
