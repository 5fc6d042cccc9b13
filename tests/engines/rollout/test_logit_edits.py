"""Penalties and bans: against plain loops, and through everything that happens to a request."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.logit_edits import LogitEdits, SeenTokens
from hybridrl.engines.rollout.native import NativeEngine

Make = Callable[..., NativeEngine]
Finish = Callable[..., dict[object, Output]]
RequestsOf = Callable[..., list[Request]]
Same = Callable[[dict[object, Output], dict[object, Output]], None]
CPU = torch.device("cpu")
ENDS = {"stop_token_ids": tuple(range(3, 52, 4))}
WAYS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.9},
    "min_new_tokens": {"min_new_tokens": 12, **ENDS, "ignored_stop_ids": (2,)},
    "logit_bias": {"logit_bias": ((4, 6.0), (11, -100.0))},
    "bad_words": {"bad_words": ((5,), (6, 8), (1, 2, 3), *((i, i) for i in range(52)))},
    "all": {
        "repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3,
        "min_new_tokens": 5, "logit_bias": ((3, 2.0),), "bad_words": ((1,), (2, 4)), "min_p": 0.01,
        "top_k": 20, "top_p": 0.95, "temperature": 1.3, **ENDS,
    },
}  # fmt: skip


def reference(logits: Sequence[float], sampling: SamplingParams, request: Request) -> list[float]:
    """vLLM's order of edits as loops over one row."""
    row, response = [float(x) for x in logits], request.response_ids
    for *before, last in sampling.bad_words:
        if response[len(response) - len(before) :] == before and len(before) <= len(response):
            row[last] = -np.inf
    if len(response) < sampling.min_new_tokens:
        for token in (*sampling.stop_token_ids, *sampling.ignored_stop_ids):
            row[token] = -np.inf
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in {*request.prompt_ids, *response}:
        penalty = sampling.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, number in Counter(response).items():
        row[token] -= sampling.frequency_penalty * number + sampling.presence_penalty
    return row


def test_against_loops() -> None:
    """Rows of all ways in one batch, which grow, leave their slot and come back elsewhere."""
    draw, vocab = random.Random(1), 52
    kinds = [SamplingParams(99), *(SamplingParams(99, **way) for way in WAYS.values())]
    kinds += kinds[::2]
    requests = [
        Request(i, [draw.randrange(vocab) for _ in range(1 + 5 * i)], kind, i)
        for i, kind in enumerate(kinds)
    ]
    seen, free = SeenTokens(40, CPU), list(range(40))
    slots = np.array([free.pop() for _ in requests])
    edits = LogitEdits(kinds, CPU)
    for step in range(40):
        logits = torch.randn(len(requests), vocab) * 4
        counts = np.array([len(request.response_ids) for request in requests])
        edited = edits.apply(logits, requests, slots, counts, seen)
        for row, (kind, request) in enumerate(zip(kinds, requests, strict=True)):
            wanted = torch.tensor(reference(logits[row].tolist(), kind, request))
            # Measured: 4e-7, of float32 on values of order 10.
            torch.testing.assert_close(edited[row], wanted, atol=1e-5, rtol=1e-6)
        for row, request in enumerate(requests):
            if (step + row) % 11:  # else it computes the same token again
                request.response_ids.append(draw.choice([1, 2, 5, 6, draw.randrange(vocab)]))
            if (step + row) % 7 == 0:
                free.insert(0, int(slots[row]))
                slots[row] = free.pop()
                seen.forget([int(slots[row])])
            elif (step + row) % 13 == 0:  # it got tokens elsewhere
                request.response_ids += [4, 4, 7]
                seen.forget([int(slots[row])])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.layouts), 0.9])
def test_company_parks_and_moves_do_not_matter(
    way: str, temperature: float, model: PreTrainedModel, make_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """Prompts shared, few at a time, preempted, moved with the cache and without."""
    settings = {"temperature": temperature, **WAYS[way]}
    requests = requests_of(12, group=4, prefix=True, **settings)
    wanted = finish(make_engine(model), [replace(r, prefix=None) for r in requests])
    plain = {name: settings[name] for name in ("temperature", "stop_token_ids") if name in settings}
    others = finish(make_engine(model), requests_of(12, group=4, **plain))
    if (way, temperature) != ("min_p", 0.0):  # which the most probable token never fails
        assert any(wanted[i].token_ids != others[i].token_ids for i in wanted)

    source, target = make_engine(model, max_running=5), make_engine(model, kv_cache_tokens=64)
    source.submit(requests)
    outputs = {output.id: output for _ in range(7) for output in source.step()}
    target.submit(source.park(range(0, 12, 2), with_kv=True))
    target.submit(source.park(range(1, 12, 2)))
    for _ in range(5):
        outputs |= {output.id: output for output in target.step()}
    source.submit(target.park([1, 2, 3]))
    outputs |= finish(source) | finish(target)
    if way not in ("min_new_tokens", "all"):  # of which some responses end early
        assert target.stats().num_preempted > 0
    same(outputs, wanted)


@pytest.mark.parametrize("way", ["min_p", "all"])
def test_strict(
    way: str, model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf
) -> None:
    """Bit for bit, whatever else runs, and after a replay."""
    requests = requests_of(8, group=4, prefix=True, **WAYS[way])
    wanted = finish(make_engine(model, deterministic=True), requests)
    source = make_engine(model, deterministic=True, max_running=3)
    source.submit(requests[::-1])
    outputs = {output.id: output for _ in range(9) for output in source.step()}
    source.submit(source.park(range(8)))
    assert outputs | finish(source) == wanted


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_log_probs_are_of_the_model_distribution(
    way: str, model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf
) -> None:
    """After temperature, before all edits."""
    requests = requests_of(6, **{"temperature": 0.8, **WAYS[way]})
    for id_, output in finish(make_engine(model), requests).items():
        request = requests[id_]  # type: ignore[call-overload]
        ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        log_p = (logits / request.sampling.temperature).log_softmax(-1)
        wanted = log_p.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
        # Measured: 2e-6 between a prefill and decode steps of this model.
        assert output.log_probs == pytest.approx(wanted.tolist(), abs=1e-5)


def test_what_is_forbidden_does_not_come(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf
) -> None:
    outputs = finish(make_engine(model), requests_of(40, **WAYS["bad_words"]))
    text = [tuple(output.token_ids) for output in outputs.values()]
    assert 5 not in {token for ids in text for token in ids}
    pairs = {pair for ids in text for pair in pairwise(ids)}
    assert (6, 8) not in pairs
    assert all(a != b for a, b in pairs)
    ends = {"min_new_tokens": 12, **ENDS}
    outputs = finish(make_engine(model), requests_of(40, longest=60, **ends))
    stopped = [output for output in outputs.values() if output.finish == "stop"]
    assert stopped
    assert all(len(output.token_ids) > 12 for output in stopped)
