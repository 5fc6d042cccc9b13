"""vLLM with asynchronous scheduling against itself without: the same tokens."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from answered_turns import converse, converse_on_the_move
from transformers import PreTrainedModel
from vllm_asynchronous import asynchronous, late_draws
from vllm_engines import (
    ODD,
    STOPS,
    VOCAB,
    Outputs,
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

from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.vllm.engine import VLLMEngine
from hybridrl.engines.rollout.vllm.steps import reads_tokens
from hybridrl.layout.grouping import TrainAxes

pytestmark = pytest.mark.vllm
Ranks = Callable[..., list[Any]]


def requests_of() -> list[Request]:
    """All ways of sampling whose draws need no earlier token, and stop tokens."""
    return [request for request in mixed_requests() if not reads_tokens(request.sampling)]


def conversations() -> list[Request]:
    """Conversations in turns of at most nine tokens."""
    return [
        replace(request, sampling=replace(request.sampling, max_new_tokens=50, max_turn_tokens=9))
        for request in requests_of()
    ]


def calls_of(engine: VLLMEngine, num_steps: int) -> list[list[int]]:
    """Calls that count tokens: the numbers of tokens of all samples after each."""
    requests = requests_of()
    engine.submit(copy.deepcopy(requests))
    counts = []
    while engine.stats().running + engine.stats().waiting:
        engine.begin_call(num_steps)
        for _ in range(num_steps):
            engine.step()
        assert not engine._queue._batches
        entries = [engine._entries.get(request.id) for request in requests]
        counts.append([len(e.request.response_ids) if e is not None else -1 for e in entries])
    engine.begin_call(None)
    return counts


def lives(directory: str, tp: int) -> dict[str, Any]:
    """What samples go through in an engine, and in one that is short of cache and rows."""
    model = load(directory)
    switch = plan_of(model, TrainAxes(replicas=dist.get_world_size()), 1, tp)
    moves = moves_of(switch)

    def update(source: PreTrainedModel = model) -> None:
        shards = {name: p.detach() for name, p in source.named_parameters()}
        moves.switch(shards, engine.load)

    engine = start(directory, switch, model)
    update()
    computing = late_draws(engine)
    requests = requests_of()
    results: dict[str, Any] = {"batch": finish(engine, requests), "stats": engine.stats()}
    results["computing"] = list(computing)
    results["parked"] = parked_often(engine, requests, 19)
    results["again"] = come_back(engine, requests[-1])
    results["late"] = through_sleep(engine, update, requests)
    results["turns"] = converse(engine, conversations(), VOCAB, waits)
    few = conversations()[::3]
    results["moved"], _ = converse_on_the_move((engine, engine), few, VOCAB, with_kv=False)
    results["calls"] = calls_of(engine, 4)
    computing.clear()
    results["readers"] = finish(engine, mixed_requests())
    results["computing with readers"] = list(computing)
    results["updated"] = across_an_update(engine, lambda: update(tuned(load(directory))))
    update()
    results["copied"] = across_a_copy(engine, update)
    results |= in_parts(engine, requests)
    engine.close()
    engine = start(directory, switch, model, kv_cache_tokens=192, max_running=5, stops=STOPS)
    update()
    late_draws(engine)
    results["stopped"], results["short"] = finish(engine, requests), engine.stats()
    engine.close()
    return results


def across_an_update(engine: VLLMEngine, update: Callable[[], None]) -> Outputs:
    """All are parked after twelve steps and go on with other weights, of which each has a token.

    None has one of a batch that computed when they were parked.
    """
    requests = requests_of()
    engine.submit(copy.deepcopy(requests))
    outputs = {output.id: output for _ in range(12) for output in engine.step()}
    parked = engine.park([request.id for request in requests])
    assert {len(request.response_ids) for request in parked} == {12}
    assert {len(request.log_probs) for request in parked} == {12}
    update()
    return outputs | finish(engine, parked)


def across_a_copy(engine: VLLMEngine, update: Callable[[], None]) -> tuple[Outputs, int]:
    """Weights change after a copy; and the outputs that this has read, and no step returned."""
    engine.submit([Request("copied", prompt_of(5), SamplingParams(4), 1)])
    outputs: Outputs = {}
    while engine.copy():
        outputs |= {output.id: output for output in engine.step()}
    left = engine.unfinished
    engine.sleep(keep_weights=True)
    update()
    return outputs | {output.id: output for output in engine.step()}, left


def both(directory: str, tp: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without asynchronous scheduling, and with it."""
    plain = lives(directory, tp)
    with asynchronous():
        return plain, lives(directory, tp)


OUTPUTS = (
    "batch", "parked", "again", "late", "turns", "moved", "readers", "cut", "parts", "stopped",
)  # fmt: skip


def check(directory: str, plain: dict[str, Any], ahead: dict[str, Any]) -> None:
    model = load(directory)
    requests = {request.id: request for request in mixed_requests()}
    for name in OUTPUTS:
        assert plain[name].keys() == ahead[name].keys()
        same(model, [requests[id_] for id_ in plain[name]], ahead[name], plain[name])
    for id_, output in ahead["updated"].items():
        other = plain["updated"][id_]
        assert (output.token_ids, output.finish) == (other.token_ids, other.finish)
        assert output.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    (before, none_left), (after, one_left) = plain["copied"], ahead["copied"]
    assert (none_left, one_left) == (0, 1)
    assert before["copied"].token_ids == after["copied"].token_ids
    for name in ("calls", "stats"):
        assert plain[name] == ahead[name]
    assert plain["short"].num_preempted > 0 < ahead["short"].num_preempted
    assert plain["short"].decode_tokens == ahead["short"].decode_tokens
    # Every batch but the first was begun while the one before it computed.
    assert set(plain["computing"]) == {0}
    assert len(ahead["computing"]) == 5 + 3 * 14
    assert ahead["computing"] == [0] + [1] * (5 + 3 * 14 - 1)
    # Of the samples that read earlier tokens the last one ends after 5 + 3 * 10.
    assert ahead["computing with readers"][:35] == [0] * 35
    assert ahead["computing with readers"][36:] == [1] * (len(ahead["computing"]) - 36)


@pytest.fixture
def directory(make_model: Callable[..., PreTrainedModel], tmp_path: Path) -> str:
    alike = {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}
    make_model("qwen3", **ODD, **alike).save_pretrained(tmp_path / "qwen3")
    return str(tmp_path / "qwen3")


def test_the_same_tokens_on_one_rank(directory: str, fresh_ranks: Ranks) -> None:
    ((plain, ahead),) = fresh_ranks(1, both, directory, 1)
    check(directory, plain, ahead)


@pytest.mark.slow
def test_the_same_tokens_on_two_ranks(directory: str, fresh_ranks: Ranks) -> None:
    """Which decide alike, and agree on every token."""
    (plain, ahead), other = fresh_ranks(2, both, directory, 2)
    check(directory, plain, ahead)
    for ours, theirs in zip((plain, ahead), other, strict=True):
        assert ours == theirs
