import pytest
import torch

from hybridrl.kernels.linear_log_probs import linear_log_probs
from hybridrl.kernels.linear_log_probs_torch import column_chunks

TOKENS, VOCAB, WIDTH = 13, 29, 8


def _full(hidden, weight, targets, temperature, bias=None, cap=None):
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _inputs(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(VOCAB, (TOKENS,))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_elements", [1, 5 * VOCAB, TOKENS * VOCAB, 10**9])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_equals_full_logits_in_float64(temperature, chunk_elements, entropy_coef):
    hidden, weight, targets = _inputs(torch.float64)
    grads = torch.randn(TOKENS, dtype=torch.float64)
    want, want_entropy = _full(hidden, weight, targets, temperature)
    wanted = torch.autograd.grad(
        (grads * (want + entropy_coef * want_entropy)).sum(), (hidden, weight)
    )
    got, entropy = linear_log_probs(hidden, weight, targets, temperature, True, chunk_elements)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, rtol=0, atol=1e-12)
    values = got + entropy_coef * entropy if entropy_coef else got
    for result, want_grad in zip(
        torch.autograd.grad((grads * values).sum(), (hidden, weight)), wanted, strict=True
    ):
        torch.testing.assert_close(result, want_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("chunk_elements", [5 * TOKENS, 10**9])
def test_cap_and_bias_equal_full_logits_in_float64(cap, is_biased, chunk_elements):
    hidden, weight, targets = _inputs(torch.float64)
    bias = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True) if is_biased else None
    inputs = [hidden, weight, *([bias] if is_biased else [])]
    grads = torch.randn(2, TOKENS, dtype=torch.float64)
    wanted = _full(hidden, weight, targets, 0.7, bias, cap)
    values = linear_log_probs(
        hidden, weight, targets, 0.7, True, chunk_elements, bias=bias, cap=cap
    )
    for got, want in zip(values, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(grads[0] @ values[0] + grads[1] @ values[1], inputs),
        torch.autograd.grad(grads[0] @ wanted[0] + grads[1] @ wanted[1], inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_gradcheck():
    hidden, weight, targets = _inputs(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, targets, 0.8, True, 3 * VOCAB), (hidden, weight)
    )


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_lower_precision_stays_close(dtype, atol):
    hidden, weight, targets = _inputs(dtype)
    want, want_entropy = _full(hidden.double(), weight.double(), targets, 1.0)
    got, entropy = linear_log_probs(hidden, weight, targets, 1.0, True, 4 * VOCAB)
    assert got.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0, atol=atol)
    (got.sum() + entropy.sum()).backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype


def test_no_tokens_give_zero_gradients():
    _, weight, _ = _inputs(torch.float32)
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    got, entropy = linear_log_probs(hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, True)
    (got.sum() + entropy.sum()).backward()
    assert got.shape == entropy.shape == (0,)
    assert weight.grad.abs().max() == 0
    assert not [*column_chunks(hidden, VOCAB, 100)], "a chunk would be the whole vocabulary"


def test_no_tensor_of_all_logits_exists():
    """Saved for backward and allocated: nothing of the size [tokens, vocab]."""
    saved = []
    hidden = torch.randn(256, WIDTH, requires_grad=True)
    weight = torch.randn(1024, WIDTH, requires_grad=True)
    targets = torch.randint(1024, (256,))
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.numel()) or t, lambda t: t
        ),
        torch.profiler.profile(profile_memory=True) as profile,
    ):
        got, _ = linear_log_probs(hidden, weight, targets, chunk_elements=8 * 1024)
        got.sum().backward()
    assert max(saved) == weight.numel()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 256 * 1024 * 4 / 4, "a quarter of the logits at most"


def test_temperature_must_be_positive():
    hidden, weight, targets = _inputs(torch.float32)
    with pytest.raises(ValueError, match="temperature=0"):
        linear_log_probs(hidden, weight, targets, 0.0)


def test_a_cap_must_be_positive():
    with pytest.raises(ValueError, match=r"cap=0.0"):
        linear_log_probs(*_inputs(torch.float32), cap=0.0)


def test_a_bias_of_another_shape_or_dtype_is_refused():
    for bias in (torch.zeros(VOCAB - 1), torch.zeros(VOCAB, dtype=torch.float64)):
        with pytest.raises(ValueError, match=rf"wanted \[{VOCAB}\] torch.float32"):
            linear_log_probs(*_inputs(torch.float32), bias=bias)


def test_one_dtype_is_wanted():
    hidden, weight, targets = _inputs(torch.float32)
    with pytest.raises(ValueError, match=r"hidden is torch.bfloat16, weight is torch.float32"):
        linear_log_probs(hidden.bfloat16(), weight, targets)


@pytest.mark.parametrize("target", [-1, VOCAB])
def test_a_target_outside_of_the_vocabulary_is_impossible(target):
    hidden, weight, _ = _inputs(torch.float32)
    got, _ = linear_log_probs(hidden, weight, torch.full((TOKENS,), target))
    assert got.eq(-torch.inf).all()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_leaves_the_other_gradient(frozen):
    inputs = dict(zip(("hidden", "weight", "targets"), _inputs(torch.float64), strict=True))
    (other,) = {"hidden", "weight"} - {frozen}
    wanted = torch.autograd.grad(linear_log_probs(**inputs)[0].sum(), inputs[other])
    inputs[frozen] = inputs[frozen].detach()
    got = torch.autograd.grad(linear_log_probs(**inputs)[0].sum(), inputs[other])
    assert torch.equal(got[0], wanted[0])
