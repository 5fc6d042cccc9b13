"""The Triton kernels of a decode step, interpreted, against `decode_torch` in float64."""

import sys
from pathlib import Path

import pytest
import torch
from triton_interpreter import interpret, needs_triton

from hybridrl.kernels import decode_torch

pytestmark = [needs_triton, pytest.mark.long]

# Float32 sums in another order; a result in bfloat16 is off by its last bit, or by two where the
# interpreter cuts bits off.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-6}


def _wide(values):
    return [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in values
    ]


def _assert_close(got, wanted, dtype, case):
    error = (got.double() - wanted.double()).abs().max().item()
    assert error <= TOLERANCES[dtype] * max(1.0, wanted.abs().max().item()), (case, error)


def _layer_inputs(dtype):
    torch.manual_seed(0)
    for features in (100, 1024):
        for residual in (torch.randn(3, features).to(dtype), None):
            inputs = torch.randn(3, features).to(dtype), residual, torch.randn(features).to(dtype)
            yield "residual_norm", (*inputs, 1e-6, float(features == 100))
    for activation in decode_torch.ACTIVATIONS:
        yield "act_mul", (torch.randn(3, 2 * 1300).to(dtype) * 3, activation)


def _layers(dtypes):
    interpret()
    from hybridrl.kernels import layer_triton

    return [
        (name, dtype, inputs, getattr(layer_triton, name)(*inputs))
        for dtype in dtypes
        for name, inputs in _layer_inputs(dtype)
    ]


def test_norms_and_activations(fresh_ranks):
    ((*results,),) = fresh_ranks(1, _layers, list(TOLERANCES))
    assert len(results) == 14
    for name, dtype, inputs, got in results:
        wanted = getattr(decode_torch, name)(*_wide(inputs))
        pairs = zip(got, wanted, strict=True) if name == "residual_norm" else [(got, wanted)]
        for result, want in pairs:
            _assert_close(result, want, dtype, (name, dtype))


def _rotary_inputs(dtype):
    """Head counts below, at and above the heads of a program; whole and partial rotations."""
    torch.manual_seed(1)
    for heads, kv_heads, dim, rotary in ((4, 2, 32, 32), (3, 1, 40, 24), (9, 3, 16, 16)):
        for norms in (None, (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype))):
            yield (
                torch.randn(5, (heads + 2 * kv_heads) * dim).to(dtype),
                norms,
                torch.randn(200, 2, rotary),
                torch.zeros(30, 2, kv_heads, 16, dim, dtype=dtype),
                (torch.randperm(28).view(4, 7) + 1).int(),
                torch.tensor([2, 0, 3, 1, 1]).int(),
                torch.tensor([5, 100, -1, 63, 64]).int(),
                1e-6,
                float(heads == 3),
            )


def _rotated(dtypes):
    interpret()
    from hybridrl.kernels.layer_triton import qk_norm_rotary_write

    # The caches of the inputs are written to.
    return [
        (dtype, inputs, qk_norm_rotary_write(*inputs))
        for dtype in dtypes
        for inputs in _rotary_inputs(dtype)
    ]


def test_rotations_and_what_they_write(fresh_ranks):
    ((*results,),) = fresh_ranks(1, _rotated, list(TOLERANCES))
    assert len(results) == 12
    for dtype, inputs, got in results:
        qkv, norms, rotation, cache, *rest = inputs
        wide = torch.zeros_like(cache, dtype=torch.float64)
        wide_norms = norms and (norms[0].double(), norms[1].double())
        wanted = decode_torch.qk_norm_rotary_write(
            qkv.double(), wide_norms, rotation.double(), wide, *rest
        )
        # A query of a token that does not exist is not read.
        exists = rest[2] >= 0
        _assert_close(got[exists], wanted[exists], dtype, (dtype, norms is None))
        _assert_close(cache, wide, dtype, (dtype, norms is None))
        assert (cache != 0).flatten(1).any(1).sum() == 4, "four tokens, in four blocks"
        assert not cache[0].any()


# (heads, kv_heads, head_dim, options): a head a kv head; shared heads that are no power of two and
# a width that is none; one kv head; all that families ask for.
ATTENTION = [
    (2, 2, 32, {}),
    (6, 2, 40, {}),
    (4, 1, 16, {"window": 600}),
    (6, 2, 32, {"window": 100, "softcap": 20.0, "sinks": True}),
]
# At the ends of blocks, tiles and splits; two tokens of a sequence.
POSITIONS = [0, -1, 15, 16, 63, 64, 511, 512, 513, 1023, 1024, 1199, 1198]
LONGEST = 1200


def _attention_inputs(heads, kv_heads, dim, options, dtype):
    torch.manual_seed(2)
    sequences, pages = len(POSITIONS) - 1, LONGEST // 16
    slots = torch.tensor([*range(sequences), sequences - 1]).int()
    inputs = (
        torch.randn(len(POSITIONS), heads, dim).to(dtype),
        torch.randn(sequences * pages + 1, 2, kv_heads, 16, dim).to(dtype),
        (torch.randperm(sequences * pages).view(sequences, pages) + 1).int(),
        slots,
        torch.tensor(POSITIONS).int(),
    )
    sinks = {"sinks": torch.randn(heads)} if "sinks" in options else {}
    return inputs, dim**-0.5, options | sinks


