"""Random plans of random models on real ranks, against the same models in one process."""

import random

import pytest
import torch
import torch.distributed as dist
from pipeline_problems import random_problem
from torch import nn

from hybridrl.engines.train.pipeline_executor import (
    LocalPipeline,
    PipelineExecutor,
    PipelineGroups,
)
from hybridrl.pipelines.dispatch import Dispatcher
from hybridrl.pipelines.evaluation import evaluate, lower_bound
from hybridrl.pipelines.operations import Operations
from hybridrl.pipelines.policies import RuleMaker, draw_policy

WIDTH = 3


def make_model(problem, index):
    """The chunks of a model, and its rows: [1, tokens, WIDTH], ragged."""
    torch.manual_seed(index)
    model = problem.models[index]
    chunks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in model.ranks]
    rows = [torch.randn(1, 2 + number % 3, WIDTH) for number in range(len(model.costs))]
    return chunks, rows


def loss_of(out, number):
    return torch.stack([((number + 1) * out.square()).sum()])


def in_one_process(problem, index):
    """The gradients of all chunks, and the losses."""
    chunks, rows = make_model(problem, index)
    losses = []
    for number, row in enumerate(rows):
        losses.append(loss_of(nn.Sequential(*chunks)(row), number))
    if problem.models[index].backward:
        torch.stack(losses).sum().backward()
    gradients = [[p.grad for p in chunk.parameters()] for chunk in chunks]
    return gradients, [loss.item() for loss in losses]


def in_pipelines(problem, plan, groups):
    """Results on this rank: gradients of its chunks by number, losses by micro-batch."""
    rank = dist.get_rank()
    pipelines, modules, losses = [], [], []
    for index, model in enumerate(problem.models):
        chunks, rows = make_model(problem, index)
        own = {c: chunks[c] for c, place in enumerate(model.ranks) if place == rank}
        of_model = {}

        def forward(x, number, chunk, module, model=model, of_model=of_model):
            out = module(x)
            if chunk + 1 == len(model.ranks):
                out = loss_of(out, number)
                of_model[number] = out.item()
            return out

        calls = {
            chunk: lambda x, number, chunk=chunk, module=module, forward=forward: forward(
                x, number, chunk, module
            )
            for chunk, module in own.items()
        }
        pipelines.append(
            LocalPipeline(
                ranks=model.ranks,
                hidden_shapes=[tuple(row.shape) for row in rows],
                dtype=torch.float32,
                ids=rows,
                chunks=calls,
                modules=own,
                trains=bool(model.backward),
            )
        )
        modules.append(own)
        losses.append(of_model)
    PipelineExecutor(
        plan, pipelines, groups, torch.device("cpu"), range(dist.get_world_size())
    ).run()
    gradients = [
        {chunk: [p.grad for p in module.parameters()] for chunk, module in own.items()}
        for own in modules
    ]
    return gradients, losses


def run(cases):
    groups = PipelineGroups(torch.device("cpu"))
    return [in_pipelines(problem, plan, groups) for problem, plan in cases]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.layouts)])
def test_any_plan_gives_the_gradients_of_one_process(ranks, world):
    rng = random.Random(world)
    cases = []
    while len(cases) < 30:
        problem = random_problem(rng, num_ranks=world, most=4)
        operations = Operations.of(problem)
        rules = RuleMaker(problem, operations, lower_bound(problem))
        policy = draw_policy(rng, len(rules.names))
        lists = Dispatcher(operations).run(rules.rule(policy)).lists
        cases.append((problem, operations.plan(lists)))
        evaluate(*cases[-1])
    results = ranks(world, run, cases)
    scoring = 0
    for number, (problem, _) in enumerate(cases):
        for index, model in enumerate(problem.models):
            wanted, wanted_losses = in_one_process(problem, index)
            scoring += not model.backward
            got = {c: g for of_rank in results for c, g in of_rank[number][0][index].items()}
            assert sorted(got) == list(range(len(model.ranks)))
            for chunk, gradients in got.items():
                for gradient, want in zip(gradients, wanted[chunk], strict=True):
                    if want is None:
                        assert gradient is None
                    else:
                        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-5)
            losses = {n: x for of_rank in results for n, x in of_rank[number][1][index].items()}
            assert [losses[n] for n in range(len(model.costs))] == pytest.approx(wanted_losses)
    assert scoring > 5
