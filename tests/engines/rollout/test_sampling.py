"""Drawing tokens, against a plain float64 reference and against the distribution itself."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from hybridrl.engines.rollout.interface import SamplingParams
from hybridrl.engines.rollout.sampling import SamplingBatch, restrict, sample


def batch_of(rows: int, vocab: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    return SamplingBatch(
        temperature=torch.full((rows,), temperature or 1.0),
        plain=temperature in (0, 1),
        greedy=torch.ones(rows, dtype=torch.bool) if temperature == 0 else None,
        top_k=torch.full((rows,), top_k or vocab) if top_k else None,
        top_p=torch.full((rows,), top_p, dtype=torch.float64) if top_p < 1 else None,
        widest=top_k,
    )


def reference(
    logits: np.ndarray, uniform: float, temperature: float, top_k: int, top_p: float
) -> tuple[int, float, float]:
    """Token, log-probability, and how near the uniform is to a boundary, for one row."""
    scaled = logits.astype(np.float64) / temperature
    log_p = scaled - scaled.max()
    log_p -= np.log(np.exp(log_p).sum())
    p = np.exp(log_p)
    order = np.argsort(-p, kind="stable")
    kept = order[:top_k] if top_k else order
    mass = np.cumsum(p[kept]) / p[kept].sum()
    kept = kept[: int(np.searchsorted(mass, top_p)) + 1] if top_p < 1 else kept
    q = np.zeros_like(p)
    q[kept] = p[kept] / p[kept].sum()
    ends = np.cumsum(q)
    token = int(np.searchsorted(ends, uniform, side="right"))
    return token, float(log_p[token]), float(np.abs(ends - uniform).min())


@pytest.mark.parametrize("vocab", [5, 256, 300, 1024, 5003])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (1.5, 4, 0.6), (3.0, 0, 0.999)],
)
def test_against_float64(vocab: int, temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator) * 3
    uniform = torch.rand(40, dtype=torch.float64, generator=generator)
    tokens, log_probs, _ = sample(logits, uniform, batch_of(40, vocab, temperature, top_k, top_p))
    compared = 0
    for row in range(40):
        token, log_p, gap = reference(
            logits[row].numpy(), float(uniform[row]), temperature, top_k, top_p
        )
        if gap < 1e-5:  # a near-tie: float reordering may decide it
            continue
        compared += 1
        assert tokens[row] == token
        assert log_probs[row] == pytest.approx(log_p, abs=1e-5)
    assert compared > 30


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(9),
        SamplingParams(9, temperature=0),
        SamplingParams(9, temperature=0.5, top_k=7, top_p=0.5, min_p=0.1),
        SamplingParams(9, top_k=50),
    ],
)
def test_rows_that_are_alike_are_filled_in(params: SamplingParams) -> None:
    """As those that are made one by one."""
    alike = SamplingBatch.alike(params, 3, 50, torch.device("cpu"))
    each = SamplingBatch.of([params] * 3, 50, torch.device("cpu"))
    for field in fields(SamplingBatch):
        got, wanted = (getattr(one, field.name) for one in (alike, each))
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        else:
            assert got == wanted, field.name


def test_the_widest_of_several_top_k_is_known() -> None:
    params = [SamplingParams(9, top_k=k) for k in (0, 3, 7, 50, 60)]
    batch = SamplingBatch.of(params, 50, torch.device("cpu"))
    assert batch.widest == 7
    assert batch.top_k is not None
    assert batch.top_k.tolist() == [50, 3, 7, 50, 60]


def test_rows_with_different_parameters() -> None:
    logits = torch.randn(4, 600) * 2
    top_k = torch.tensor([600, 2, 600, 5])
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.9], dtype=torch.float64)
    weights = logits.softmax(-1)
    together = restrict(weights, top_k, 5, top_p)
    for row, widest in enumerate((1, 2, 1, 5)):
        own = slice(row, row + 1)
        alone = restrict(weights[own], top_k[own], widest, top_p[own])
        assert torch.equal(alone[0], together[row])
    assert (together > 0).sum(-1)[:2].tolist() == [600, 2]


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_extreme_uniforms_never_draw_an_impossible_token(uniform: float) -> None:
    logits = torch.full((1, 700), -torch.inf)
    logits[0, [3, 400]] = 0.0
    token, *_ = sample(logits, torch.tensor([uniform], dtype=torch.float64), batch_of(1, 700))
    assert int(token) == (3 if uniform == 0 else 400)


def test_distribution() -> None:
    """Chi-square of 20,000 draws: a wrong distribution is found, the right one passes."""
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    logits = probabilities.log().expand(20_000, -1)
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(20_000, dtype=torch.float64, generator=generator)
    tokens, *_ = sample(logits, uniform, batch_of(20_000, 6))
    seen = np.bincount(tokens.numpy(), minlength=6)
    wanted = probabilities.double().numpy() * 20_000
    # 20.5 is exceeded with probability 0.001 at 5 degrees of freedom.
    assert ((seen - wanted) ** 2 / wanted).sum() < 20.5


def test_greedy() -> None:
    logits = torch.randn(8, 90)
    tokens, log_probs, _ = sample(
        logits, torch.rand(8, dtype=torch.float64), batch_of(8, 90, temperature=0)
    )
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).max(-1).values)


@pytest.mark.parametrize("vocab", [5, 300, 773])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.8)])
def test_a_model_that_has_diverged_ends_no_other_row(vocab: int, top_k: int, top_p: float) -> None:
    """Its row has a token of the vocabulary, whose log-probability is no number."""
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    uniforms = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
    alone, log_probs, *_ = sample(logits[::2], uniforms[::2], batch_of(2, vocab, 1.0, top_k, top_p))
    logits[1] = torch.nan
    tokens, scores, *_ = sample(logits, uniforms, batch_of(3, vocab, 1.0, top_k, top_p))
    assert torch.equal(tokens[::2], alone)
    assert torch.equal(scores[::2], log_probs)
    assert 0 <= int(tokens[1]) < vocab
    assert scores[1].isnan()
