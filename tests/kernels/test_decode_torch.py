"""The torch versions of the decode kernels against transformers, SDPA and the engine's draws."""

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from hybridrl.engines.rollout import random, sampling
from hybridrl.engines.rollout.interface import SamplingParams
from hybridrl.kernels import decode_torch
from hybridrl.kernels.decode_state import FULL, RUNNING, STOPPED, VACANT, DecodeState


def test_norms_are_those_of_transformers():
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    for norm, offset in ((Qwen3RMSNorm(40, 1e-6), 0.0), (GemmaRMSNorm(40, 1e-6), 1.0)):
        norm.weight.data = weight
        got, total = decode_torch.residual_norm(x, residual, weight, 1e-6, offset)
        torch.testing.assert_close(got, norm(x + residual))
        assert torch.equal(total, x + residual)


@pytest.mark.parametrize("rotary", [24, 16])
def test_heads_are_rotated_as_in_transformers_and_cached(rotary):
    """Partly rotated ones, too; a token that does not exist leaves the cache as it is."""
    torch.manual_seed(1)
    heads, kv_heads, dim, size = 4, 2, 24, 8
    qkv = torch.randn(3, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(40, rotary // 2)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    signed = torch.cat((-sin[:, : rotary // 2], sin[:, rotary // 2 :]), -1)
    cache = torch.zeros(6, 2, kv_heads, size, dim)
    tables = torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0]], dtype=torch.int32)
    slots, positions = torch.tensor([1, 0, 0]).int(), torch.tensor([3, 17, -1]).int()
    norms = torch.randn(dim), torch.randn(dim)
    query = decode_torch.qk_norm_rotary_write(
        qkv, norms, torch.stack((cos, signed), 1), cache, tables, slots, positions, 1e-6
    )

    q, k, v = qkv.view(3, -1, dim).split((heads, kv_heads, kv_heads), 1)
    q, k = (functional.rms_norm(x, (dim,), w, 1e-6) for x, w in zip((q, k), norms, strict=True))
    at = positions.clamp(min=0)
    turned = apply_rotary_pos_emb(q[..., :rotary], k[..., :rotary], cos[at], sin[at])
    q, k = (torch.cat((t, x[..., rotary:]), -1) for t, x in zip(turned, (q, k), strict=True))
    torch.testing.assert_close(query[:2], q[:2])
    torch.testing.assert_close(cache[5, :, :, 3], torch.stack((k[0], v[0])))
    torch.testing.assert_close(cache[3, :, :, 1], torch.stack((k[1], v[1])))
    assert cache.count_nonzero() == 2 * 2 * kv_heads * dim


def test_attention_is_that_of_sdpa():
    torch.manual_seed(2)
    cache = torch.randn(9, 2, 2, 16, 24)
    tables = (torch.randperm(8).view(2, 4) + 1).int()
    slots, positions = torch.tensor([1, 0, 1, 0]).int(), torch.tensor([0, 60, 33, -1]).int()
    query = torch.randn(4, 6, 24)
    got = decode_torch.paged_attention(query, cache, tables, slots, positions, 64, 0.3, window=20)
    for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        kept = cache[tables[slot].long()].permute(1, 2, 0, 3, 4).reshape(2, 2, -1, 24)
        keys, values = kept[:, :, max(0, position - 19) : position + 1]
        wanted = functional.scaled_dot_product_attention(
            query[token, :, None], keys, values, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(got[token], wanted[:, 0] if position >= 0 else got[0] * 0)


def test_uniforms_are_bit_for_bit_those_of_the_engine():
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 2**64, 1000, dtype=np.uint64)
    counts = generator.integers(0, 2**31, 1000)
    got = decode_torch.uniforms(
        torch.from_numpy(keys.view(np.int64)), torch.from_numpy(counts).int()
    )
    assert np.array_equal(got.numpy(), random.uniforms(keys, counts))


def test_draws_are_those_of_the_engine():
    torch.manual_seed(3)
    rows, vocab = 200, 3000
    logits = torch.randn(rows, vocab) * 2
    streams = torch.randint(-(2**62), 2**62, (rows,))
    temperatures = torch.tensor([0.7, 1.0, 0.0, 2.0]).repeat(rows // 4)
    slots, counts = torch.randperm(rows).int(), torch.randint(0, 999, (rows,)).int()
    got = decode_torch.sample(logits, slots, counts, streams, temperatures)
    params = [SamplingParams(999, temperature=float(t)) for t in temperatures[slots]]
    drawn = random.uniforms(streams[slots].numpy().view(np.uint64), counts.numpy())
    batch = sampling.SamplingBatch.of(params, vocab, torch.device("cpu"))
    tokens, log_probs, _ = sampling.sample(logits, torch.from_numpy(drawn), batch)
    assert torch.equal(got[0].long(), tokens)
    torch.testing.assert_close(got[1], log_probs)


def filled_state() -> DecodeState:
    """Slots 0 to 4: one goes on, stops, is full, has stopped before, and is vacant."""
    state = DecodeState.vacant(5, 3, 2, torch.device("cpu"))
    state.tokens[:4] = torch.tensor([7, 8, 9, 10])
    state.lengths[:4] = torch.tensor([4, 5, 6, 7])
    state.counts[:4] = torch.tensor([1, 2, 3, 3])
    state.limits[:4] = torch.tensor([3, 4, 4, 4])
    state.stops[:4, 0] = torch.tensor([20, 21, 22, 23])
    state.stops[1, 1] = 30
    state.ended[:4] = torch.tensor([RUNNING, RUNNING, RUNNING, STOPPED])
    return state


def check_steps(kernels) -> None:
    """A step of `filled_state` by a module's `begin_step` and `advance`."""
    state = filled_state()
    slots = torch.tensor([3, 1, 0, 5, 2], dtype=torch.int32)
    tokens, positions, counts = kernels.begin_step(state, slots)
    assert tokens[1:3].tolist() == [8, 7]
    assert positions.tolist() == [-1, 5, 4, -1, 6]
    assert counts.tolist() == [-1, 2, 1, -1, 3]
    kernels.advance(state, slots, torch.tensor([-1, 30, 21, -1, 21], dtype=torch.int32))
    assert state.ended.tolist() == [RUNNING, STOPPED, FULL, STOPPED, VACANT, VACANT]
    assert state.tokens.tolist() == [21, 30, 21, 10, 0, 0]
    assert state.lengths.tolist() == [5, 6, 7, 7, 0, 0]
    assert state.counts.tolist() == [2, 3, 4, 3, 0, 0]


def test_a_step_advances_what_runs():
    check_steps(decode_torch)
