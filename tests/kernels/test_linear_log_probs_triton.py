"""The Triton kernels in Triton's interpreter, and on a GPU, against float64."""

import pytest
import torch
import torch.distributed as dist
from triton_interpreter import interpret, needs_triton

from hybridrl.kernels import linear_log_probs_torch
from hybridrl.kernels.linear_log_probs import VocabShard, linear_log_probs

pytestmark = pytest.mark.long

# (tokens, vocab, features): one of each; below, at and above blocks of 128, 128 and 64 (in float32
# 64, 64 and 32); splits of several blocks and an empty one; a chunk of the backward pass that ends
# within a block.
SIZES = [(1, 1, 1), (1, 129, 65), (127, 128, 64), (130, 1500, 70), (300, 257, 16)]
PROGRAMS = 10
# Float32 sums in another order; the gradient of the logits is rounded to the inputs' dtype.
VALUES = 1e-5
GRADIENTS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CASES = [(*size, torch.float32, True, 1.6) for size in SIZES] + [
    (*SIZES[3], torch.bfloat16, True, 0.7),
    (*SIZES[4], torch.float16, False, 0.7),
]
MORE_CASES = [
    (*size, dtype, True, 1.6) for dtype in (torch.float16, torch.bfloat16) for size in SIZES
] + [(*SIZES[3], dtype, with_entropy, 0.7) for dtype in GRADIENTS for with_entropy in (True, False)]


def _inputs(tokens, vocab, features, dtype):
    torch.manual_seed(tokens + vocab + features)
    hidden = (torch.randn(features, tokens) * 2 / features**0.5).to(dtype).T  # not contiguous
    weight = torch.randn(vocab, features).to(dtype)
    targets = torch.randint(vocab, (tokens,))
    targets[-1] = vocab - 1
    return hidden, weight, targets, torch.randn(2, tokens, dtype=torch.float64)


