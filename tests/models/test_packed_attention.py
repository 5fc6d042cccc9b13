"""Packed attention against scores as a matrix, in float64; and what flash-attn is handed.

torch's `varlen_attn` runs on a reference of its kernel: `flash_reference`.
"""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from flash_reference import flash_on_cpu
from torch.nn import functional

from hybridrl.config import Attention
from hybridrl.models.chunk_keys import ChunkKeys, SequenceKeys
from hybridrl.models.context_parallel import OwnTokens
from hybridrl.models.packed_attention import (
    _grouped_heads,
    make_chunk_packing,
    make_packing,
    packed_attention,
)

LENGTHS, HEADS, KV_HEADS = [3, 5, 5, 9], 4, 2
TOKENS = sum(LENGTHS)
CASES = {
    "plain": {},
    "window": {"sliding_window": 4},
    "capped": {"softcap": 1.5},
    "sinks": {"s_aux": True},
    "capped window": {"softcap": 1.5, "sliding_window": 4},
    "window with sinks": {"s_aux": True, "sliding_window": 4},
}
KINDS = [(Attention.torch, case) for case in CASES]
KINDS += [(Attention.varlen, "plain"), (Attention.varlen, "window")]  # it has no caps, no sinks
WIDTHS = {"equal": (8, 8), "narrower values": (12, 6), "wider values": (6, 10)}


def _inputs(key_size, value_size):
    torch.manual_seed(0)
    shapes = [(HEADS, key_size), (KV_HEADS, key_size), (KV_HEADS, value_size)]
    tensors = [torch.randn(1, h, TOKENS, d, dtype=torch.float64) for h, d in shapes]
    return [x.requires_grad_() for x in (*tensors, torch.randn(HEADS, dtype=torch.float64))]


