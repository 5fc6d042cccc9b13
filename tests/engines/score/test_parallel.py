"""Instances of several gloo processes against transformers; nothing crosses instances."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.score.engine import ScoreEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.layout.mesh import Mesh
from hybridrl.models.shard import GenParallel, instance_layout

pytestmark = pytest.mark.layouts

FAMILIES = ["qwen3", "llama", "mistral", "qwen2", "gemma3"]
CPU = torch.device("cpu")
Tiny = Callable[..., str]
Oracle = Callable[..., Any]
Ranks = Callable[..., list[Any]]


def place(pp: int, tp: int, order: tuple[int, ...] = (), instances: int = 1) -> GenParallel:
    mesh = Mesh((("instance", instances), ("pp", pp), ("tp", tp)), order)
    return GenParallel.make(mesh, "cpu")


def engine_of(path: str, parallel: GenParallel, **options: Any) -> ScoreEngine:
    config = AutoConfig.from_pretrained(path)
    options = {"dtype": torch.float32, "device": CPU, **options}
    engine = ScoreEngine(config, parallel, **options)
    engine.load(path)
    return engine


def score_all(
    paths: dict[str, tuple[str, str]],
    sequences: list[TrainSequence],
    pp: int,
    tp: int,
    order: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Log-probabilities and values of every family, in rows of 20 tokens, and bytes of weights."""
    parallel, results = place(pp, tp, order), {}
    for family, (path, classifier) in paths.items():
        actor = engine_of(path, parallel, temperature=0.7, max_tokens_per_micro_batch=20)
        reward = engine_of(classifier, parallel, classifier=True, max_tokens_per_micro_batch=20)
        fused = engine_of(path, parallel, temperature=0.7, fused=True)
        strict = engine_of(path, parallel, temperature=0.7, deterministic=True)
        taken = engine_of(path, parallel, temperature=0.7, max_tokens_per_micro_batch=20)
        for parameter in taken.parameters().values():
            parameter.zero_()
        whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        taken.take_weights((name, x.detach()) for name, x in whole.named_parameters())
        results[family] = {
            "taken": taken.log_probs(sequences),
            "log_probs": actor.log_probs(sequences),
            "fused": fused.log_probs(sequences),
            "values": reward.values_at_end(sequences),
            "strict": strict.log_probs(sequences),
            "alone": [strict.log_probs([sequence])[0] for sequence in sequences],
            "nothing": actor.log_probs([]),
            "bytes": actor.weights_bytes,
        }
    return results


@pytest.mark.parametrize(
    ("pp", "tp", "order", "families"),
    [
        (1, 2, (), ["qwen3"]),
        (2, 1, (), ["gemma3"]),
        (2, 2, (), FAMILIES),
        pytest.param(1, 2, (), FAMILIES, marks=pytest.mark.slow),
        pytest.param(2, 1, (), FAMILIES, marks=pytest.mark.slow),
        # Places that are not in the order of the ranks of their groups.
        pytest.param(2, 2, (3, 1, 2, 0), ["qwen3", "gemma3"], marks=pytest.mark.slow),
        (1, 4, (2, 0, 3, 1), ["llama"]),
    ],
)
def test_equals_transformers(
    tiny: Tiny, sequences: list[TrainSequence], log_probs_oracle: Oracle, values_oracle: Oracle,
    ranks: Ranks, pp: int, tp: int, order: tuple[int, ...], families: list[str],
) -> None:  # fmt: skip
    paths = {family: (tiny(family), tiny(family, classifier=True)) for family in families}
    results = ranks(pp * tp, score_all, paths, sequences, pp, tp, order)
    for family, (path, classifier) in paths.items():
        wanted = log_probs_oracle(path, sequences, 0.7)
        values = values_oracle(classifier, sequences)
        for result in results:
            scores = result[family]
            for name in ("log_probs", "fused"):
                for one, other in zip(scores[name], wanted, strict=True):
                    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
            assert all(map(torch.equal, scores["log_probs"], results[0][family]["log_probs"]))
            assert all(map(torch.equal, scores["taken"], scores["log_probs"]))
            assert scores["values"] == pytest.approx(values, abs=1e-5)
            assert scores["values"] == results[0][family]["values"]
            assert all(map(torch.equal, scores["strict"], scores["alone"]))
            assert scores["nothing"] == []
        layout = instance_layout(AutoConfig.from_pretrained(path), pp, tp)
        held = [
            sum(box.size for name in layout.shapes for box in layout.local(name, i)) * 4
            for i in range(pp * tp)
        ]
        places = order or range(pp * tp)
        assert [results[rank][family]["bytes"] for rank in places] == held


