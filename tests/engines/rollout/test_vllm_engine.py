"""vLLM in worker processes against transformers and the native engine. Real gloo, real vLLM."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from answered_turns import answer, converse, converse_in_lockstep, converse_on_the_move
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel
from vllm_engines import (
    BLOCK,
    ODD,
    STOPS,
    VOCAB,
    Outputs,
    change,
    come_back,
    finish,
    in_parts,
    load,
    mixed_requests,
    moves_of,
    parked_often,
    plan_of,
    prompt_of,
    same,
    start,
    through_sleep,
    tuned,
    waits,
)

from hybridrl.config import RouterReplay
from hybridrl.engines.rollout.interface import KV, Request, SamplingParams, Stats
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key, uniforms
from hybridrl.engines.rollout.vllm.engine import VLLMEngine
from hybridrl.engines.rollout.vllm.groups import set_environment
from hybridrl.layout.box import Box
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layerwise import by_layer
from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.parameters import fsdp_dim
from hybridrl.layout.weight_switch import Tensors
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.parallel import model_parameters
from hybridrl.models.router_replay import ExpertShape, Routing, enable_replay

pytestmark = pytest.mark.vllm

OF_TRANSFORMERS = ("olmo2", "starcoder2")
"""Families without a model of vLLM's own."""
BY_WIDTH = ("qwen2", "qwen2_moe", *OF_TRANSFORMERS)
"""Families whose heads have no width of their own."""
Ranks = Callable[..., list[Any]]


@pytest.fixture
def saved(make_model: Callable[..., PreTrainedModel], tmp_path: Path) -> Callable[..., str]:
    """Saves a model under odd sizes that vLLM's CPU attention takes; its directory."""

    def save(family: str) -> str:
        changes: dict[str, object] = dict(ODD)
        if family.startswith("qwen"):  # of which vLLM runs no sliding window in some of the layers
            changes |= {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}
        if family in BY_WIDTH:
            changes["hidden_size"] = 128
        model = make_model(family, **changes)
        for buffer in persistent_buffers(model).values():  # a routing bias
            buffer.add_(torch.rand_like(buffer) * 0.5)
        model.save_pretrained(tmp_path / family)
        return str(tmp_path / family)

    return save


def shard(model: PreTrainedModel, axes: TrainAxes, gen_tp: int, gen_ep: int) -> None:
    """FSDP2 as the train engine does it, in one group."""
    parameters = {p.name: p for p in model_parameters(model.config)}
    dims = {
        id(p): fsdp_dim(parameters[name], axes, gen_tp, gen_ep)
        for name, p in model.named_parameters()
    }
    mesh = init_device_mesh("cpu", (axes.fsdp,))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dims[id(p)]))


def prove(engine: VLLMEngine, plain: PreTrainedModel) -> None:
    """Greedy tokens are those of `plain`, and so are the log-probabilities."""
    # The longest prompt has two full blocks, which the prefix cache may have of old weights.
    greedy = SamplingParams(12, temperature=0)
    requests = [Request(i, prompt_of(1 + 25 * i, i), greedy, i) for i in range(4)]
    outputs = finish(engine, requests)
    for request in requests:
        tokens, log_probs = outputs[request.id].token_ids, outputs[request.id].log_probs
        ids = torch.tensor([[*request.prompt_ids, *tokens]])
        logits = plain(ids).logits.detach()
        wanted = logits[0, -len(tokens) - 1 : -1].log_softmax(-1)
        assert tokens == wanted.argmax(-1).tolist()
        # Measured: 4e-6.
        torch.testing.assert_close(torch.tensor(log_probs), wanted.max(-1)[0], atol=1e-4, rtol=0)


