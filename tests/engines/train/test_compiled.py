"""Compiled decoder layers against the same layers in eager mode."""

import pytest
import torch
import torch.distributed as dist
from surrogate_loss import Surrogate

from hybridrl.config import (
    ActivationMode,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine

SIZES = {"num_hidden_layers": 2}


def updated(path, sequences, compiled, layout, activations, row_tokens):
    """Log-probabilities, gradients by name and the number of graphs of one update."""
    settings = {"optim": OptimConfig(lr=1e-2), "max_tokens_per_micro_batch": row_tokens}
    trainer = TrainerConfig(
        compile=compiled, activations=activations, layout=TrainLayoutConfig(**layout), **settings
    )
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=trainer,
        device=torch.device("cpu"),
    )
    assert engine.describe()["compiled"] is compiled
    torch._dynamo.utils.counters.clear()
    mine, gradients = sequences[dist.get_rank() :: dist.get_world_size()], {}
    scores = engine.log_probs(mine)

    def before_step(*_):
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                if p.grad is not None:
                    gradients[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    engine.update(mine, Surrogate())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return torch.cat(scores), gradients, graphs


def both(*args):
    """What `updated` returns without and with compilation."""
    return [updated(*args[:2], compiled, *args[2:]) for compiled in (False, True)]


@pytest.mark.layouts  # a compiler takes a minute
@pytest.mark.parametrize(
    ("family", "layout", "activations", "row_tokens"),
    [
        ("qwen3", {}, "recompute", 1000),  # one row: nothing is compiled for another size
        pytest.param("qwen3", {}, "recompute", 30, marks=pytest.mark.wide),
        pytest.param("qwen2", {"pp": 2}, "keep", 30, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"fsdp": 2}, "keep", 30, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_those_of_eager_layers(
    ranks, tiny, sequences_of, family, layout, activations, row_tokens
):
    path = tiny(family, False, **SIZES)
    size = layout.get("pp", 1) * layout.get("fsdp", 1)
    args = path, sequences_of(), layout, ActivationMode[activations], row_tokens
    for eager, compiled in ranks(size, both, *args):
        assert (eager[2], compiled[2] > 0) == (0, True)
        torch.testing.assert_close(compiled[0], eager[0], rtol=0, atol=2e-5)
        assert compiled[1].keys() == eager[1].keys()
        for name, wanted in eager[1].items():
            rounding = 1e-5 * (1 + float(wanted.abs().max()))
            torch.testing.assert_close(compiled[1][name], wanted, rtol=0, atol=rounding)