def one_instance_alone(path: str, sequences: list[TrainSequence]) -> Any:
    """The second of two instances scores and ends while the first one does nothing."""
    parallel = place(1, 2, instances=2)
    engine = engine_of(path, parallel)
    second = dist.get_rank() >= 2
    log_probs = engine.log_probs(sequences) if second else None
    store = dist.distributed_c10d._get_default_store()
    if second:
        store.set(f"done{dist.get_rank()}", "1")
    else:
        store.wait(["done2", "done3"])
    return log_probs


def test_no_message_leaves_an_instance(
    tiny: Tiny, sequences: list[TrainSequence], log_probs_oracle: Oracle, ranks: Ranks
) -> None:
    *idle, third, fourth = ranks(4, one_instance_alone, tiny(), sequences)
    assert idle == [None, None]
    wanted = log_probs_oracle(tiny(), sequences, 1.0)
    for log_probs in (third, fourth):
        for one, other in zip(log_probs, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def old_policy(path: str, pp: int, tp: int) -> Any:
    """Generate, and score in the middle of it, when tokens and hidden states may be underway."""
    parallel = place(pp, tp)
    model = AutoModelForCausalLM.from_pretrained(path)
    rollout = NativeEngine(
        model.config, dtype=torch.float32, device=CPU, max_running=8, block_size=4,
        kv_cache_tokens=0, max_sequence=40, parallel=parallel,
    )  # fmt: skip
    layout = instance_layout(model.config, pp, tp)
    whole = model.state_dict()
    for name, own in rollout.parameters().items():
        (box,) = layout.local(name, parallel.instance_rank)
        shard = whole[name][box.slices()]
        own.zero_()[tuple(map(slice, shard.shape))].copy_(shard)
    engine = ScoreEngine(
        model.config, parallel, model=rollout.model, dtype=torch.float32, device=CPU,
        max_tokens_per_micro_batch=30,
    )  # fmt: skip
    requests = [Request(i, [1 + i, 7], SamplingParams(4 + 2 * (i > 1)), i) for i in range(4)]
    rollout.submit(requests)
    outputs: dict[Any, Any] = {}
    scored: dict[int, torch.Tensor] = {}
    while rollout.stats().running or rollout.stats().waiting:
        new = {output.id: output for output in rollout.step()}
        outputs |= new
        rows = [
            TrainSequence(torch.tensor([1 + id, 7, *output.token_ids]), len(output.token_ids))
            for id, output in new.items()
        ]
        # A row too many, so that there are several micro-batches.
        rows += [TrainSequence(torch.arange(1, 30), 5)]
        scored |= dict(zip(new, engine.log_probs(rows), strict=False))
    return {id: (output.log_probs, scored[id].tolist()) for id, output in outputs.items()}


@pytest.mark.parametrize(
    ("pp", "tp"),
    [
        (2, 2),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
    ],
)
def test_old_policy_while_others_decode(tiny: Tiny, ranks: Ranks, pp: int, tp: int) -> None:
    results = ranks(pp * tp, old_policy, tiny("gemma3"), pp, tp)
    for result in results:
        assert sorted(result) == [0, 1, 2, 3]
        for sampled, scored in result.values():
            assert scored == pytest.approx(sampled, abs=1e-5)
