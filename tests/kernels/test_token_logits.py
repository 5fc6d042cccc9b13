"""Log-probabilities of given and of the likeliest tokens, against those of the whole vocabulary."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.kernels.linear_log_probs import VocabShard
from hybridrl.kernels.token_logits import candidate_log_probs, token_logits, top_log_probs

TOKENS, FEATURES, VOCAB, K = 7, 5, 37, 4
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 1.3, "cap": 2.0}]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def inputs() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, shape, generator=random)

    return {
        "hidden": draw(TOKENS, FEATURES), "weight": draw(VOCAB, FEATURES), "bias": draw(VOCAB),
        "targets": ids(TOKENS), "candidates": ids(TOKENS, K), "grad": draw(TOKENS, 1 + K),
    }  # fmt: skip


def whole(
    x: dict[str, torch.Tensor], temperature: float = 1.0, cap: float | None = None
) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] in one piece."""
    products = x["hidden"] @ x["weight"].T + x["bias"]
    logits = products if cap is None else cap * torch.tanh(products / cap)
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("settings", SETTINGS)
def test_candidates_and_their_gradients(settings: dict[str, Any]) -> None:
    x = inputs()
    leaves = [x[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    wanted = whole(x, **settings).gather(1, torch.cat([x["targets"][:, None], x["candidates"]], 1))
    got, entropy = candidate_log_probs(
        x["hidden"], x["weight"], x["targets"], x["candidates"], bias=x["bias"],
        with_entropy=True, **settings,
    )  # fmt: skip
    torch.testing.assert_close(got, wanted, **EXACT)
    assert entropy is not None
    for one, other in zip(
        torch.autograd.grad(got, leaves, x["grad"]),
        torch.autograd.grad(wanted, leaves, x["grad"]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **EXACT)


def test_chunks_of_tokens_change_nothing() -> None:
    x = inputs()
    results = []
    for size in (1, 2 * K * FEATURES, 2**20):
        leaves = [x[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")]
        hidden, weight, bias = leaves
        logits = token_logits(hidden, weight, x["candidates"], chunk_elements=size, bias=bias)
        results.append([logits, *torch.autograd.grad(logits, leaves, x["grad"][:, 1:])])
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("k", [1, K, VOCAB])
def test_the_likeliest(settings: dict[str, Any], k: int) -> None:
    x = inputs()
    wanted, places = whole(x, **settings).topk(k)
    for size in (2**20, 11 * TOKENS):
        ids, log_probs = top_log_probs(
            x["hidden"], x["weight"], k, bias=x["bias"], chunk_elements=size, **settings
        )
        assert torch.equal(ids, places)
        torch.testing.assert_close(log_probs, wanted, **EXACT)


def test_no_tokens() -> None:
    x = inputs()
    hidden = x["hidden"][:0].requires_grad_()
    weight = x["weight"].requires_grad_()
    got, _ = candidate_log_probs(hidden, weight, x["targets"][:0], x["candidates"][:0])
    assert got.shape == (0, 1 + K)
    got.sum().backward()
    assert weight.grad is not None
    assert weight.grad.eq(0).all()
    ids, log_probs = top_log_probs(hidden, weight, K)
    assert ids.shape == log_probs.shape == (0, K)


def _sharded(settings: dict[str, Any]) -> list[torch.Tensor]:
    """By the last rank, whose shard is the smallest; rows behind it are padding."""
    x, size, rank = inputs(), dist.get_world_size(), dist.get_rank()
    rows = -(-VOCAB // size)
    start = min(rows * rank, VOCAB)
    here = slice(start, min(start + rows, VOCAB))
    padding = rows + 2 - len(x["bias"][here])
    weight = torch.cat([x["weight"][here], torch.full((padding, FEATURES), 50.0).double()])
    bias = torch.cat([x["bias"][here], torch.full((padding,), 50.0).double()])
    leaves = [tensor.requires_grad_() for tensor in (x["hidden"], weight, bias)]
    settings = {**settings, "shard": VocabShard(dist.group.WORLD, start, here.stop - here.start)}
    got, _ = candidate_log_probs(
        x["hidden"], weight, x["targets"], x["candidates"], bias=bias, **settings
    )
    gradients = torch.autograd.grad(got, leaves, x["grad"])
    top = top_log_probs(x["hidden"], weight, 30, bias=bias, **settings)
    return [got.detach(), *gradients, *top]


@pytest.mark.parametrize("size", [2, 3])
def test_shards_equal_one_process(ranks: Any, size: int) -> None:
    x = inputs()
    rows = -(-VOCAB // size)
    for settings in SETTINGS:
        leaves = [x[name].requires_grad_() for name in ("hidden", "weight", "bias")]
        all_log_probs = whole(x, **settings)
        ids = torch.cat([x["targets"][:, None], x["candidates"]], 1)
        wanted = all_log_probs.gather(1, ids)
        grad_hidden, *of_rows = torch.autograd.grad(wanted, leaves, x["grad"], retain_graph=True)
        likeliest = all_log_probs.topk(30)
        for rank, result in enumerate(ranks(size, _sharded, settings)):
            got, hidden, weight, bias, top_ids, top = result
            torch.testing.assert_close(got, wanted.detach(), **EXACT)
            torch.testing.assert_close(hidden, grad_hidden, **EXACT)
            here = slice(rows * rank, min(rows * (rank + 1), VOCAB))
            for local, gradient in zip((weight, bias), of_rows, strict=True):
                num = here.stop - here.start
                torch.testing.assert_close(local[:num], gradient[here], **EXACT)
                assert local[num:].eq(0).all()
            assert torch.equal(top_ids, likeliest.indices)
            torch.testing.assert_close(top, likeliest.values.detach(), **EXACT)