def five_updates(
    directory: str, axes: TrainAxes, pp: int, tp: int, in_place: bool = False, ep: int = 1
) -> dict[str, Any]:
    """From FSDP shards; the second update changes the embedding alone. What the switches said.

    At last weights that are there already are written, as adapters are merged into them.

    `in_place` turns the CPU backend's packing off: vLLM then keeps weights as it does on a GPU.
    """
    set_environment([])  # before the first import
    from vllm import _custom_ops
    from vllm.model_executor.models import registry

    rank = dist.get_rank()
    model, plain = load(directory), load(directory)
    switch = plan_of(model, axes, pp, tp, ep)
    layout = switch.plan.dst
    with pytest.MonkeyPatch.context() as patch:
        # Else vLLM is imported once more to look at a class of models.
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        if in_place:
            patch.setattr(_custom_ops, "_supports_onednn", False)
        engine = start(directory, switch, model, whole_experts=ep > 1)
        assert engine._weights.repacks is not in_place
        if axes.fsdp > 1:
            shard(model, axes, tp, ep)
        torch.manual_seed(rank if axes.fsdp > 1 else 0)
        moves = moves_of(switch)
        places = {name: tensor.data_ptr() for name, tensor in held(engine).items()}
        for update in range(5):
            change(model, only="embed_tokens" if update == 1 else "")
            stats = moves.switch(dict(model.named_parameters()), engine.load)
            for name, parameter in model.named_parameters():
                full = parameter.full_tensor() if axes.fsdp > 1 else parameter
                plain.get_parameter(name).data.copy_(full.detach())
            prove(engine, plain)
            assert stats.bytes_received == switch.plan.traffic.received[rank] * 4
            assert stats.bytes_theory == switch.plan.least[rank] * 4
        torch.manual_seed(5)
        change(plain)
        engine.load(partial(fill, plain, layout))
        prove(engine, plain)
    layers = [
        sum(box.size * 4 for name in names for box in layout.local(name, rank))
        for names in by_layer(layout.rules)
    ]
    bytes_held = sum(tensor.nbytes for tensor in held(engine).values())
    if in_place:
        assert stats.bytes_held == 0
        assert places == {name: tensor.data_ptr() for name, tensor in held(engine).items()}
        assert bytes_held == sum(layers)  # the rank's part once, and nothing else
    else:
        assert stats.bytes_held == max(layers)
        linear = {name for name in held(engine) if "_proj" in name and "weight" in name}
        assert linear
        assert all(held(engine)[name].numel() == 0 for name in linear)  # the packed ones alone
    engine.close()
    return {
        "grid": layout.mesh.grid().tolist(),
        "bytes": (stats.bytes_received, stats.bytes_theory),
        "path": stats.path,
    }


def fill(
    model: PreTrainedModel,
    layout: Layout,
    tensors: Tensors,
    names: Sequence[str] | None = None,
) -> None:
    """Writes this rank's part of the weights of `model`; padding stays as it is."""
    for name, tensor in tensors.items():
        held = LocalTensor(layout.local(name, dist.get_rank()))
        whole = model.get_parameter(name).detach()
        for box in held.boxes:
            overlap = box.intersect(Box.whole(tuple(whole.shape)))
            if overlap is not None:
                tensor[held.slices(overlap)].copy_(whole[overlap.slices()])


def held(engine: VLLMEngine) -> dict[str, torch.Tensor]:
    return dict(engine._weights.model.named_parameters())


def all_updates(cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: five_updates(*case) for name, case in cases.items()}


EXPERTS = ("mixtral", "glm4_moe", "qwen2_moe")
"""In a block of another name; with a routing bias, which no switch brings; with shared experts."""


def test_weights_on_one_rank(saved: Callable[..., str], fresh_ranks: Ranks) -> None:
    """Every family, packed and in place, one engine after another in one process."""
    families = ("qwen3", "llama_biased", "mistral", "qwen2", "gemma3", *EXPERTS, *OF_TRANSFORMERS)
    cases = {family: (saved(family), TrainAxes(), 1, 1) for family in families}
    in_place = ("qwen3", "llama_biased")
    cases |= {f"{family} in place": (*cases[family], True) for family in in_place}
    (by_case,) = fresh_ranks(1, all_updates, cases)
    assert all(case["bytes"] == (0, 0) for case in by_case.values())


@pytest.mark.slow
def test_weights_on_four_ranks(saved: Callable[..., str], fresh_ranks: Ranks) -> None:
    """From FSDP shards to instances of tp and pp, with an odd number of layers."""
    four = TrainAxes(fsdp=4)
    cases = {
        "two instances": (saved("qwen3"), four, 1, 2),
        "two ranks a head": (saved("llama_biased"), four, 1, 4, True),
        "tp and pp": (saved("gemma3"), four, 2, 2),
        "of transformers": (saved("starcoder2"), four, 2, 2),
        "heads together": (saved("olmo2"), four, 1, 2),
    }
    for by_case in fresh_ranks(4, all_updates, cases):
        assert by_case["two instances"]["grid"] == [[[0, 2]], [[1, 3]]]  # strided: shards nest,
        received, theory = by_case["two instances"]["bytes"]
        assert 0 < theory <= received < 1.01 * theory  # but for those of the odd vocabulary


