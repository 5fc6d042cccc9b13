"""What an update says of another engine's log-probabilities, against one process in float64."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybridrl.algorithms.corrections import StepScale
from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.config import ModelConfig, OptimConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.train.engine import TrainEngine

pytestmark = pytest.mark.long

COMPARE = {"rollout_log_probs": "mismatch", "stale_log_probs": "staleness"}
STALE, SUPERVISED = (2, 5), (1,)  # sequences of older weights; one that no engine made


def sampled(sequences):
    """The sequences with what an engine far from the trainer has said."""
    random = torch.Generator().manual_seed(11)
    changed = []
    for number, s in enumerate(sequences):
        name = "stale_log_probs" if number in STALE else "rollout_log_probs"
        other = -3 * torch.rand(s.response_tokens, generator=random)
        fields = {} if number in SUPERVISED else {name: other}
        changed.append(replace(s, fields=s.fields | fields))
    return changed


def one_update(path, sequences, layout, max_tokens):
    """Metrics of a first update that compares and of one that does not; shares dealt over ranks."""
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=max_tokens,
            optim=OptimConfig(lr=1e-2),
            layout=TrainLayoutConfig(**layout),
        ),
        device=torch.device("cpu"),
    )
    # Two of the world's ranks hold nothing where there are more than two.
    mine = sequences[dist.get_rank() :: 2] if dist.get_rank() < 2 else []
    mine = sequences if dist.get_world_size() == 1 else mine
    first = engine.update(mine, ClippedLoss(), compare=COMPARE)
    return first, engine.update(mine, ClippedLoss())


def gaps(path, sequences, padded_log_probs, field):
    """log w of the unmasked tokens of the sequences with `field`."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").double()
    with torch.no_grad():
        scores = padded_log_probs(model, sequences)
    by_sequence = []
    for s, score in zip(sequences, scores, strict=True):
        if field in s.fields:
            keep = slice(None) if s.mask is None else s.mask
            by_sequence.append((score - s.fields[field].double())[keep].tolist())
    return by_sequence


def ess(weights):
    return sum(weights) ** 2 / (len(weights) * sum(x * x for x in weights))


def wanted(path, sequences, padded_log_probs, field):
    """The figures by their definitions."""
    by_sequence = gaps(path, sequences, padded_log_probs, field)
    tokens = [d for response in by_sequence for d in response]
    w = [math.exp(d) for d in tokens]
    products = [math.exp(sum(response)) for response in by_sequence]
    return {
        "mean": sum(map(abs, tokens)) / len(tokens),
        "max": max(map(abs, tokens)),
        "kl": sum(x - 1 - d for x, d in zip(w, tokens, strict=True)) / len(w),
        "ess_token": ess(w),
        "ess_sequence": ess(products),
    }


@pytest.mark.parametrize("max_tokens", [20, pytest.param(8192, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, {}), (2, {}), (2, {"pp": 2}), (2, {"cp": 2}),
        pytest.param(4, {"fsdp": 2, "tp": 2}, marks=[pytest.mark.layouts, pytest.mark.wide]),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_figures_equal_one_process_in_float64(
    ranks, tiny, sequences, padded_log_probs, size, layout, max_tokens
):
    path, sequences = tiny("qwen3"), sampled(sequences)
    max_tokens = 8 if "cp" in layout else max_tokens  # some are longer
    results = ranks(size, one_update, path, sequences, layout, max_tokens)
    first, second = results[0]
    for other in results:
        assert other == results[0], "all ranks report the same"
    expected = {
        f"{prefix}/{name}": value
        for field, prefix in COMPARE.items()
        for name, value in wanted(path, sequences, padded_log_probs, field).items()
    }
    of_all = [d for field in COMPARE for d in gaps(path, sequences, padded_log_probs, field)]
    expected["effective_share"] = ess([math.exp(sum(response)) for response in of_all])
    figures = {name: first[name] for name in expected}
    # Measured: 4e-6, of order 1, for log-probabilities in float32.
    assert figures == pytest.approx(expected, rel=2e-5)
    assert not [name for name in second if "/" in name or name == "effective_share"]


def supervised(path, sequences):
    engine = TrainEngine(
        path, model=ModelConfig(), trainer=TrainerConfig(), device=torch.device("cpu")
    )
    return engine.update(sequences[dist.get_rank() :: 2], ClippedLoss(), compare=COMPARE)


def test_nothing_is_said_where_no_engine_sampled(ranks, tiny, sequences):
    for metrics in ranks(2, supervised, tiny("qwen3"), sequences):
        assert not [name for name in metrics if "/" in name]


def scaled(path, sequences, lr, loss):
    """Metrics of an update at `lr` that compares, and the weights after it and one more."""
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(optim=OptimConfig(lr=lr)),
        device=torch.device("cpu"),
    )
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    metrics = engine.update(mine, loss, compare=COMPARE)
    weights = {name: w.full_tensor().clone() for name, w in engine.named_shards().items()}
    return metrics, weights, engine.update(mine, loss)["lr"]


@pytest.mark.parametrize(
    ("rule", "size"),
    [
        (StepScale.sqrt, 2),
        (StepScale.linear, 1),
        pytest.param(StepScale.sqrt, 1, marks=pytest.mark.slow),
        pytest.param(StepScale.linear, 2, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_as_long_as_its_samples_are_worth(ranks, tiny, sequences, size, rule):
    """VCPO: the learning rate of this step alone, by all its responses, fresh and stale."""
    path, sequences = tiny("qwen3"), sampled(sequences)
    loss = ClippedLoss(step_scale=rule)
    metrics, weights, later = ranks(size, scaled, path, sequences, 1e-2, loss)[0]
    factor = metrics["effective_share"] ** {StepScale.sqrt: 0.5, StepScale.linear: 1.0}[rule]
    assert 0 < factor < 1
    assert metrics["lr_scale"] == pytest.approx(factor)
    assert metrics["lr"] == pytest.approx(factor * 1e-2)
    assert later == 1e-2
    _, plain, _ = ranks(size, scaled, path, sequences, factor * 1e-2, ClippedLoss())[0]
    _, whole, _ = ranks(size, scaled, path, sequences, 1e-2, ClippedLoss())[0]
    for name, weight in weights.items():
        torch.testing.assert_close(weight, plain[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.allclose(weight, whole[name]) for name, weight in weights.items())