def _by_scores(query, key, value, sinks, scaling, softcap=None, sliding_window=None, s_aux=None):
    """[tokens, heads, value_dim], one sequence after the other."""
    key, value = (x[0].repeat_interleave(HEADS // KV_HEADS, 0) for x in (key, value))
    outputs = []
    for q, k, v in zip(*(x.split(LENGTHS, 1) for x in (query[0], key, value)), strict=True):
        scores = q @ k.transpose(1, 2) * scaling
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        hidden = (distance < 0) | (distance >= (sliding_window or TOKENS))
        weights = scores.masked_fill(hidden, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        total = total + sinks.exp()[:, None, None] if s_aux else total
        outputs.append((weights / total @ v).transpose(0, 1))
    return torch.cat(outputs)


def kernels(kind):
    """Within, this implementation runs on a CPU."""
    return flash_on_cpu() if kind is Attention.varlen else nullcontext()


@pytest.fixture
def kind(request):
    """An implementation, which runs on the test's CPU."""
    with kernels(request.param):
        yield request.param


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(("kind", "case"), KINDS, indirect=["kind"])
def test_equals_scores_as_a_matrix(kind, case, widths):
    inputs, keywords = _inputs(*WIDTHS[widths]), CASES[case]
    packing = make_packing(LENGTHS, kind, torch.device("cpu"))
    passed = keywords | ({"s_aux": inputs[3]} if "s_aux" in keywords else {})
    out, _ = packed_attention(
        torch.nn.Module(), *inputs[:3], None, scaling=0.4, packing=packing, **passed
    )
    want = _by_scores(*inputs, 0.4, **keywords)
    torch.testing.assert_close(out[0], want, rtol=0, atol=1e-12)
    used = inputs if "s_aux" in keywords else inputs[:3]
    weight = torch.randn_like(want)
    gradients = zip(
        torch.autograd.grad(out[0], used, weight),
        torch.autograd.grad(want, used, weight),
        strict=True,
    )
    for got, gradient in gradients:
        torch.testing.assert_close(got, gradient, rtol=0, atol=1e-12)


def test_varlen_makes_one_call_a_layer(monkeypatch):
    """Where torch's attention makes one for each of the row's three lengths."""
    attend, lengths = functional.scaled_dot_product_attention, []

    def noted(query, *args, **options):
        lengths.append(query.shape[2])
        return attend(query, *args, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    inputs, outputs = _inputs(8, 8)[:3], {}
    with flash_on_cpu() as calls:
        for kind in (Attention.torch, Attention.varlen):
            packing = make_packing(LENGTHS, kind, torch.device("cpu"))
            out, _ = packed_attention(torch.nn.Module(), *inputs, None, packing=packing)
            outputs[kind] = [out, *torch.autograd.grad(out.sum(), inputs)]
    assert lengths == [3, 5, 9]
    assert calls == {"forward": 1, "backward": 1}
    for got, want in zip(outputs[Attention.varlen], outputs[Attention.torch], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grouped", [True, False])
def test_varlen_says_that_heads_are_shared_where_torch_asks(grouped, monkeypatch):
    """torch 2.11 has no argument for it."""
    said = []

    def newer(query, key, value, *rest, scale=None, window_size=(-1, -1), enable_gqa=False):
        said.append(enable_gqa)
        return query

    def older(query, key, value, *rest, scale=None, window_size=(-1, -1)):
        said.append(None)
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", newer if grouped else older)
    _grouped_heads.cache_clear()
    packing = make_packing(LENGTHS, Attention.varlen, torch.device("cpu"))
    packed_attention(torch.nn.Module(), *_inputs(8, 8)[:3], None, packing=packing)
    _grouped_heads.cache_clear()
    assert said == [True if grouped else None]


def _shared(kind, case, heads, kv_heads):
    """A rank with half of the row: output and gradients of its tokens, and of all sinks."""
    inputs = [x.detach() for x in _inputs(8, 6)]
    group = dist.group.WORLD
    tensors = [x[:, :h] for x, h in zip(inputs, (heads, kv_heads, kv_heads), strict=False)]
    own = [x.chunk(group.size(), 2)[group.rank()].clone().requires_grad_() for x in tensors]
    sinks = inputs[3][:heads].requires_grad_()
    packing = make_packing(LENGTHS, kind, torch.device("cpu"), group)
    passed = CASES[case] | ({"s_aux": sinks} if "s_aux" in CASES[case] else {})
    options = {"scaling": 0.4, "packing": packing, **passed}
    with kernels(kind):
        out, _ = packed_attention(torch.nn.Module(), *own, None, **options)
        used = [*own, sinks] if "s_aux" in passed else own
        return out.detach(), torch.autograd.grad(out, used, torch.ones_like(out))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (3, 1)])
@pytest.mark.parametrize(("kind", "case"), KINDS)
def test_a_shared_row_equals_one_rank(ranks, kind, case, heads, kv_heads):
    """Two ranks of 11 tokens, with heads of keys and values for both, or for one alone.

    Three heads are no multiple of the ranks, which then gather the keys and values of the row.
    """
    inputs = _inputs(8, 6)
    tensors = [inputs[0][:, :heads], inputs[1][:, :kv_heads], inputs[2][:, :kv_heads]]
    packing = make_packing(LENGTHS, Attention.torch, torch.device("cpu"))
    sinks = {"s_aux": inputs[3][:heads]} if "s_aux" in CASES[case] else {}
    out, _ = packed_attention(
        torch.nn.Module(), *tensors, None, scaling=0.4, packing=packing, **CASES[case] | sinks
    )
    want = torch.autograd.grad(out, [*tensors, *sinks.values()], torch.ones_like(out))
    shares = ranks(2, _shared, kind, case, heads, kv_heads)
    torch.testing.assert_close(torch.cat([x for x, _ in shares], 1), out, rtol=0, atol=1e-12)
    by_kind = zip(*(gradients for _, gradients in shares), strict=True)
    for number, (of_ranks, gradient) in enumerate(zip(by_kind, want, strict=True)):
        got = sum(of_ranks) if number == 3 else torch.cat(of_ranks, 2)
        torch.testing.assert_close(got, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "case"), KINDS, indirect=["kind"])
def test_chunks_equal_the_whole_sequence(kind, case):
    """Chunks of 9, 9 and 4 tokens: backward in reverse, with keys and values of earlier passes."""
    inputs, keywords = _inputs(8, 6), CASES[case]
    keywords = keywords | ({"s_aux": inputs[3]} if "s_aux" in keywords else {})
    whole = make_packing([TOKENS], Attention.torch, torch.device("cpu"))
    out, _ = packed_attention(
        torch.nn.Module(), *inputs[:3], None, scaling=0.4, packing=whole, **keywords
    )
    weight = torch.randn_like(out)
    used = inputs if "s_aux" in CASES[case] else inputs[:3]
    want = torch.autograd.grad(out, used, weight)

    module, sequence, rows = torch.nn.Module(), SequenceKeys(TOKENS, for_backward=True), []
    for start, stop in [(0, 9), (9, 18), (18, TOKENS)]:
        keys = ChunkKeys(sequence, start, stop)
        packing = make_chunk_packing(keys, kind, torch.device("cpu"))
        own = [x.detach()[:, :, start:stop].requires_grad_() for x in inputs[:3]]
        rows.append((slice(start, stop), own, packing))

    def run(own, packing):
        return packed_attention(module, *own, None, scaling=0.4, packing=packing, **keywords)[0]

    with torch.no_grad():
        for place, own, packing in rows:
            torch.testing.assert_close(run(own, packing), out[:, place], rtol=0, atol=1e-12)
    for place, own, packing in reversed(rows):
        run([x * 1 for x in own], packing).backward(weight[:, place])
    got = [torch.cat([own[i].grad for _, own, _ in rows], 2) for i in range(3)]
    got += [inputs[3].grad] if "s_aux" in CASES[case] else []
    for gradient, expected in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_flash_gets_the_keys_of_earlier_chunks(monkeypatch):
    calls = []

    def flash(q, k, v, **options):
        calls.append((len(q), len(k), options))
        return torch.zeros_like(q)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash))
    module, sequence = torch.nn.Module(), SequenceKeys(10, for_backward=False)
    for start, stop in [(0, 6), (6, 10)]:
        keys = ChunkKeys(sequence, start, stop)
        packing = make_chunk_packing(keys, Attention.flash, torch.device("cpu"))
        tensors = [x[:, :, start:stop] for x in _inputs(8, 8)[:3]]
        with torch.no_grad():
            packed_attention(module, *tensors, None, packing=packing)
    assert not sequence.kept, "nothing attends to them any more"
    assert calls[1][:2] == (4, 10)
    assert calls[1][2]["cu_seqlens_q"].tolist() == [0, 4]
    assert calls[1][2]["cu_seqlens_k"].tolist() == [0, 10]
    assert calls[1][2]["max_seqlen_k"] == 10


