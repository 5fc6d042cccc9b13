"""Requests that take their KV cache along, and engines that give their cache back."""

import pickle
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hybridrl.engines.rollout.interface import KV, REST, Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.speculation import make_speculation
from hybridrl.models.shard import GenParallel

Make = Callable[..., NativeEngine]
Finish = Callable[..., dict[object, Output]]
RequestsOf = Callable[..., list[Request]]
Same = Callable[[dict[object, Output], dict[object, Output]], None]


def steps(engine: NativeEngine, num: int) -> dict[object, Output]:
    return {output.id: output for _ in range(num) for output in engine.step()}


def tokens_of(request: Request) -> list[int]:
    return [*request.prompt_ids, *request.response_ids]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefix", [False, True])
def test_nothing_is_computed_again(
    block_size: int, prefix: bool, model: PreTrainedModel, make_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """All lengths modulo the block size occur; the parked cache has what was computed, exactly."""
    requests = requests_of(24, group=4, prefix=prefix)
    wanted = finish(make_engine(model), requests)
    source, target = (make_engine(model, block_size=block_size) for _ in range(2))
    source.submit(requests)
    outputs = steps(source, 5)
    parked = source.park(range(24), with_kv=True)
    assert {request.id for request in parked} == set(range(24)) - outputs.keys()
    assert {len(tokens_of(request)) % 4 for request in parked} == {0, 1, 2, 3}
    assert source.stats().kv_blocks_free == source.stats().kv_blocks_total
    per_token = target.stats().kv_bytes_per_token
    assert per_token == 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    for request in parked:
        assert request.kv is not None
        cached = len(tokens_of(request)) - 1
        assert request.kv.blocks.shape == (2, 2, 2, cached, 16)
        assert request.kv.blocks.is_contiguous()
        assert request.kv.nbytes == per_token * cached
    target.submit(parked)
    outputs |= finish(target)
    stats = target.stats()
    assert (stats.prefill_calls, stats.prefill_tokens, stats.shared_prompt_tokens) == (0, 0, 0)
    assert stats.restored_tokens == sum(len(tokens_of(request)) - 1 for request in parked)
    assert stats.kv_blocks_free == stats.kv_blocks_total
    same(outputs, wanted)


def test_copies_go_on_elsewhere_and_the_copied_go_on_here(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf, same: Same
) -> None:
    requests = requests_of(12, group=4, prefix=True)
    wanted = finish(make_engine(model), requests)
    source, target = make_engine(model, max_running=6), make_engine(model)
    source.submit(requests)
    outputs = steps(source, 5)
    copies = source.copy()
    assert {request.id for request in copies} == set(range(12)) - outputs.keys()
    lengths = {request.id: len(request.response_ids) for request in copies}
    assert {0, 5} <= {*lengths.values()}  # of those that wait, and of those that run
    same(finish(source) | outputs, wanted)
    assert lengths == {request.id: len(request.response_ids) for request in copies}
    target.submit(copies)
    same(finish(target) | outputs, wanted)


@pytest.mark.parametrize("with_kv", [False, True])
@pytest.mark.parametrize("mode", ["plain", "deterministic", "drafts"])
def test_requests_rest_where_they_are_told_to(
    mode: str, with_kv: bool, model: PreTrainedModel, make_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """One that ends there, or before, does not rest."""
    more: dict[str, dict[str, object]] = {
        "plain": {}, "deterministic": {"deterministic": True},
        "drafts": {"speculation": make_speculation(3, GenParallel())},
    }  # fmt: skip
    requests = requests_of(12, group=4, prefix=True)
    wanted = finish(make_engine(model), requests)
    engine = make_engine(model, **more[mode])
    engine.submit([replace(request, rests_at=4) for request in requests])
    outputs, held = dict[object, Output](), []
    while engine.unfinished:
        outputs |= steps(engine, 1)
        held += engine.take_turns()
    rested = {turn.id for turn in held}
    assert {turn.finish for turn in held} == {REST}
    assert rested == {id for id, output in wanted.items() if len(output.token_ids) > 4}
    parked = engine.park(rested, with_kv)
    assert {len(request.response_ids) for request in parked} == {4}
    assert all((request.kv is not None) is with_kv for request in parked)
    same(outputs | finish(engine, [replace(r, rests_at=0) for r in parked]), wanted)


@torch.no_grad()
def test_kept_cache_is_that_of_the_model(
    model: PreTrainedModel, make_engine: Make, requests_of: RequestsOf
) -> None:
    """Keys and values are those that transformers caches, in the order of tokens."""
    engine = make_engine(model)
    engine.submit(requests_of(6, group=3, prefix=True))
    steps(engine, 4)
    for request in engine.park(range(6), with_kv=True):
        assert request.kv is not None
        cache = DynamicCache()
        model(torch.tensor([tokens_of(request)[:-1]]), past_key_values=cache)
        for layer, kept in zip(cache.layers, request.kv.blocks, strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            # Measured: 5e-6, on values of order 10.
            torch.testing.assert_close(kept[0], layer.keys[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(kept[1], layer.values[0], atol=1e-4, rtol=1e-4)


def test_parked_twice_and_while_waiting(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf, same: Same
) -> None:
    requests = requests_of(8, group=4, prefix=True)
    wanted = finish(make_engine(model), requests)
    source, target = make_engine(model, max_running=3), make_engine(model)
    source.submit(requests)
    outputs = steps(source, 2)
    running = {entry.request.id for lane in source._admission.lanes for entry in lane.entries}
    parked = source.park(range(8), with_kv=True)
    assert {request.id for request in parked if request.kv} == running
    # One that waits gives its cache back as it was, or drops it.
    target.submit(parked)
    kept = {request.id: request.kv for request in target.park(range(8), with_kv=True)}
    assert kept == {request.id: request.kv for request in parked}
    target.submit(parked)
    assert all(request.kv is None for request in target.park(range(8)))
    target.submit(parked)
    outputs |= steps(target, 2)
    again = target.park(range(8), with_kv=True)
    assert all(request.kv for request in again)
    assert target.stats().restored_tokens > 0
    source.submit(again)
    prefilled = source.stats().prefill_tokens
    outputs |= finish(source)
    assert source.stats().prefill_tokens == prefilled
    same(outputs, wanted)


def test_preempted_after_it_came_with_its_cache(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf, same: Same
) -> None:
    requests = requests_of(12, group=4, prefix=True)
    wanted = finish(make_engine(model), requests)
    source = make_engine(model)
    source.submit(requests)
    outputs = steps(source, 3)
    longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
    target = make_engine(model, kv_cache_tokens=longest)
    outputs |= finish(target, source.park(range(12), with_kv=True))
    assert target.stats().num_preempted > 0
    assert target.stats().restored_tokens > 0
    same(outputs, wanted)


@torch.no_grad()
def test_stale_cache_is_used_as_it_is(
    make_model: Callable[..., PreTrainedModel], make_engine: Make, finish: Finish
) -> None:
    """After new weights old keys and values stay: transformers continues from them likewise."""
    old, new = make_model("qwen3"), make_model("qwen3")
    for parameter in new.parameters():
        parameter.mul_(1.1)
    request = Request(0, [4, 8, 15, 16, 23], SamplingParams(20), stream_key(0, 0), prefix="p")
    engine = make_engine(old)
    engine.submit([request])
    steps(engine, 6)
    (parked,) = engine.park([0], with_kv=True)
    engine.load_weights(new.state_dict().items())
    output = finish(engine, [parked])[0]
    assert engine.stats().restored_tokens == len(request.prompt_ids) + 5
    cache = DynamicCache()
    kept = len(request.prompt_ids) + 5
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
    old(ids[:, :kept], past_key_values=cache)
    log_p = new(ids[:, kept:], past_key_values=cache).logits[0].log_softmax(-1)
    rest = log_p[:-1].gather(-1, ids[0, kept + 1 :, None])[:, 0]
    assert output.log_probs[6:] == pytest.approx(rest.tolist(), abs=1e-5)
    recomputed = finish(engine, [replace(parked, kv=None)])[0]
    assert recomputed.log_probs[6] != pytest.approx(output.log_probs[6], abs=1e-3)


def test_wrong_caches(model: PreTrainedModel, make_engine: Make) -> None:
    engine = make_engine(model)
    right = torch.zeros(2, 2, 2, 3, 16)
    good = Request(0, [1, 2], SamplingParams(9), 0, response_ids=[3, 4], log_probs=[0.0, 0.0])
    for wrong in (
        right[:1], right[:, :, :1], right[:, :, :, :2], right[..., :8], right.bfloat16(), right[0],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"wanted .* = \[2, 2, 2, 3, 16\] torch.float32"):
            engine.submit([replace(good, id=1), replace(good, kv=KV(wrong))])
        assert engine.stats().waiting == 0
    engine.submit([replace(good, kv=KV(right))])
    assert engine.stats().waiting == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pickles_without_a_copy(dtype: torch.dtype) -> None:
    """Out of band, as an object store takes it; what comes back may be read-only memory."""
    kv = KV(torch.randn(2, 2, 2, 5, 16).to(dtype))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(kv, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 1000
    assert sum(buffer.raw().nbytes for buffer in buffers) == kv.nbytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = pickle.loads(data, buffers=[bytes(buffer) for buffer in buffers])
        shared = pickle.loads(data, buffers=buffers)
    assert other.blocks.dtype == dtype
    assert torch.equal(other.blocks, kv.blocks)
    assert shared.blocks.data_ptr() == kv.blocks.data_ptr()
    assert torch.equal(pickle.loads(pickle.dumps(kv)).blocks, kv.blocks)


def test_the_cache_alone_is_freed(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf, same: Same
) -> None:
    """The memory goes, weights stay; work brings it back."""
    requests = requests_of(8, group=4, prefix=True)
    wanted = finish(make_engine(model), requests)
    engine = make_engine(model)
    same(finish(engine, requests), wanted)
    assert engine._cache is not None
    memory = weakref.ref(engine._cache.blocks)
    engine.submit(requests)
    engine.sleep(keep_weights=True)
    assert memory() is None
    assert not engine.stats().has_cache
    assert engine.stats().waiting == 8
    same(finish(engine), wanted)
    assert engine.stats().has_cache
    engine.sleep(keep_weights=True)
    assert engine.step() == []
    assert not engine.stats().has_cache
    engine.load_weights(model.state_dict().items())
    engine.submit(requests)
    engine.step()
    assert engine.stats().has_cache
    with pytest.raises(AssertionError, match="while requests run"):
        engine.sleep(keep_weights=True)
    engine.park(range(8))
    engine.sleep(keep_weights=True)
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeps"):
        engine.step()
    engine.load_weights(model.state_dict().items())
    same(finish(engine, requests), wanted)


@torch.no_grad()
def test_the_module_scores_with_the_engines_weights(
    model: PreTrainedModel, make_engine: Make, finish: Finish
) -> None:
    engine = make_engine(model)
    request = Request(0, [4, 8, 15], SamplingParams(12), 5)
    output = finish(engine, [request])[0]
    engine.sleep(keep_weights=True)
    own = engine.parameters()
    assert all(p.data_ptr() == own[n].data_ptr() for n, p in engine.model.named_parameters())
    before = engine.model.config._attn_implementation
    engine.model.set_attn_implementation("sdpa")
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
    log_p = engine.model(ids).logits[0, 2:-1].log_softmax(-1)
    engine.model.set_attn_implementation(before)
    drawn = log_p.gather(-1, ids[0, 3:, None])[:, 0]
    assert output.log_probs == pytest.approx(drawn.tolist(), abs=1e-5)
    assert finish(engine, [request])[0].token_ids == output.token_ids


def test_stats_add_up(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf
) -> None:
    """What a model of costs is fitted to."""
    requests = requests_of(9)
    engine = make_engine(model)
    outputs = finish(engine, requests)
    stats = engine.stats()
    longest = max(len(output.token_ids) for output in outputs.values())
    assert stats.decode_steps == longest
    assert stats.decode_tokens == sum(len(output.token_ids) for output in outputs.values())
    assert stats.prefill_tokens == sum(len(request.prompt_ids) - 1 for request in requests)
    assert stats.prefill_calls == 1
    assert (stats.replayed_tokens, stats.restored_tokens, stats.num_preempted) == (0, 0, 0)