def _attended(cases):
    """Every case in one batch, by the row alone, and with the bound of a longer batch."""
    interpret()
    from hybridrl.kernels.paged_attention_triton import SPLIT, paged_attention

    results = []
    for case in cases:
        (query, cache, tables, slots, positions), scaling, options = _attention_inputs(*case)
        rest = cache, tables
        batch = paged_attention(query, *rest, slots, positions, LONGEST, scaling, **options)
        alone = []
        for row in range(len(query)):
            own = slice(row, row + 1)
            length = max(1, POSITIONS[row] + 1)
            alone.append(
                paged_attention(
                    query[own], *rest, slots[own], positions[own], length, scaling, **options
                )
            )
        assert LONGEST > 2 * SPLIT, "three splits"
        results.append((batch, torch.cat(alone)))
    return results


def test_attention_equals_float64_in_every_batch(fresh_ranks):
    cases = [(*case, torch.float32) for case in ATTENTION] + [(*ATTENTION[-1], torch.bfloat16)]
    (results,) = fresh_ranks(1, _attended, cases)
    for case, (batch, alone) in zip(cases, results, strict=True):
        inputs, scaling, options = _attention_inputs(*case)
        wide = dict(zip(options, _wide(options.values()), strict=True))
        wanted = decode_torch.paged_attention(*_wide(inputs), LONGEST, scaling, **wide)
        _assert_close(batch, wanted, case[-1], case)
        assert torch.equal(batch, alone), "numbers depend on the batch"
        assert not batch[1].any()


def _several_queries(queries):
    """A chunk of each of two sequences, by blocks of queries and by the query."""
    interpret()
    from hybridrl.kernels.paged_attention_triton import paged_attention

    torch.manual_seed(3)
    query, cache = torch.randn(16, 6, 32), torch.randn(81, 2, 2, 16, 32)
    tables = (torch.randperm(80).view(2, 40) + 1).int()
    slots = torch.tensor([0, 1]).int().repeat_interleave(8)
    # The second chunk has six tokens; two fill it up.
    positions = torch.tensor([*range(505, 513), *range(6), -1, -1]).int()
    inputs = query, cache, tables, slots, positions, 640, 0.2
    results = []
    for window in (None, 30):
        wanted = decode_torch.paged_attention(*inputs, window)
        one, several = (paged_attention(*inputs, window, queries=n) for n in (1, queries))
        results.append((wanted, one, several))
    return results


@pytest.mark.parametrize("queries", [4, 8])
def test_queries_of_a_sequence_together(fresh_ranks, queries):
    """They are a chunk of a prompt, or behind a draft."""
    (results,) = fresh_ranks(1, _several_queries, queries)
    for wanted, one, several in results:
        _assert_close(one, wanted, torch.float32, queries)
        _assert_close(several, wanted, torch.float32, queries)


def _sample_inputs(vocab):
    torch.manual_seed(4)
    rows = 64
    logits = torch.randn(rows, vocab) * 3
    logits[1, : vocab // 2] = -torch.inf  # whole chunks
    logits[2] = -torch.inf
    logits[2, vocab - 1] = 1.0
    logits[3] = 0.0
    logits[3, vocab // 3] = logits[3, vocab // 2] = 7.0  # the first of two likeliest
    temperatures = torch.tensor([0.7, 1.0, 0.0, 2.0]).repeat(rows // 4)
    temperatures[3] = 0.0
    slots = torch.arange(rows)
    slots[8:] = torch.randperm(rows - 8) + 8
    counts = torch.randint(0, 999, (rows,))
    counts[5] = -1
    streams = torch.randint(-(2**62), 2**62, (rows,))
    return logits, slots.int(), counts.int(), streams, temperatures


def _sampled(sizes):
    interpret()
    from hybridrl.kernels.sample_triton import sample

    results = []
    for vocab in sizes:
        logits, slots, counts, *state = _sample_inputs(vocab)
        alone = [
            sample(logits[i : i + 1], slots[i : i + 1], counts[i : i + 1], *state) for i in (0, 9)
        ]
        results.append((sample(logits, slots, counts, *state), alone))
    return results


def test_draws_equal_those_of_torch(fresh_ranks):
    """One chunk, whole chunks, and a part of one behind."""
    sizes = [7, 2048, 5000]
    (results,) = fresh_ranks(1, _sampled, sizes)
    for vocab, ((tokens, log_probs), alone) in zip(sizes, results, strict=True):
        wanted, wanted_log_probs = decode_torch.sample(*_sample_inputs(vocab))
        assert torch.equal(tokens, wanted), vocab
        _assert_close(log_probs, wanted_log_probs, torch.float32, vocab)
        assert tokens[2] == vocab - 1
        assert tokens[3] == vocab // 3
        assert tokens[5] == -1
        assert len(set(tokens.tolist())) > 4
        for row, (token, log_prob) in zip((0, 9), alone, strict=True):
            assert (token, log_prob) == (tokens[row], log_probs[row])


def _uniforms(streams, counts):
    interpret()
    from hybridrl.kernels.sample_triton import uniforms

    return uniforms(streams, counts)


def test_uniforms_are_bit_for_bit_those_of_the_engine(fresh_ranks):
    torch.manual_seed(5)
    streams = torch.randint(-(2**63), 2**63 - 1, (100,))
    counts = torch.randint(0, 2**31 - 1, (100,)).int()
    (drawn,) = fresh_ranks(1, _uniforms, streams, counts)
    assert torch.equal(drawn, decode_torch.uniforms(streams, counts))
    assert len(set(drawn.tolist())) == 100


def _stepped():
    interpret()
    sys.path.insert(0, str(Path(__file__).parent))
    from test_decode_torch import check_steps

    from hybridrl.kernels import sample_triton

    check_steps(sample_triton)
    return True


def test_a_step_advances_what_runs(fresh_ranks):
    assert fresh_ranks(1, _stepped) == [True]