def refused() -> list[Request]:
    """Requests that an engine of 160 tokens a sequence and a cache of 128 can never run."""
    prompts = [[], [53], [-1], prompt_of(150), prompt_of(120), prompt_of(10)]
    requests = [Request(i, prompt, SamplingParams(11), i) for i, prompt in enumerate(prompts)]
    requests[-1].response_ids = [1] * 11
    return requests


def errors_of(engine: Any) -> list[str]:
    """What the engine says to `refused`, and to an id that it has."""
    messages = []
    twice = [Request("twice", [1], SamplingParams(1), 0)] * 2
    for requests in (*([request] for request in refused()), twice):
        with pytest.raises(ValueError, match="request") as error:
            engine.submit(requests)
        messages.append(str(error.value))
    return messages


def started(directory: str, pp: int, tp: int, **options: Any) -> tuple[VLLMEngine, Callable]:
    """An engine with the weights of the model, and what updates them."""
    model = load(directory)
    switch = plan_of(model, TrainAxes(replicas=dist.get_world_size()), pp, tp)
    source = {name: parameter.detach() for name, parameter in model.named_parameters()}
    engine = start(directory, switch, model, **options)
    moves = moves_of(switch, options.get("dtype", torch.float32))

    def update() -> None:
        moves.switch(source, engine.load)

    update()
    return engine, update


def streams(directory: str, pp: int, tp: int) -> dict[str, Any]:
    """One instance gets equal requests in many ways."""
    engine, update = started(directory, pp, tp)
    requests = mixed_requests()
    results: dict[str, Any] = {"batch": finish(engine, requests), "stats": engine.stats()}
    results["alone"] = {}
    for request in requests[::4]:
        results["alone"] |= finish(engine, [request])
    results["parked"] = parked_often(engine, requests, 19)
    results["again"] = come_back(engine, requests[-1])
    results["late"] = through_sleep(engine, update, requests)
    results |= conversations_of(engine, update) | in_parts(engine, requests)
    engine.close()
    room = 192 + 64 * dist.get_rank()  # of which the least counts
    engine, _ = started(directory, pp, tp, kv_cache_tokens=room, max_running=5, stops=STOPS)
    results["stopped"], results["short"] = finish(engine, requests), engine.stats()
    results["stopped turns"] = converse(engine, conversations(), VOCAB, waits)
    results["short of turns"] = spent(engine.stats(), results["short"])
    engine.close()
    return results


def conversations() -> list[Request]:
    """Every way of sampling, in turns of at most nine tokens."""
    return [
        replace(request, sampling=replace(request.sampling, max_new_tokens=50, max_turn_tokens=9))
        for request in mixed_requests()
    ]


def spent(after: Stats, before: Stats) -> dict[str, int]:
    """What of the cache's tokens was computed, shared and kept from one reading to the other."""
    names = ("prefill", "shared_prompt", "kept", "recomputed")
    return {n: getattr(after, f"{n}_tokens") - getattr(before, f"{n}_tokens") for n in names}


def conversations_of(engine: VLLMEngine, update: Callable[[], None]) -> dict[str, Any]:
    """Turns that are answered at different times, on the move, and while the cache is gone."""
    engine._forget_prompts()
    before = engine.stats()
    results: dict[str, Any] = {"turns": converse(engine, conversations(), VOCAB, waits)}
    results["spent"] = spent(engine.stats(), before)
    few = conversations()[::4]
    results["moved"], numbers = converse_on_the_move((engine, engine), few, VOCAB, with_kv=False)
    assert min(numbers.values()) > 0
    before = engine.stats()
    results["released"] = converse_in_lockstep(engine, few, VOCAB)
    lost = spent(engine.stats(), before)
    assert lost["kept"] == 0 < lost["recomputed"]
    check_held(engine, update)
    return results


