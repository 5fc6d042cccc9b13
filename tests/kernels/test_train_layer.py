"""Parts of fused layers: gradients by differences, and Triton's interpreter against float64."""

import pytest
import torch
from triton_interpreter import interpret, needs_triton

from hybridrl.kernels import train_layer
from hybridrl.kernels.decode_torch import ACTIVATIONS
from hybridrl.kernels.train_layer import act_mul, rms_norm, rotary

# Float32 sums in another order; a result in bfloat16 is off by its last bit, or by two where the
# interpreter cuts bits off.
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2**-6}


def _heads(*shape, dtype):
    """Heads before tokens, as a view of tokens before heads."""
    return torch.randn(shape, dtype=dtype).transpose(1, 2)


def _cases(dtype):
    return list(_inputs(dtype))


def _inputs(dtype):
    """Functions and their inputs: widths that no tile divides, and every order of memory."""
    torch.manual_seed(0)
    for x, offset in (
        (torch.randn(1, 13, 100, dtype=dtype), 0.0),
        (torch.randn(1, 700, 40, dtype=dtype), 1.0),  # several tiles
        (torch.randn(1, 5, 3, 24, dtype=dtype), 0.0),
        (_heads(1, 5, 3, 24, dtype=dtype), 1.0),
        (torch.randn(1, 9, 60, dtype=dtype)[..., :33], 0.0),
    ):
        weight = torch.randn(x.shape[-1], dtype=dtype)
        yield lambda x, w, o=offset: rms_norm(x, w, 1e-6, o), (x, weight)
    for heads, kv_heads, dim, size in ((12, 3, 6, 6), (2, 2, 32, 32), (9, 1, 40, 8)):
        query, key = (_heads(1, 7, n, dim, dtype=dtype) for n in (heads, kv_heads))
        if heads == 2:
            query = query.contiguous()
        cos, sin = (torch.randn(1, 7, size, dtype=dtype) for _ in range(2))
        yield lambda q, k, c=cos, s=sin: rotary(q, k, c.to(q.dtype), s.to(q.dtype)), (query, key)
    for name in ACTIVATIONS:
        pair = (3 * torch.randn(1, 11, 300, dtype=dtype), torch.randn(1, 11, 300, dtype=dtype))
        yield lambda g, u, name=name: act_mul(g, u, name), pair


def _results(function, inputs):
    """The results of a function, and the gradients of a random sum of them."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outs = function(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.manual_seed(1)
    grads = [torch.randn(x.shape).to(x.dtype) for x in outs]
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, inputs, grads)]


def test_gradients_are_those_of_differences():
    number = 0
    for function, inputs in _cases(torch.float64):
        small = [x[:, :3].detach().clone(memory_format=torch.preserve_format) for x in inputs[:1]]
        few = [*small, *inputs[1:]] if inputs[1].ndim == 1 else inputs
        assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in few], fast_mode=True)
        number += 1
    assert number == 11


def test_a_norm_is_the_formula():
    for offset in (0.0, 1.0):
        x, weight = torch.randn(4, 50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
        wanted = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight + offset)
        torch.testing.assert_close(rms_norm(x, weight, 1e-3, offset), wanted)


def test_a_frozen_weight_has_no_gradient():
    x, weight = torch.randn(4, 50, requires_grad=True), torch.randn(50)
    rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_no_tokens():
    x, weight = torch.randn(1, 0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    act_mul(rms_norm(x, weight, 1e-6), x).sum().backward()
    assert not weight.grad.any()


def _interpreted():
    interpret()
    train_layer.runs_on = lambda device: True
    launched = []
    from hybridrl.kernels import train_layer_triton

    parts = ("norm", "norm_grad", "rotate", "act_mul", "act_mul_grad")
    for name in parts:
        compute = getattr(train_layer_triton, name)
        counted = lambda *args, name=name, compute=compute: (launched.append(name), compute(*args))  # noqa: E731
        setattr(train_layer_triton, name, counted)
    results = [(dtype, [_results(*case) for case in _cases(dtype)]) for dtype in TOLERANCES]
    # Rows of a batch of any size, bit for bit; gradients of a weight at each call.
    function, (x, weight) = _cases(torch.float32)[0]
    batch, again, alone = (_results(function, (y, weight)) for y in (x, x, x[:, :1]))
    same = [torch.equal(a, b) for a, b in zip(batch, again, strict=True)]
    same.append(torch.equal(batch[0][:, :1], alone[0]))
    return results, {name: launched.count(name) for name in parts}, same


@pytest.mark.long
@needs_triton
def test_kernels_equal_float64(fresh_ranks):
    ((results, launched, same),) = fresh_ranks(1, _interpreted)
    assert launched == {"norm": 13, "norm_grad": 13, "rotate": 12, "act_mul": 6, "act_mul_grad": 6}
    assert all(same)
    for dtype, cases in results:
        wide = [(function, [x.double() for x in inputs]) for function, inputs in _cases(dtype)]
        assert len(cases) == len(wide) == 11
        for number, (got, (function, inputs)) in enumerate(zip(cases, wide, strict=True)):
            grads = _results(function, inputs)
            for x, wanted in zip(got, grads, strict=True):
                assert x.dtype == dtype
                error = (x.double() - wanted).abs().max()
                assert error <= TOLERANCES[dtype] * max(1.0, wanted.abs().max()), (dtype, number)
