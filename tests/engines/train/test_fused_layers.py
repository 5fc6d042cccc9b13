"""Updates of fused decoder layers against transformers in float64, under every layout."""

import math
from collections import Counter

import pytest
import torch
from engines.train.test_layouts import EXTRAS, OTHERS, SIZES, check, oracle, step
from surrogate_loss import Surrogate
from triton_interpreter import interpret, needs_triton

from hybridrl.config import (
    ActivationMode,
    FuseLayers,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.kernels import train_layer, train_layer_torch

pytestmark = pytest.mark.long

FURTHER = [pytest.mark.layouts, pytest.mark.wide]
FULL_AND_SLIDING = ["full_attention", "sliding_attention"]
PARTS = ("norm", "norm_grad", "rotate", "act_mul", "act_mul_grad")


@pytest.fixture(scope="module")
def wanted(tiny, sequences_of):
    """The model, its sequences and what one process computes, once a family."""
    cases = {}

    def make(family, **less):
        key = family, str(less)
        if key not in cases:
            path = tiny(family, True, **SIZES | EXTRAS.get(family, OTHERS.get(family, {})) | less)
            cases[key] = path, sequences_of(), oracle(path, sequences_of())
        return cases[key]

    return make


def fused_steps(paths, interpreted, sequences, layout, schedule="one_f_one_b", parallel=False):
    """One update of each model, and how often each part was computed, by implementation."""
    module = train_layer_torch
    if interpreted:
        interpret()
        train_layer.runs_on = lambda device: True
        from hybridrl.kernels import train_layer_triton as module
    calls = Counter()
    for name in PARTS:
        setattr(module, name, _counted(name, getattr(module, name), calls))
    options = layout, schedule, 1, 30, parallel, False, 1, 0, "auto", (), "always"
    return [step(path, sequences, *options) for path in paths], calls


def _counted(name, compute, calls):
    def counted(*args):
        calls[name] += 1
        return compute(*args)

    return counted


def check_all(ranks, models, interpreted, layout, *options):
    paths, sequences = [path for path, _, _ in models], models[0][1]
    args = paths, interpreted, sequences, layout, *options
    results = ranks(math.prod(layout), fused_steps, *args)
    for number, (path, _, want) in enumerate(models):
        check([steps[number] for steps, _ in results], want, path)
    for _, calls in results:
        assert min(calls[name] for name in PARTS) > 0, calls


@needs_triton
@pytest.mark.parametrize(
    ("family", "less"),
    [
        ("qwen3", {}),
        pytest.param("llama", {}, marks=FURTHER),
        pytest.param("gemma3_text", {"layer_types": FULL_AND_SLIDING}, marks=FURTHER),
    ],
    ids=["qwen3", "llama", "gemma3_text"],
)
def test_kernels_in_an_update_on_two_ranks(fresh_ranks, wanted, family, less):
    """By Triton's interpreter, with rows of packed sequences, sharded by FSDP."""
    models = [wanted(family, num_hidden_layers=2, **less)]
    check_all(fresh_ranks, models, True, (1, 1, 2, 1))


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layout", "schedule", "parallel"),
    [
        ((1, 1, 1, 2), "one_f_one_b", False),
        ((1, 1, 1, 2), "one_f_one_b", True),
        ((2, 1, 1, 1), "zero_bubble", False),
        ((2, 1, 1, 1), "interleaved", False),
        ((1, 2, 1, 1), "one_f_one_b", False),
    ],
    ids=str,
)
def test_layouts(fresh_ranks, wanted, layout, schedule, parallel):
    families = ("qwen3", "llama", "gemma3_text", "qwen3_moe", "olmo2")
    if parallel:
        families = families[:4]
    models = [wanted(family) for family in families]
    check_all(fresh_ranks, models, False, layout, schedule, parallel)


def each_mode(path, sequences, fuse):
    """Shards after an update with each choice of activations, and what the engine has fused."""
    results = []
    for mode in (ActivationMode.keep, ActivationMode.selective, ActivationMode.recompute):
        trainer = TrainerConfig(
            activations=mode, fuse_layers=FuseLayers[fuse], optim=OptimConfig(lr=1e-2)
        )
        device = torch.device("cpu")
        engine = TrainEngine(path, model=ModelConfig(), trainer=trainer, device=device)
        engine.update(sequences, Surrogate())
        shards = {name: shard.to_local().clone() for name, shard in engine.named_shards().items()}
        results.append((shards, engine.describe()["fused_modules"]))
    return results


def test_recomputed_layers_are_the_same_bit_for_bit(ranks, wanted):
    """Results that `selective` keeps are changed by no kernel."""
    path, sequences, _ = wanted("llama")
    ((*results,),) = ranks(1, each_mode, path, sequences, "always")
    layers = SIZES["num_hidden_layers"]
    for shards, fused in results:
        assert fused == 4 * layers + 1  # two norms, a rotation, a gate; and the last norm
        assert all(torch.equal(shard, results[0][0][name]) for name, shard in shards.items())


def test_a_cpu_fuses_nothing_unasked(ranks, wanted):
    path, sequences, _ = wanted("llama")
    ((*results,),) = ranks(1, each_mode, path, sequences, "auto")
    assert {fused for _, fused in results} == {0}