def check_held(engine: VLLMEngine, update: Callable[[], None]) -> None:
    """What is refused while a request is held, or is not."""
    request = conversations()[0]
    engine.submit([request])
    with pytest.raises(ValueError, match="request 0 is in a turn; only a held one"):
        engine.answer(0, [1])
    while not (turns := engine.take_turns()):
        engine.step()
    for refuses in (engine.sleep, update):
        with pytest.raises(AssertionError, match="while requests run or are held"):
            refuses()
    for tokens, error in (([4, VOCAB], "token ids 4 to 53"), ([1] * 50, "must leave room")):
        with pytest.raises(ValueError, match=error):
            engine.answer(0, tokens)
    with pytest.raises(ValueError, match="request 0 is already in the engine"):
        engine.submit([request])
    output = engine.answer(0, None, "length")
    assert output is not None
    assert output.token_ids == turns[0].token_ids
    with pytest.raises(ValueError, match="request 0 is unknown"):
        engine.answer(0, None)


def limits(directory: str) -> dict[str, Any]:
    """What can never run, and what just can."""
    engine, _ = started(directory, 1, 1, kv_cache_tokens=128)
    errors = errors_of(engine)
    fits = finish(engine, [Request(0, prompt_of(100), SamplingParams(28), 0)])
    with pytest.raises(ValueError, match=r"may reach 129 tokens .* can never hold it"):
        engine.submit([Request(0, prompt_of(100), SamplingParams(29), 0)])
    with pytest.raises(ValueError, match="request 0 comes with a KV cache; vLLM takes none"):
        engine.submit([Request(0, [1], SamplingParams(1), 0, kv=KV(torch.empty(1)))])
    with pytest.raises(ValueError, match="vLLM gives no keys and values"):
        engine.park([], with_kv=True)
    with pytest.raises(ValueError, match=r"max_sequence=513: .* max_position_embeddings is 512"):
        started(directory, 1, 1, max_sequence=513)
    engine.close()
    return {"errors": errors, "fits": fits}


def in_half(directory: str) -> Outputs:
    """In bf16."""
    engine, _ = started(directory, 1, 1, dtype=torch.bfloat16)
    outputs = finish(engine, plain_requests())
    engine.close()
    return outputs


def plain_requests() -> list[Request]:
    """Sampled from the whole distribution."""
    return [Request(i, prompt_of(9 + i, i), SamplingParams(40), stream_key(2, i)) for i in range(8)]


def across_an_update(engine: Any, update: Callable[[], None]) -> Outputs:
    """All are parked after twelve steps and go on with other weights."""
    requests = mixed_requests()
    engine.submit(copy.deepcopy(requests))
    outputs = {output.id: output for _ in range(12) for output in engine.step()}
    parked = engine.park(request.id for request in requests)
    update()
    return outputs | finish(engine, parked)


def updated(directory: str) -> Outputs:
    engine, _ = started(directory, 1, 1)
    switch = plan_of(model := tuned(load(directory)), TrainAxes())
    source = {name: parameter.detach() for name, parameter in model.named_parameters()}
    outputs = across_an_update(engine, lambda: moves_of(switch).switch(source, engine.load))
    engine.close()
    return outputs


def on_one_rank(directory: str) -> dict[str, Any]:
    others = {"half": in_half(directory), "updated": updated(directory)}
    return streams(directory, 1, 1) | limits(directory) | others


def elsewhere(directory: str) -> Outputs:
    """Two instances; what one has begun, the other ends."""
    engine, _ = started(directory, 1, 1)
    requests, here = mixed_requests(), dist.get_rank() == 0
    outputs: Outputs = {}
    if here:
        engine.submit(copy.deepcopy(requests))
        outputs = {output.id: output for _ in range(9) for output in engine.step()}
    moved = [engine.park(request.id for request in requests)]
    dist.broadcast_object_list(moved)
    outputs |= finish(engine, moved[0] if not here else [])
    engine.close()
    return outputs


def on_two_ranks(cases: dict[str, tuple[str, int, int]]) -> dict[str, Any]:
    results = {name: streams(*case) for name, case in cases.items()}
    return results | {"elsewhere": elsewhere(cases["tp"][0])}