def _results(hidden, weight, targets, grads, with_entropy, *args):
    """Values and the gradients of both inputs."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    values = linear_log_probs(hidden, weight, targets, *args)
    values = values if with_entropy else values[:1]
    loss = sum(g.to(v) @ v for g, v in zip(grads, values, strict=False))
    return [result.detach() for result in (*values, *torch.autograd.grad(loss, (hidden, weight)))]


def _wanted(tokens, vocab, features, dtype, with_entropy, temperature):
    hidden, weight, targets, grads = _inputs(tokens, vocab, features, dtype)
    inputs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    log_p = torch.log_softmax(inputs[0] @ inputs[1].T / temperature, -1)
    values = [log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
    values = values if with_entropy else values[:1]
    loss = sum(g @ v for g, v in zip(grads, values, strict=False))
    return [result.detach() for result in (*values, *torch.autograd.grad(loss, inputs))]


def _interpret():
    interpret()
    from hybridrl.kernels import linear_log_probs_triton

    linear_log_probs_triton.WANTED_PROGRAMS = PROGRAMS


def _interpreted(cases):
    _interpret()
    return [
        _results(
            *_inputs(*case[:4]), with_entropy, temperature, with_entropy, 2**16, None, "triton"
        )
        for *case, with_entropy, temperature in cases
    ]


def _assert_close(got, want, dtype, case, gradients=2):
    """`got` and `want`: values, then the gradients; errors relative to the largest element."""
    for i, (result, wanted) in enumerate(zip(got, want, strict=True)):
        tolerance = VALUES if i < len(want) - gradients else GRADIENTS[dtype]
        error = (result.double() - wanted).abs().max().item()
        assert error <= tolerance * max(1.0, wanted.abs().max().item()), (case, i, error)


@needs_triton
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)])
def test_interpreted_equals_float64(fresh_ranks, cases):
    (results,) = fresh_ranks(1, _interpreted, cases)
    for case, got in zip(cases, results, strict=True):
        _assert_close(got, _wanted(*case), case[3], case)


def _head_inputs(tokens, vocab, features, dtype):
    hidden, weight, targets, grads = _inputs(tokens, vocab, features, dtype)
    return [hidden, weight, torch.randn(vocab).to(dtype)], targets, grads


def _capped_and_biased(cases):
    _interpret()
    results = []
    for *case, with_entropy, cap in cases:
        inputs, targets, grads = _head_inputs(*case)
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        options = (1.3, with_entropy, 2**16, None, "triton")
        hidden, weight, bias = inputs
        values = linear_log_probs(hidden, weight, targets, *options, bias=bias, cap=cap)
        values = values if with_entropy else values[:1]
        loss = sum(g.to(v) @ v for g, v in zip(grads, values, strict=False))
        results.append([x.detach() for x in (*values, *torch.autograd.grad(loss, inputs))])
    return results


@pytest.mark.layouts
@needs_triton
def test_interpreted_cap_and_bias_equal_float64(fresh_ranks):
    cases = [
        (*SIZES[3], torch.float32, True, 2.0),
        (*SIZES[1], torch.float32, True, None),
        (*SIZES[4], torch.bfloat16, False, 2.0),
    ]
    (results,) = fresh_ranks(1, _capped_and_biased, cases)
    for (*case, with_entropy, cap), got in zip(cases, results, strict=True):
        inputs, targets, grads = _head_inputs(*case)
        inputs = [tensor.double().requires_grad_() for tensor in inputs]
        logits = inputs[0] @ inputs[1].T + inputs[2]
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        log_p = torch.log_softmax(logits / 1.3, -1)
        values = [log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
        values = values if with_entropy else values[:1]
        loss = sum(g @ v for g, v in zip(grads, values, strict=False))
        wanted = [x.detach() for x in (*values, *torch.autograd.grad(loss, inputs))]
        _assert_close(got, wanted, case[3], (case, cap), gradients=3)


def _sharded_interpreted(cases):
    _interpret()
    results = []
    for tokens, vocab, features, dtype, with_entropy, temperature in cases:
        hidden, weight, targets, grads = _inputs(tokens, vocab, features, dtype)
        rows = -(-vocab // dist.get_world_size())
        start = rows * dist.get_rank()
        mine = weight[start : start + rows]
        local = torch.cat([mine, torch.full((rows + 1 - len(mine), features), 9.0).to(dtype)])
        shard = VocabShard(dist.group.WORLD, min(start, vocab), len(mine))
        options = (temperature, with_entropy, 2**16, shard, "triton")
        got = _results(hidden, local, targets, grads, with_entropy, *options)
        results.append((got, len(mine)))
    return results


@pytest.mark.layouts
@needs_triton
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_interpreted_shards_equal_float64(fresh_ranks, size):
    """An uneven vocabulary of several blocks a rank; one of which the third rank holds nothing."""
    cases = [
        (33, vocab, 40, dtype, with_entropy, 0.8)
        for vocab in (601, 4)
        for dtype in GRADIENTS
        for with_entropy in (True, False)
    ]
    by_rank = fresh_ranks(size, _sharded_interpreted, cases)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        for got, valid in results:
            assert got[-1][valid:].eq(0).all(), "padding has a gradient"
            for mine, first in zip(got[:-1], results[0][0][:-1], strict=True):
                assert torch.equal(mine, first), f"ranks differ: {case}"
        weight_grad = torch.cat([got[-1][:valid] for got, valid in results])
        _assert_close([*results[0][0][:-1], weight_grad], _wanted(*case), case[3], case)


@needs_triton
def test_triton_refuses_float64():
    hidden, weight, targets, _ = _inputs(3, 5, 4, torch.float64)
    with pytest.raises(ValueError, match="computes in float32"):
        linear_log_probs(hidden, weight, targets, backend="triton")


@pytest.mark.parametrize("width", [1, 100, 2000])
def test_chunks_cover_the_vocabulary_in_whole_blocks(width):
    hidden = torch.zeros(50, 7)
    chunks = list(linear_log_probs_torch.column_chunks(hidden, 5003, 50 * width))
    assert [c.start for c in chunks] == [0, *(c.stop for c in chunks[:-1])]
    assert chunks[-1].stop == 5003
    assert {c.start % 128 for c in chunks} == {0} or width < 128
    assert max(c.stop - c.start for c in chunks) <= max(width, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "vocab", "features"), [(1, 129, 64), (1000, 50257, 200)])
def test_on_a_gpu(tokens, vocab, features, dtype):
    """What `auto` takes equals float64, the same bits each time, and holds no logits."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no NVIDIA GPU of compute capability 8.0 or above")
    wanted = _wanted(tokens, vocab, features, dtype, True, 0.8)
    inputs = [tensor.cuda() for tensor in _inputs(tokens, vocab, features, dtype)]
    options = (True, 0.8, True, 2**22)
    got = _results(*inputs, *options)
    _assert_close([result.cpu() for result in got], wanted, dtype, (tokens, vocab, features))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = _results(*inputs, *options)
    extra = torch.cuda.max_memory_allocated() - before
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    if tokens > 1:
        assert extra < tokens * vocab * 2 / 2, "half of the logits in the inputs' dtype"