@pytest.mark.parametrize(
    ("blocks", "rank", "before", "own", "keys", "ends"),
    [
        ([(1, 3), (1, 5)], 0, 0, ((1, 3), (1, 1)), slice(0, 4), ([0, 3, 4], [0, 3, 4])),
        ([(1, 3), (1, 5)], 1, 0, ((1, 4),), slice(3, 8), ([0, 4], [0, 5])),
        ([(4, 2)], 1, 0, ((1, 2), (1, 2)), slice(4, 8), ([0, 2, 4], [0, 2, 4])),
        ([(2, 1), (2, 3)], 1, 0, ((1, 1), (1, 3)), slice(2, 8), ([0, 1, 4], [0, 3, 6])),
        ([(1, 8)], 1, 16, ((1, 4),), slice(0, 24), ([0, 4], [0, 24])),
    ],
)
def test_what_the_queries_of_a_rank_see(blocks, rank, before, own, keys, ends):
    """Two ranks have four tokens each."""
    group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    tokens = OwnTokens(blocks, group, torch.device("cpu"), before)
    assert (tokens.blocks, tokens.keys) == (own, keys)
    assert tuple(x.tolist() for x in tokens.starts()) == ends


def test_a_cap_with_sinks_is_refused():
    *tensors, sinks = _inputs(8, 8)
    packing = make_packing(LENGTHS, Attention.torch, torch.device("cpu"))
    with pytest.raises(ValueError, match="Module: softcap with s_aux is not supported"):
        packed_attention(
            torch.nn.Module(), *tensors, None, packing=packing, softcap=1.0, s_aux=sinks
        )


def test_flash_gets_the_cap_and_one_width(monkeypatch):
    """Padded to the wider of keys and values; the scale is that of the keys as they are."""
    calls = []

    def flash(q, k, v, **options):
        calls.append((q.shape, k.shape, v.shape, options))
        return torch.zeros_like(q)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash))
    packing = make_packing(LENGTHS, Attention.flash, torch.device("cpu"))
    *tensors, _ = _inputs(16, 8)
    out, _ = packed_attention(torch.nn.Module(), *tensors, None, packing=packing, softcap=50.0)
    ((query, key, value, options),) = calls
    assert (query, key, value) == ((TOKENS, 4, 16), (TOKENS, 2, 16), (TOKENS, 2, 16))
    assert (options["softcap"], options["softmax_scale"]) == (50.0, 0.25)
    assert out.shape == (1, TOKENS, HEADS, 8)
