"""Deterministic engines: what a sample is does not depend on what else runs, bit for bit.

Outputs are compared by `==` on lists of Python floats, so every bit of a log-probability counts.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hybridrl.engines.rollout.interface import Output, Request
from hybridrl.engines.rollout.native import NativeEngine

pytestmark = pytest.mark.long

Make = Callable[..., NativeEngine]
Finish = Callable[..., dict[object, Output]]
RequestsOf = Callable[..., list[Request]]


def alone(
    make: Callable[[], NativeEngine], finish: Finish, requests: list[Request]
) -> dict[object, Output]:
    """Each by itself, in an engine of its own."""
    return {r.id: finish(make(), [replace(r, prefix=None)])[r.id] for r in requests}


# Gemma 3 decodes by its own module, the others by the fused one.
@pytest.mark.layouts
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", torch.float32),
        ("mistral", torch.bfloat16),
        ("gemma3", torch.bfloat16),
        pytest.param("qwen3", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("mistral", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma3", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_company_does_not_matter(
    family: str, dtype: torch.dtype, make_model: Callable[[str], PreTrainedModel],
    make_engine: Make, finish: Finish, requests_of: RequestsOf,
) -> None:  # fmt: skip
    """All at once, in another order, few at a time, preempted, alone, prompts shared or not."""
    model = make_model(family).to(dtype)
    requests = requests_of(16, group=4, prefix=True, temperature=0.8)

    def make(**options: int) -> NativeEngine:
        return make_engine(model, dtype=dtype, deterministic=True, **options)

    wanted = finish(make(), requests)
    shuffled = random.Random(1).sample(requests, len(requests))
    assert finish(make(max_running=5), shuffled) == wanted
    assert alone(make, finish, requests) == wanted
    longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
    tight = make(kv_cache_tokens=longest + 16)
    assert finish(tight, requests) == wanted
    assert tight.stats().num_preempted > 0
    assert tight.stats().replayed_tokens > 0


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_parks_and_moves_do_not_matter(
    data: st.DataObject, model: PreTrainedModel, make_engine: Make, finish: Finish,
    requests_of: RequestsOf,
) -> None:  # fmt: skip
    """Parked at any time, with the KV cache or without, resumed here or there, any cache size."""
    requests = requests_of(8, group=4, prefix=True, longest=24)
    wanted = finish(make_engine(model, deterministic=True), requests)
    tokens = data.draw(st.sampled_from([0, 64]))
    engines = [
        make_engine(model, kv_cache_tokens=tokens, max_running=num, deterministic=True)
        for num in (3, 64)
    ]
    outputs: dict[object, Output] = {}
    engines[0].submit(requests)
    for _ in range(4):
        for engine in engines:
            for _ in range(data.draw(st.integers(0, 8))):
                outputs |= {output.id: output for output in engine.step()}
        ids, with_kv = data.draw(st.sets(st.integers(0, 7))), data.draw(st.booleans())
        parked = [request for engine in engines for request in engine.park(ids, with_kv)]
        engines[data.draw(st.integers(0, 1))].submit(parked)
    for engine in engines:
        outputs |= finish(engine)
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total
    assert outputs == wanted


@pytest.mark.parametrize("with_kv", [False, True])
def test_a_response_is_replayed_or_restored(
    with_kv: bool, model: PreTrainedModel, make_engine: Make, finish: Finish,
    requests_of: RequestsOf,
) -> None:  # fmt: skip
    """Without its KV cache a prompt is computed again and the response is fed token by token."""
    requests = requests_of(6)
    wanted = finish(make_engine(model, deterministic=True), requests)
    source, target = (make_engine(model, deterministic=True) for _ in range(2))
    source.submit(requests)
    outputs = {output.id: output for _ in range(7) for output in source.step()}
    parked = source.park(range(6), with_kv)
    fed = sum(len(request.response_ids) for request in parked)
    prompts = sum(len(request.prompt_ids) - 1 for request in parked)
    assert fed > 0
    assert outputs | finish(target, parked) == wanted
    stats = target.stats()
    counted = stats.restored_tokens, stats.prefill_tokens, stats.replayed_tokens
    assert counted == ((fed + prompts, 0, 0) if with_kv else (0, prompts, fed))


def test_the_default_engine_differs_in_the_last_bits(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf
) -> None:
    """The comparison of this file can fail: batches change the order of float sums."""
    requests = requests_of(16, group=4, prefix=True)
    together = finish(make_engine(model), requests)
    separately = alone(lambda: make_engine(model), finish, requests)
    assert {i: o.token_ids for i, o in separately.items()} == {
        i: o.token_ids for i, o in together.items()
    }
    assert separately != together
    # The deterministic engine has the same distribution up to those bits.
    strict = finish(make_engine(model, deterministic=True), requests)
    for id_, output in strict.items():
        assert output.token_ids == together[id_].token_ids
        assert output.log_probs == pytest.approx(together[id_].log_probs, abs=1e-5)
