"""Log-probabilities of given and of the likeliest tokens, against those of the whole vocabulary."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.kernels.linear_log_probs import VocabShard, linear_log_probs
from hybridrl.kernels.top_log_probs import top_log_probs

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
    got, entropy = linear_log_probs(
        x["hidden"], x["weight"], x["targets"], candidates=x["candidates"], bias=x["bias"],
        with_entropy=True, **settings,
    )  # fmt: skip
    torch.testing.assert_close(got, wanted, **EXACT)
    assert entropy is not None
    log_p = whole(x, **settings)
    wanted_entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(entropy, wanted_entropy, **EXACT)
    of_entropy = x["grad"][:, 0]
    for one, other in zip(
        torch.autograd.grad([got, entropy], leaves, [x["grad"], of_entropy]),
        torch.autograd.grad([wanted, wanted_entropy], leaves, [x["grad"], of_entropy]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **EXACT)


def test_large_gradients_that_cancel_in_bf16() -> None:
    """As those of the tokens outside of the top k of a sure student (`distill.with_rest`).

    Its candidates have all but r = 1e-5 of the probability, and gradients of s p / r, s = 1e-3.
    The error of both is 0.0013; rounded before they are added, they were off by 0.2.
    """
    random = torch.Generator().manual_seed(0)
    tokens, features, vocab, k, least, share = 64, 32, 400, 8, 1e-5, 1e-3
    hidden = torch.randn(tokens, features, generator=random)
    weight = torch.randn(vocab, features, generator=random) / features**0.5
    hidden[:, 0], weight[:, 0] = 8.0, 0.0
    weight[:k, 0] = math.log((vocab - k) / k / least) / 8
    leaves = [hidden.bfloat16(), weight.bfloat16()]
    candidates = torch.arange(k).expand(tokens, k)
    targets = torch.arange(tokens) % 12

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        inputs = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        got, _ = linear_log_probs(*inputs, targets, candidates=candidates)
        p = got[:, 1:].detach().double().exp()
        outer = -torch.ones_like(p) / k + share * p / (1 - p.sum(1, keepdim=True))
        grad = torch.cat([torch.ones(tokens, 1), outer], 1).to(got.dtype)
        return torch.autograd.grad(got, inputs, grad)

    for got, wanted in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < 0.005


def test_chunks_change_nothing() -> None:
    x = inputs()
    results = []
    for size in (1, 2 * K * FEATURES, 2**20):
        leaves = [x[name].detach().requires_grad_() for name in ("hidden", "weight", "bias")]
        hidden, weight, bias = leaves
        got, _ = linear_log_probs(
            hidden, weight, x["targets"], candidates=x["candidates"], chunk_elements=size, bias=bias
        )
        results.append([got, *torch.autograd.grad(got, leaves, x["grad"])])
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
    got, _ = linear_log_probs(hidden, weight, x["targets"][:0], candidates=x["candidates"][:0])
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
    got, _ = linear_log_probs(
        x["hidden"], weight, x["targets"], candidates=x["candidates"], bias=bias, **settings
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