def check_streams(
    model: PreTrainedModel, make_engine: Callable[..., NativeEngine], results: dict[str, Any]
) -> Outputs:
    """Against the native engine, whose outputs are returned, and the statistics."""
    requests = mixed_requests()
    options = {"max_sequence": 160, "block_size": BLOCK}
    wanted = finish(make_engine(model, **options), requests)
    stopped = finish(make_engine(model, stops=STOPS, **options), requests)
    assert {output.finish for output in wanted.values()} == {"stop", "length"}
    assert any(stopped[i].token_ids != wanted[i].token_ids for i in wanted)
    for name in ("batch", "parked", "late", "parts"):
        assert results[name].keys() == wanted.keys()
        same(model, requests, results[name], wanted)
    same(model, requests[::4], results["alone"], wanted)
    same(model, requests[-1:], results["cut"], wanted)
    same(model, requests[-1:], results["again"], wanted)
    same(model, requests, results["stopped"], stopped)
    assert results["short"].num_preempted > 0
    assert results["short"].kv_blocks_total == 192 // BLOCK

    stats, prompts = results["stats"], sum(len(request.prompt_ids) for request in requests)
    assert stats.decode_tokens == sum(len(o.token_ids) for o in results["batch"].values())
    assert stats.prefill_tokens + stats.shared_prompt_tokens == prompts
    # Full blocks of a prompt, but for its last token, that two other samples find.
    assert stats.shared_prompt_tokens == 2 * sum((n - 1) // BLOCK * BLOCK for n in (64, 100, 110))
    assert stats.num_preempted == 0
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.kv_blocks_free == stats.kv_blocks_total
    check_conversations(model, make_engine, results)
    return wanted


def check_conversations(
    model: PreTrainedModel, make_engine: Callable[..., NativeEngine], results: dict[str, Any]
) -> None:
    """Against the native engine; every full block of a held request is found again."""
    requests = conversations()
    options = {"max_sequence": 160, "block_size": BLOCK}
    wanted = converse(make_engine(model, **options), requests, VOCAB)
    stopped = converse(make_engine(model, stops=STOPS, **options), requests, VOCAB)
    assert any(stopped[i].token_ids != wanted[i].token_ids for i in wanted)
    same(model, requests, results["turns"], wanted)
    same(model, requests, results["stopped turns"], stopped)
    for name in ("moved", "released"):
        same(model, requests[::4], results[name], wanted)

    computed = caches(requests, results["turns"])
    spent, full = results["spent"], sum(n // BLOCK * BLOCK for n in computed)
    assert len(computed) > len(requests)
    assert (spent["kept"], spent["recomputed"]) == (full, sum(computed) - full)
    begun = [
        len(request.prompt_ids) + turn.start
        for request in requests
        for turn in results["turns"][request.id].turns
    ]
    assert spent["prefill"] + spent["shared_prompt"] + spent["kept"] == sum(begun)
    short = results["short of turns"]
    computed = caches(requests, results["stopped turns"])
    assert short["kept"] + short["recomputed"] == sum(computed)
    assert 0 < short["kept"] < sum(n // BLOCK * BLOCK for n in computed)


def caches(requests: list[Request], outputs: Outputs) -> list[int]:
    """Tokens of each held request that continued: all but the last one drawn were computed."""
    return [
        len(request.prompt_ids) + turn.stop - 1
        for request in requests
        for turn in outputs[request.id].turns[:-1]
    ]


@pytest.mark.wide
def test_streams_on_one_rank(
    saved: Callable[..., str], make_engine: Callable[..., NativeEngine], fresh_ranks: Ranks
) -> None:
    directory = saved("qwen3")
    (results,) = fresh_ranks(1, on_one_rank, directory)
    model = load(directory)
    check_streams(model, make_engine, results)
    small = make_engine(model, max_sequence=160, block_size=BLOCK, kv_cache_tokens=128)
    assert results["errors"] == errors_of(small)
    assert len(results["fits"][0].token_ids) == 28

    native = make_engine(model, max_sequence=160, block_size=BLOCK)
    new = tuned(load(directory))
    wanted = across_an_update(native, lambda: native.load_weights(new.state_dict().items()))
    same(new, mixed_requests(), results["updated"], wanted)

    # bf16: both err alike against the same weights in fp32.
    half = make_engine(load(directory, torch.bfloat16), dtype=torch.bfloat16)
    outputs = finish(half, plain_requests())
    plain = load(directory, torch.bfloat16).float()
    ours, theirs = (gaps(plain, those) for those in (results["half"], outputs))
    # Measured: means 0.0061 and 0.0062, the largest 0.045 and 0.041.
    assert 1e-3 < ours.mean() < 1.5 * theirs.mean() < 0.02
    assert ours.max() < 0.1


OWN_WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k, top_p": {"top_k": 9, "top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.8},
    "min_new_tokens": {"min_new_tokens": 20, "stop_token_ids": tuple(range(0, 53, 2))},
    "logit_bias": {"logit_bias": ((4, 5.0), (8, -100.0))},
    "bad_words": {"bad_words": ((7,), (1, 2), (5, 6, 7), *((i, i) for i in range(53)))},
    "all": {
        "min_p": 0.02, "top_k": 30, "top_p": 0.97, "repetition_penalty": 0.8,
        "presence_penalty": -0.7, "frequency_penalty": 0.4, "min_new_tokens": 9,
        "stop_token_ids": (3, 5), "logit_bias": ((3, 4.0), (8, 2.0)), "bad_words": ((7,), (4, 9)),
    },
}  # fmt: skip


def own_requests(temperature: float) -> list[Request]:
    """A request for each way, with a prompt in which tokens occur again."""
    prompt = [*prompt_of(40), 3, 3, 8]
    return [
        Request(name, prompt, SamplingParams(36, temperature=temperature, **way), 100 + i)
        for i, (name, way) in enumerate(OWN_WAYS.items())
    ]


def by_own_sampler(directory: str) -> dict[float, dict[object, list[int]]]:
    """Tokens of vLLM with its own sampler, whose noise alone is replaced: by a stream's uniform."""
    engine, _ = started(directory, 1, 1)
    engine._core.step_fn = engine._core.step
    processors = engine._worker.model_runner.input_batch.logitsprocs.non_argmax_invariant
    (ours,) = (p for p in processors if isinstance(p, engine._sampling.StreamSampler))
    processors.remove(ours)
    from vllm.inputs import tokens_input
    from vllm.v1.sample.ops import topk_topp_sampler

    drawn: list[Any] = []  # the stream, then a token for each

    def draw(logits: torch.Tensor) -> torch.Tensor:
        ends = logits[0].double().softmax(-1).cumsum(-1)
        uniform = uniforms(np.array([drawn[0]], np.uint64), np.array([len(drawn) - 1]))
        drawn.append(None)
        return torch.searchsorted(ends, torch.from_numpy(uniform) * ends[-1], right=True)

    names = {"min_new_tokens": "min_tokens"}
    results: dict[float, dict[object, list[int]]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_topp_sampler, "compiled_random_sample", draw)
        for temperature in (0.0, 0.9):
            results[temperature] = {}
            for request in own_requests(temperature):
                way = dict(OWN_WAYS[str(request.id)])
                words = [list(word) for word in way.pop("bad_words", ())]
                way |= {"logit_bias": dict(way["logit_bias"])} if "logit_bias" in way else {}
                way |= {"stop_token_ids": list(way.get("stop_token_ids", ()))}
                params = engine._sampling.SamplingParams(
                    temperature=temperature, max_tokens=36, detokenize=False, ignore_eos=True,
                    **{names.get(key, key): value for key, value in way.items()},
                )  # fmt: skip
                params._bad_words_token_ids = words or None
                drawn[:] = [request.stream]
                prompt = tokens_input(list(request.prompt_ids))
                engine._engine.add_request(str(request.id), prompt, params)
                while engine._engine.has_unfinished_requests():
                    for output in engine._engine.step():
                        results[temperature][request.id] = list(output.outputs[0].token_ids)
    engine.close()
    return results


def test_tokens_are_those_of_its_own_sampler(
    saved: Callable[..., str], make_engine: Callable[..., NativeEngine], fresh_ranks: Ranks
) -> None:
    """Under each setting, greedy and drawn: vLLM's processing of logits, and the native engine."""
    directory = saved("qwen3")
    (own,) = fresh_ranks(1, by_own_sampler, directory)
    engine = make_engine(load(directory), max_sequence=160, block_size=BLOCK)
    for temperature, tokens in own.items():
        ours = finish(engine, own_requests(temperature))
        assert {name: output.token_ids for name, output in ours.items()} == tokens
        # Each setting shows, but for those that keep the most probable token.
        kept = {"plain", "min_p", "top_k, top_p"} if temperature == 0 else {"plain"}
        assert all((tokens[name] == tokens["plain"]) == (name in kept) for name in tokens)


def gaps(model: PreTrainedModel, outputs: Outputs) -> torch.Tensor:
    """Between log-probabilities of tokens and those of the model, [tokens]."""
    distances = []
    for request in plain_requests():
        output = outputs[request.id]
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].detach()
        wanted = logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
        distances.append((torch.tensor(output.log_probs) - wanted).abs())
    return torch.cat(distances)


