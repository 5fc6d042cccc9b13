"""Engines of vLLM for tests, requests in every way of sampling, and what these go through."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.engines.rollout.interface import HeldTurn, Output, Request, SamplingParams
from hybridrl.engines.rollout.logit_edits import SeenTokens
from hybridrl.engines.rollout.random import stream_key, uniforms
from hybridrl.engines.rollout.sampling import SamplingBatch, sample
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.engines.rollout.vllm.engine import VOCAB_MULTIPLE, VLLMEngine
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layerwise import LayerwiseSwitch
from hybridrl.layout.switching import Switch, plan_switch
from hybridrl.models.parallel import model_parameters

VOCAB = 53
ODD = {"vocab_size": VOCAB, "num_hidden_layers": 3, "head_dim": 32}
BLOCK = 32
Outputs = dict[object, Output]


def decode(ids: Sequence[int]) -> str:
    """A text of two letters a token."""
    return "".join("abc"[token % 3] + "de"[token % 2] for token in ids)


STOPS = StopStrings(decode, ["bda", "ecea"])


def load(directory: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def plan_of(
    model: PreTrainedModel, axes: TrainAxes, pp: int = 1, tp: int = 1, ep: int = 1
) -> Switch:
    return plan_switch(
        model_parameters(model.config), axes, pp, tp,
        gen_ep=ep, vocab_multiple=VOCAB_MULTIPLE, ascending=True,
    )  # fmt: skip


def start(directory: str, switch: Switch, model: PreTrainedModel, **changes: Any) -> VLLMEngine:
    options: dict[str, Any] = {
        "dtype": torch.float32, "device": torch.device("cpu"), "max_running": 16,
        "block_size": BLOCK, "kv_cache_tokens": 0, "max_sequence": 160,
    }  # fmt: skip
    return VLLMEngine(directory, model.config, switch.plan.dst, **{**options, **changes})


def finish(engine: Any, requests: Iterable[Request] = ()) -> Outputs:
    """Submit copies of `requests` and step until nothing is left."""
    engine.submit(copy.deepcopy(list(requests)))
    outputs: Outputs = {}
    for _ in range(2000):
        stats = engine.stats()
        if not stats.running and not stats.waiting:
            return outputs
        outputs |= {output.id: output for output in engine.step()}
    raise AssertionError("the queue does not drain")


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 7 + i * i * 5 + i) % 50 + 2 for i in range(length)]


def moves_of(switch: Switch, dtype: torch.dtype = torch.float32) -> LayerwiseSwitch:
    """What brings the weights of a switch to an engine's `load`."""
    return LayerwiseSwitch(switch.plan, dist.get_rank(), dtype, torch.device("cpu"))


def change(model: PreTrainedModel, only: str = "") -> None:
    """Other weights; of shards, each rank its own."""
    for name, parameter in model.named_parameters():
        if only in name:
            own = (
                parameter.detach().to_local()
                if hasattr(parameter, "to_local")
                else parameter.detach()
            )
            own.mul_(0.6 + 0.8 * torch.rand_like(own))


