"""The pipeline executor with chunks that sleep: wall time on gloo ranks, beside simulated.

Chunks sleep, so more ranks than cores are no matter. What is left is the executor itself: messages,
autograd, Python.
"""

import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from lines import show
from torch import nn
from torch.multiprocessing.spawn import spawn

from hybridrl.engines.train.pipeline_executor import (
    ChunkForward,
    LocalPipeline,
    PipelineExecutor,
    PipelineGroups,
)
from hybridrl.pipelines.evaluation import evaluate
from hybridrl.pipelines.problem import (
    PassCosts,
    PipelinedModel,
    PipelinePlan,
    PipelineProblem,
    side_by_side,
)
from hybridrl.pipelines.search import search
from hybridrl.pipelines.standard import one_f_one_b

FORWARD_S, ROWS, HIDDEN, ROUNDS = 0.02, 8, (1, 256, 64), 5


class _Sleep(torch.autograd.Function):
    """Its input times a weight, after so many seconds in each direction."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        """`x`, slowly."""
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Its gradient, slowly."""
        time.sleep(ctx.backward_s)
        return gradients[0], gradients[0].sum(), None, None


def problem(ranks: int) -> PipelineProblem:
    """An actor, and a critic of half its stages that runs the other way, twice side by side."""
    costs = PassCosts(forward_s=FORWARD_S, backward_s=2 * FORWARD_S, kept_bytes=1.0)
    actor = PipelinedModel.uniform("actor", ranks=range(ranks), micro_batches=ROWS, costs=costs)
    critics = [
        PipelinedModel.uniform("critic", ranks=own, micro_batches=ROWS // 2, costs=costs)
        for own in side_by_side(range(ranks - 1, -1, -1), 2)
    ]
    return PipelineProblem(models=[actor, *critics], num_ranks=ranks)


def _chunk(costs: PassCosts, last: bool) -> tuple[nn.Module, ChunkForward]:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(()))

    def forward(x: torch.Tensor, number: int) -> torch.Tensor:
        out: torch.Tensor = _Sleep.apply(x, module.weight, costs.forward_s, costs.backward_s)
        return torch.stack([out.mean()]) if last else out

    return module, forward


def _run(rank: int, store: str, wanted: PipelineProblem, plan: PipelinePlan, out: str) -> None:
    """One rank: rounds of the plan, whose wall times the first rank writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=wanted.num_ranks)
    device = torch.device("cpu")
    groups = PipelineGroups(device)
    pipelines = []
    for model in wanted.models:
        last, costs = len(model.ranks) - 1, model.costs[0][0]
        own = {c: _chunk(costs, c == last) for c, r in enumerate(model.ranks) if r == rank}
        pipelines.append(
            LocalPipeline(
                ranks=model.ranks,
                hidden_shapes=[HIDDEN] * len(model.costs),
                dtype=torch.float32,
                ids=[torch.ones(HIDDEN)] * len(model.costs),
                chunks={chunk: forward for chunk, (_, forward) in own.items()},
                modules={chunk: module for chunk, (module, _) in own.items()},
            )
        )
    times = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        dist.barrier()
        began = time.perf_counter()
        PipelineExecutor(plan, pipelines, groups, device, range(dist.get_world_size())).run()
        dist.barrier()
        times.append(time.perf_counter() - began)
    if rank == 0:
        torch.save(times[1:], out)
    dist.destroy_process_group()


def compare_sleeping(ranks: int, budget_s: float) -> None:
    """One number of ranks, as a line: simulated, measured, and the models one after another."""
    wanted = problem(ranks)
    result = search(wanted, budget_s=budget_s)
    serial = 0.0
    for model in wanted.models[:2]:  # the critics run at once
        own = PipelinedModel.uniform(
            model.name,
            ranks=range(len(model.ranks)),
            micro_batches=len(model.costs),
            costs=model.costs[0][0],
        )
        alone = PipelineProblem(models=[own], num_ranks=len(model.ranks))
        serial += evaluate(alone, one_f_one_b(own)).seconds
    with tempfile.TemporaryDirectory() as folder:
        store, out = f"{folder}/store", f"{folder}/times.pt"
        arguments = (store, wanted, result.plan, out)
        spawn(_run, arguments, nprocs=ranks)
        times = sorted(torch.load(out))
    measured = times[len(times) // 2]
    show(
        {
            "name": f"fused_update_sleep_{ranks}_ranks",
            "value": round(measured, 4),
            "baseline": round(result.times.seconds, 4),
            "ratio": round(measured / result.times.seconds, 4),
            "of_serial": round(measured / serial, 4),
            "bound": round(result.bound_s, 4),
            "unit": "s",
            "better": "lower",
        }
    )