def test_streams_on_two_ranks(
    saved: Callable[..., str], make_engine: Callable[..., NativeEngine], fresh_ranks: Ranks
) -> None:
    """As one instance of tp, one of pp, and as two, between which samples move.

    Of Gemma's stages the second has nothing but layers with a window, which must not show.
    """
    cases = {"pp": (saved("gemma3"), 2, 1), "tp": (saved("qwen3"), 1, 2)}
    first, second = fresh_ranks(2, on_two_ranks, cases)
    for name, (directory, pp, _) in cases.items():
        model = load(directory)
        wanted = check_streams(model, make_engine, first[name])
        for stats in ("stats", "short"):
            one, other = first[name].pop(stats), second[name].pop(stats)
            # The first stage holds the keys and values of two layers of three.
            assert one.kv_bytes_per_token == pp * other.kv_bytes_per_token
            assert one == replace(other, kv_bytes_per_token=one.kv_bytes_per_token)
        assert first[name] == second[name]
    assert second["elsewhere"]
    same(model, mixed_requests(), first["elsewhere"] | second["elsewhere"], wanted)


def recorded(directory: str, tp: int, ep: int) -> tuple[dict[object, Any], list[Any]]:
    """Tokens and experts of samples, of which some are parked, and what those had."""
    model = load(directory)
    switch = plan_of(model, TrainAxes(replicas=tp), 1, tp, ep)
    replay = RouterReplay.rollout
    engine = start(directory, switch, model, router_replay=replay, whole_experts=ep > 1)
    moves_of(switch).switch(dict(model.named_parameters()), engine.load)
    requests = [
        Request(i, prompt_of(5 + 20 * (i // 2), i // 2), SamplingParams(9 + i), i, prefix=i // 2)
        for i in range(6)
    ]
    requests += conversations()[6::2]
    engine.submit(requests)
    outputs = [output for _ in range(5) for output in engine.step()]
    parked = engine.park([1, 2, 5])
    kept = [(request.id, request.routed_experts) for request in parked]
    engine.submit(parked)
    ended: Outputs = {}
    while engine.stats().running or engine.stats().waiting:
        outputs += engine.step()
        for turn in engine.take_turns():
            answer(engine, turn, VOCAB, {turn.id: 50}, ended)
    assert any(len(output.turns) > 2 for output in ended.values())
    outputs += ended.values()
    engine.close()
    prompts = {request.id: request.prompt_ids for request in requests}
    by_id = {o.id: (prompts[o.id], o.token_ids, o.routed_experts.whole()) for o in outputs}
    return by_id, kept


def experts(directory: str) -> tuple[dict[object, Any], list[Any]]:
    """From FSDP shards to experts cut by tp, and to whole ones; then what was recorded of those."""
    two = TrainAxes(fsdp=2)
    cases = {"cut": (directory, two, 1, 2), "whole": (directory, two, 1, 2, False, 2)}
    all_updates(cases)
    return recorded(directory, 2, 2)


@torch.no_grad()
def test_experts_on_two_ranks(saved: Callable[..., str], fresh_ranks: Ranks) -> None:
    """Recorded are those that transformers chooses, in the layers that have any.

    Through a park, and through turns and replies.
    """
    directory = saved("qwen3_moe")
    (outputs, parked), (same_outputs, _) = fresh_ranks(2, experts, directory)
    model = load(directory)
    enable_replay(enumerate(model.model.layers), ExpertShape.of(model.config))
    assert len(outputs) == 11
    for prompt, tokens, experts_of in outputs.values():
        routing = Routing(records=True)
        model.model(torch.tensor([[*prompt, *tokens]]), routing=routing)
        wanted = routing.recorded()[:-1].sort(-1).values
        assert torch.equal(torch.from_numpy(experts_of).sort(-1).values, wanted)
    for id_, record in parked:
        assert len(record) > 0
        assert (record.whole() == outputs[id_][2][: len(record)]).all()
    for id_, (*_, experts_of) in same_outputs.items():  # every rank of an instance has them
        assert (experts_of == outputs[id_][2]).all()
