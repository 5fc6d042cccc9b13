"""The ids that truncated sampling keeps: those that tokens are drawn from, however made."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from answered_turns import converse
from transformers import PreTrainedModel

from hybridrl.engines.rollout.draft_lengths import FixedLength
from hybridrl.engines.rollout.drafts import SeenTexts
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.kept_ids import KeptIds, rows_of
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.sampling import SamplingBatch, sample
from hybridrl.engines.rollout.speculation import Speculation

Make = Callable[..., NativeEngine]
Finish = Callable[..., dict[object, Output]]
RequestsOf = Callable[..., list[Request]]
WAYS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 12, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 7, "top_p": 0.9, "repetition_penalty": 1.3, "bad_words": ((3,),)},
]


def reference(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The kept ids of a distribution in float64; of equal shares the lower id is kept."""
    order = np.argsort(-p, kind="stable")
    order = order[p[order] >= min_p * p.max()][:top_k]
    mass = np.cumsum(p[order]) / p[order].sum()
    return sorted(order[: int(np.searchsorted(mass, top_p)) + 1].tolist())


def drawn(
    logits: torch.Tensor, uniforms: torch.Tensor, params: list[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    batch = SamplingBatch.of(params, logits.shape[1], torch.device("cpu"))
    return sample(logits, uniforms, batch)


@pytest.mark.parametrize("vocab", [5, 300, 5003])
@pytest.mark.parametrize("way", WAYS[:3], ids=str)
def test_against_float64(vocab: int, way: dict[str, Any]) -> None:
    """Ids, tokens as without a record, and log-probabilities renormalized over the ids."""
    random = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(50, vocab, generator=random)
    uniforms = torch.rand(50, dtype=torch.float64, generator=random)
    plain, whole, none = drawn(logits, uniforms, [SamplingParams(9, **way)] * 50)
    assert none is None
    params = SamplingParams(9, keeps_ids=True, **way)
    tokens, log_probs, kept = drawn(logits, uniforms, [params] * 50)
    assert kept is not None
    assert kept.shape == (50, min(way["top_k"], vocab))
    assert torch.equal(tokens, plain)
    p = (logits.double() / params.temperature).softmax(-1).numpy()
    for row, ids in enumerate(rows_of(kept)):
        wanted = reference(p[row], params.top_k, params.top_p, params.min_p)
        assert ids.tolist() == wanted
        mass = p[row][wanted].sum()
        # Float32 logits: measured 4e-7.
        assert log_probs[row] == pytest.approx(np.log(p[row][tokens[row]] / mass), abs=2e-6)
        assert whole[row] == pytest.approx(np.log(p[row][tokens[row]]), abs=2e-6)


def test_of_equal_tokens_the_lower_ids_are_kept() -> None:
    """So that a row has no more than `top_k`, whichever rows are beside it."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 1.0], [0.0] * 6])
    params = [SamplingParams(9, top_k=k, keeps_ids=True) for k in (3, 4)]
    *_, kept = drawn(logits, torch.tensor([0.99, 0.99], dtype=torch.float64), params)
    assert kept is not None
    assert kept.tolist() == [[0, 1, 4, -1], [0, 1, 2, 3]]


def test_rows_beside_rows_that_keep_none() -> None:
    """Each draws as alone: greedy, whole, truncated without a record, truncated with one."""
    kinds = [
        SamplingParams(9, temperature=0),
        SamplingParams(9),
        SamplingParams(9, top_p=0.5),
        SamplingParams(9, top_k=4, top_p=0.9, keeps_ids=True),
    ]
    random = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(16, 700, generator=random)
    uniforms = torch.rand(16, dtype=torch.float64, generator=random)
    params = [kinds[row % 4] for row in range(16)]
    tokens, log_probs, kept = drawn(logits, uniforms, params)
    assert kept is not None
    for row, ids in enumerate(rows_of(kept)):
        one = slice(row, row + 1)
        token, log_prob, alone = drawn(logits[one], uniforms[one], params[row : row + 1])
        assert (tokens[one], log_probs[one]) == (token, log_prob)
        assert ids.tolist() == ([] if alone is None else rows_of(alone)[0].tolist())
        assert bool(len(ids)) == params[row].keeps_ids


def test_edited_logits_keep_the_ids_that_they_are_drawn_from() -> None:
    """The log-probability is the model's, over those ids: training knows of no penalty."""
    random = torch.Generator().manual_seed(4)
    logits, change = (torch.randn(30, 90, generator=random) for _ in range(2))
    uniforms = torch.rand(30, dtype=torch.float64, generator=random)
    params = [SamplingParams(9, top_k=6, keeps_ids=True)] * 30
    batch = SamplingBatch.of(params, 90, torch.device("cpu"))
    tokens, log_probs, kept = sample(logits, uniforms, batch, logits + 3 * change)
    assert kept is not None
    wanted = (logits + 3 * change).topk(6).indices.sort().values
    assert torch.equal(kept.long(), wanted)
    renormalized = logits.gather(1, wanted).log_softmax(1)
    own = (wanted == tokens[:, None]).float().argmax(1)
    torch.testing.assert_close(log_probs, renormalized[torch.arange(30), own])


def test_a_record_travels_as_one_array() -> None:
    record = KeptIds()
    record.append(np.array([3, 9], np.int32))
    record.append_whole(2)
    copy = record.copy()
    copy.append(np.array([70_000], np.int32))
    assert record.flat().tolist() == [2, 0, 0, 3, 9]
    for one in (copy, pickle.loads(pickle.dumps(copy)), KeptIds.of(copy.flat(), 4)):
        assert one.flat().tolist() == [2, 0, 0, 1, 3, 9, 70_000]
        assert one.flat().dtype == np.int32
        assert len(one) == 4


@torch.no_grad()
def probabilities(model: PreTrainedModel, request: Request, output: Output) -> np.ndarray:
    """Probabilities by transformers at every response token [tokens, vocab], without penalties."""
    ids, num = torch.tensor([[*request.prompt_ids, *output.token_ids]]), len(output.token_ids)
    logits = model(ids).logits[0, -num - 1 : -1].double() / request.sampling.temperature
    return logits.softmax(-1).numpy()


def kept_by(model: PreTrainedModel, request: Request, output: Output) -> list[list[int]]:
    """The kept ids of a response's tokens, from transformers' logits; without penalties."""
    sampling = request.sampling
    ways = sampling.top_k, sampling.top_p, sampling.min_p
    return [reference(row, *ways) for row in probabilities(model, request, output)]


def check_same_ids(
    model: PreTrainedModel,
    requests: list[Request],
    got: dict[object, Output],
    wanted: dict[object, Output],
) -> None:
    """The records are equal, but for tokens whose probabilities float32 cannot tell apart."""
    for request in requests:
        output = got[request.id]
        pairs = zip(
            by_token(record_of(output)), by_token(record_of(wanted[request.id])), strict=True
        )
        for token, (ids, others) in enumerate(pairs):
            if ids != others:
                exchanged = sorted(set(ids) ^ set(others))
                assert len(exchanged) == 2
                first, second = probabilities(model, request, output)[token][exchanged]
                assert first == pytest.approx(second, rel=1e-5)


def record_of(output: Output) -> KeptIds:
    assert output.kept_ids is not None
    return output.kept_ids


def by_token(record: KeptIds) -> list[list[int]]:
    counts, ids = np.split(record.flat(), [len(record)])
    return [piece.tolist() for piece in np.split(ids, np.cumsum(counts)[:-1])]


@pytest.mark.parametrize("way", WAYS[:3], ids=str)
def test_the_record_is_what_transformers_keeps(
    way: dict[str, Any],
    model: PreTrainedModel,
    make_engine: Make,
    finish: Finish,
    requests_of: RequestsOf,
) -> None:
    requests = requests_of(12, group=3, prefix=True, keeps_ids=True, **way)
    outputs = finish(make_engine(model), requests)
    plain = finish(make_engine(model), requests_of(12, group=3, prefix=True, **way))
    for request in requests:
        output = outputs[request.id]
        assert output.token_ids == plain[request.id].token_ids
        assert plain[request.id].kept_ids is None
        assert by_token(record_of(output)) == kept_by(model, request, output)
        assert max(output.log_probs) <= 0
        # The truncated distribution gives a token more than the whole one does.
        pairs = zip(output.log_probs, plain[request.id].log_probs, strict=True)
        assert all(kept >= whole - 1e-6 for kept, whole in pairs)


OPTIONS: dict[str, dict[str, Any]] = {
    "preempted": {"kv_cache_tokens": 72},
    "deterministic": {"deterministic": True},
    "drafts": {"speculation": Speculation(SeenTexts(), FixedLength(5))},
}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_same_ids_however_tokens_are_made(
    options: dict[str, Any],
    way: dict[str, Any],
    model: PreTrainedModel,
    make_engine: Make,
    finish: Finish,
    requests_of: RequestsOf,
    same: Callable[..., None],
) -> None:
    requests = requests_of(16, group=4, prefix=True, keeps_ids=True, **way)
    wanted = finish(make_engine(model), requests)
    engine = make_engine(model, **options)
    before = engine.stats().drafted_tokens
    outputs = finish(engine, requests)
    same(outputs, wanted)
    check_same_ids(model, requests, outputs, wanted)
    stats = engine.stats()
    assert ("kv_cache_tokens" in options) == (stats.num_preempted > 0)
    if "speculation" in options and "repetition_penalty" not in way:
        assert stats.drafted_tokens > before
        assert stats.accepted_tokens > 0


@pytest.mark.parametrize("with_kv", [True, False])
def test_the_same_ids_where_requests_are_parked_and_moved(
    with_kv: bool,
    model: PreTrainedModel,
    make_engine: Make,
    finish: Finish,
    requests_of: RequestsOf,
) -> None:
    """From engine to engine every few steps, through pickled bytes; copies are as parked ones."""
    requests = requests_of(12, group=3, prefix=True, keeps_ids=True, **WAYS[1])
    wanted = finish(make_engine(model), requests)
    engines = [make_engine(model) for _ in range(2)]
    outputs: dict[object, Output] = {}
    moves = 0
    engines[0].submit(requests)
    while engines[0].unfinished:
        for _ in range(5):
            outputs |= {output.id: output for output in engines[0].step()}
        ids = [request.id for request in requests]
        copies = {request.id: request for request in engines[0].copy()}
        parked = engines[0].park(ids, with_kv=with_kv)
        for request in parked:
            assert request.kept_ids is not None
            assert len(request.kept_ids) == len(request.response_ids)
            of_copy = copies[request.id].kept_ids
            assert of_copy is not None
            assert of_copy.flat().tolist() == request.kept_ids.flat().tolist()
        engines[1].submit(pickle.loads(pickle.dumps(parked)))
        moves += len(parked)
        engines.reverse()
    assert moves > 12
    check_same_ids(model, requests, outputs, wanted)


def test_replies_have_no_kept_ids(model: PreTrainedModel, make_engine: Make) -> None:
    sampling = SamplingParams(50, max_turn_tokens=7, top_k=6, top_p=0.9, keeps_ids=True)
    requests = [Request(i, [5 + i] * 4, sampling, stream_key(1, i)) for i in range(5)]
    outputs = converse(make_engine(model), requests, 52, lambda turn: sum(turn.token_ids) % 5)
    replies = 0
    for request in requests:
        output = outputs[request.id]
        of_model = [False] * len(output.token_ids)
        for turn in output.turns:
            of_model[turn.start : turn.stop] = [True] * (turn.stop - turn.start)
        wanted = kept_by(model, request, output)
        got = by_token(record_of(output))
        assert got == [ids if own else [] for ids, own in zip(wanted, of_model, strict=True)]
        replies += of_model.count(False)
    assert replies > 5