def mixed_requests() -> list[Request]:
    """Three samples of each of five prompts, every way of sampling in one batch.

    Of the longest prompts more than two blocks, or three parts of a small step.
    """
    ways = [
        {}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 4, "keeps_ids": True},
        {"top_p": 0.7},
        {
            "temperature": 1.3, "top_k": 9, "top_p": 0.9, "stop_token_ids": (5, 11),
            "keeps_ids": True,
        },
        {"stop_token_ids": (3,)}, {"min_p": 0.1, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"min_new_tokens": 9, "stop_token_ids": (3, 5), "repetition_penalty": 0.9},
        {"logit_bias": ((4, 3.0),), "bad_words": ((7,), (1, 2), (5, 6, 7))},
    ]  # fmt: skip
    return [
        Request(
            i,
            prompt_of((3, 31, 64, 100, 110)[i // 3], i // 3),
            SamplingParams(5 + 3 * i, **ways[i % len(ways)]),
            stream_key(1, i // 3, k=i % 3),
            prefix=i // 3,
        )
        for i in range(15)
    ]


def parked_often(engine: VLLMEngine, requests: list[Request], last: int) -> Outputs:
    """Some are parked at each of some steps, wait or not, rest for two steps, and come back."""
    engine.submit(copy.deepcopy(requests))
    outputs: Outputs = {}
    resting: dict[int, list[Request]] = {}
    for step in range(2000):
        if step in (0, 1, 2, 5, 11, 19) and step <= last:
            ids = [request.id for request in requests[step % 2 :: 2]]
            parked = engine.park(iter([*ids, *ids, "unknown"]))
            assert all(len(r.response_ids) == len(r.log_probs) for r in parked)
            resting[step + 2] = parked
        engine.submit(resting.pop(step, []))
        outputs |= {output.id: output for output in engine.step()}
        stats = engine.stats()
        if not (stats.running or stats.waiting or resting):
            return outputs
    raise AssertionError("the queue does not drain")


def waits(turn: HeldTurn) -> int:
    """The steps until a turn is answered."""
    return sum(turn.token_ids) % 5


def come_back(engine: VLLMEngine, request: Request) -> Outputs:
    """What comes back to where it was parked computes no full block again."""
    engine.submit([copy.deepcopy(request)])
    for _ in range(21):
        engine.step()
    (parked,) = engine.park([request.id])
    assert parked.num_tokens == 110 + 21
    before = engine.stats()
    outputs = finish(engine, [parked])
    after = engine.stats()
    assert after.shared_prompt_tokens - before.shared_prompt_tokens == 4 * BLOCK
    assert after.prefill_tokens - before.prefill_tokens == 110 + 21 - 4 * BLOCK
    return outputs


def through_sleep(
    engine: VLLMEngine, update: Callable[[], None], requests: list[Request]
) -> Outputs:
    """The cache goes while some wait and comes back for them; others join when they run."""
    caches = [storage for storage, _ in engine._memory._storages]
    before = [storage.nbytes() for storage in caches]
    engine.submit(copy.deepcopy(requests[::-2]))
    free_cache = partial(engine.sleep, keep_weights=True)
    for free in (free_cache, engine.sleep):
        free()
        free()
        assert [storage.nbytes() for storage in caches] == [0] * len(caches)
        assert not engine.stats().has_cache
        update()
    outputs = {output.id: output for _ in range(7) for output in engine.step()}
    assert [storage.nbytes() for storage in caches] == before
    for refuses in (free_cache, engine.sleep, update):
        with pytest.raises(AssertionError, match="while requests run"):
            refuses()
    return outputs | finish(engine, requests[1::2])


def in_parts(engine: VLLMEngine, requests: list[Request]) -> dict[str, Outputs]:
    """Prompts computed in parts: what vLLM draws after a part does not count."""
    engine._core.scheduler.max_num_scheduled_tokens = 48
    engine._forget_prompts()
    engine.submit(copy.deepcopy(requests[-1:]))
    engine.step()
    engine.step()
    (cut,) = engine.park([requests[-1].id])
    assert (cut.response_ids, cut.log_probs) == ([], [])
    engine._forget_prompts()
    return {"cut": finish(engine, [cut]), "parts": parked_often(engine, requests, 19)}


def tuned(model: PreTrainedModel) -> PreTrainedModel:
    """The model with other weights, the same wherever it is asked for."""
    torch.manual_seed(3)
    change(model)
    return model


def ids_of(output: Output) -> list[list[int]]:
    """The kept ids of each token."""
    assert output.kept_ids is not None
    counts, ids = np.split(output.kept_ids.flat(), [len(output.token_ids)])
    return [piece.tolist() for piece in np.split(ids, np.cumsum(counts)[:-1])]


def same(model: PreTrainedModel, requests: list[Request], got: Outputs, wanted: Outputs) -> None:
    """Tokens, log-probabilities and kept ids equal; the first difference may be a near-tie."""
    for request in requests:
        a, b = got[request.id], wanted[request.id]
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=False))
        first = next((i for i, (x, y) in pairs if x != y), None)
        # Measured: 4e-6.
        assert a.log_probs[:first] == pytest.approx(b.log_probs[:first], abs=1e-4)
        assert (a.kept_ids is not None) == request.sampling.keeps_ids
        if a.kept_ids is not None:
            assert ids_of(a)[:first] == ids_of(b)[:first]
        if first is None:
            assert (a.token_ids, a.finish, a.turns) == (b.token_ids, b.finish, b.turns)
            continue
        ids = torch.tensor([[*request.prompt_ids, *a.token_ids[:first]]])
        logits = model(ids).logits[:, -1].detach()
        batch = SamplingBatch.of([request.sampling], logits.shape[-1], logits.device)
        edited = None
        if batch.edits is not None:
            so_far = [replace(request, response_ids=a.token_ids[:first])]
            slot, seen = np.array([0]), SeenTokens(1, logits.device)
            edited = batch.edits.apply(logits, so_far, slot, np.array([first]), seen)
        key = np.array([request.stream], np.uint64)
        drawn = torch.from_numpy(uniforms(key, np.array([first])))
        ties = {int(sample(logits, drawn + way, batch, edited)[0]) for way in (-1e-5, 1e-5)}
        assert {a.token_ids[first], b.token_ids[first]} <= ties
