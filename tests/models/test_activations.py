"""Activations that families add: scores as a tensor, a sink's feature, a capped head."""

import pytest
import torch
from transformers import AutoConfig

from hybridrl.config import Attention
from hybridrl.engines.train.truncated import truncated
from hybridrl.kernels.linear_log_probs import linear_log_probs
from hybridrl.models import activations
from hybridrl.models.activations import (
    PeakMemory,
    head_activations,
    layer_activations,
    prefill_activations,
    scoring_activations,
    scoring_head_activations,
)

TOKENS, HEADS, VOCAB, SCORED = 256, 4, 43, 100
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def _layer(attention, model_type="gemma2", dtype=torch.float32, row=None, **changes):
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    return layer_activations(config, TOKENS, dtype=dtype, attention=attention, **(row or {}))


def _scored(cap):
    config = AutoConfig.for_model("gemma2", **SHAPE, attn_logit_softcapping=cap)
    options = {"dtype": torch.float32, "attention": Attention.torch}
    return scoring_activations(config, TOKENS, **options)


def _head(**changes):
    config = AutoConfig.for_model(**{"model_type": "gemma2", **SHAPE, **changes})
    return head_activations(config, SCORED, dtype=torch.float32, triton=False)


def test_a_model_in_another_directory_is_not_counted_again(monkeypatch):
    """Each run makes its own; a model of another size is counted."""
    counted = []
    count = activations._narrow_model
    monkeypatch.setattr(
        activations, "_narrow_model", lambda *args: counted.append(args) or count(*args)
    )
    for path, width in (("one", 72), ("two", 72), ("two", 80)):
        _layer(Attention.torch, name_or_path=path, intermediate_size=width)
    assert len(counted) == 2


def test_capped_scores_are_a_tensor_in_torch():
    scores = 4 * HEADS * TOKENS**2
    free, capped = (_layer(Attention.torch, attn_logit_softcapping=cap) for cap in (None, 50.0))
    assert capped.kept - free.kept >= 2 * scores  # the tangents and the weights
    assert _scored(50.0) >= 2 * scores > _scored(None)
    assert _layer(Attention.flash) == _layer(Attention.flash, attn_logit_softcapping=None)


@pytest.mark.parametrize("count", [layer_activations, activations.backward_in_halves])
def test_under_sequence_parallelism_a_row_is_filled_up(count):
    """To a multiple of tp, as the engine makes it."""
    config = AutoConfig.for_model("qwen3", **SHAPE)
    options = {"dtype": torch.bfloat16, "attention": Attention.torch, "tp": 2}
    odd, even = (count(config, n, **options, sequence_parallel=True) for n in (255, 256))
    assert odd == even


def test_a_sink_needs_no_scores():
    """A feature more in each query, key and value, and a token more."""
    kept = _layer(Attention.torch, "gpt_oss", torch.bfloat16, num_local_experts=4).kept
    fused = _layer(Attention.flash, "gpt_oss", torch.bfloat16, num_local_experts=4).kept
    assert 0 < kept - fused < 2 * HEADS * TOKENS**2


def test_a_capped_head_keeps_the_slopes_of_a_chunk():
    free, capped = (_head(final_logit_softcapping=cap) for cap in (None, 30.0))
    assert capped.backward == free.backward + 4 * SCORED * VOCAB
    assert capped.kept == free.kept


def test_a_heads_bias_has_a_gradient():
    """The head of Phi has a bias, that of Llama none."""
    without, with_bias = (_head(model_type=name, head_dim=None) for name in ("llama", "phi"))
    assert with_bias.backward - without.backward == 4 * VOCAB


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def test_experts_are_counted_in_every_format():
    """Norms and routers compute in float32 in all of them."""
    half, other, wide = (
        _layer(Attention.torch, "qwen3_moe", dtype, **EXPERTS)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    )
    assert other == half
    assert 1.5 * half.kept < wide.kept < 2 * half.kept
    config = AutoConfig.for_model("qwen3_moe", **SHAPE, **EXPERTS)
    half, wide = (
        prefill_activations(config, TOKENS, TOKENS, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert half < wide < 2 * half


def test_ranks_of_ep_have_a_share_of_the_experts():
    """They have a share of their gradients, too. Ranks of tp have a share of the tokens."""
    many = EXPERTS | {"num_experts": 256}
    whole, spread, fewer = (
        _layer(Attention.torch, "qwen3_moe", torch.bfloat16, row=row, **many)
        for row in ({}, {"ep": 4}, {"ep": 4, "tp": 2})
    )
    features = SHAPE["hidden_size"]
    weights = 2 * 256 * 3 * many["moe_intermediate_size"] * features
    assert whole.backward - spread.backward > weights / 2
    rows = 2 * TOKENS * many["num_experts_per_tok"] * features
    assert spread.kept - fewer.kept > rows / 2


def test_ranks_that_attend_with_all_heads_keep_as_much():
    """OLMo 2 and OLMoE normalize over all heads, so that tp divides the projections alone."""
    all_heads = {"num_key_value_heads": HEADS}
    saved = {}
    for family in ("olmo2", "llama"):
        rows = ({"tp": 1}, {"tp": 2})
        alone, cut = (_layer(Attention.flash, family, row=row, **all_heads).kept for row in rows)
        saved[family] = alone - cut
    assert saved["llama"] > saved["olmo2"] + 4 * TOKENS * HEADS * SHAPE["head_dim"]
    mixture = EXPERTS | all_heads
    assert _layer(Attention.flash, "olmoe", row={"ep": 1, "tp": 2}, **mixture).kept > 0
    config = AutoConfig.for_model("olmoe", **SHAPE | mixture)
    assert prefill_activations(config, TOKENS, TOKENS, dtype=torch.float32, tp=2) > 0


def test_ranks_that_share_a_row_keep_the_output_of_attention_twice():
    """With the heads of a rank as attention needs it, and with its tokens as the product does."""
    alone, shared = (_layer(Attention.flash, "llama", row={"cp": cp}) for cp in (1, 2))
    output = 4 * TOKENS * SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    assert shared.kept - alone.kept == output
    assert shared.backward > alone.backward


def test_a_chunk_has_the_keys_and_values_of_its_sequence():
    """It has their gradients, too, and repeats its attention instead of keeping the output."""
    alone = _layer(Attention.flash, "llama")
    chunk = _layer(Attention.flash, "llama", row={"earlier": 7 * TOKENS})
    pair = 2 * 4 * TOKENS * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    assert chunk.keys == 2 * 8 * pair
    assert alone.keys == 0
    assert chunk.kept < alone.kept
    longer = _layer(Attention.flash, "llama", row={"earlier": 31 * TOKENS})
    assert longer.kept == chunk.kept
    assert longer.backward > 2 * 32 * pair, "joined, and the gradients of that"
    shared = _layer(Attention.flash, "llama", row={"earlier": 6 * TOKENS, "cp": 2})
    assert shared.keys == chunk.keys // 2, "of half of the heads"


def test_the_same_layer_is_counted_once(monkeypatch):
    want = _layer(Attention.torch)
    monkeypatch.setattr("hybridrl.models.activations._count", None)
    assert _layer(Attention.torch) is want
    with pytest.raises(TypeError):
        _layer(Attention.torch, hidden_size=64)


def _taken(kept, trained):
    """Bytes on a CPU of the head over 96 hidden states: kept for backward, and at the peaks."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=draw) for n in (96, 400))
    targets = torch.randint(400, (96,), generator=draw)
    ids = torch.stack([torch.randperm(400, generator=draw)[:kept].sort().values for _ in targets])
    if trained:
        hidden.requires_grad_(), weight.requires_grad_()
    memory = PeakMemory()
    memory.track_external(hidden, weight, targets, ids)
    before = memory.allocated("cpu")
    with memory, torch.set_grad_enabled(trained):
        candidates = ids if kept else None
        log_probs, entropy = linear_log_probs(
            hidden, weight, targets, with_entropy=True, candidates=candidates
        )
        if kept:
            log_probs, entropy = truncated(log_probs, entropy, ids, targets)
        if not trained:
            return memory.peak("cpu") - before
        loss = log_probs.sum() + entropy.sum()
        del log_probs, entropy
        stays = memory.allocated("cpu") - before
        memory.restart()
        loss.backward()
        return stays, memory.peak("cpu") - before


def test_the_head_takes_so_much_for_each_kept_id():
    """The ids take more than the logits here, as they do where many are kept."""
    config = AutoConfig.for_model("qwen3", **SHAPE | {"hidden_size": 16})
    options = {"dtype": torch.float32, "triton": False}
    whole, kept = (head_activations(config, 96, **options, kept=n) for n in (0, 300))
    (stays, peak), (plain, _) = _taken(300, trained=True), _taken(0, trained=True)
    assert kept.kept - whole.kept == pytest.approx(stays - plain, rel=0.05)
    assert kept.backward - whole.backward == pytest.approx(peak - stays, rel=0.05)
    scoring = [scoring_head_activations(config, 96, **options, kept=n) for n in (0, 300)]
    assert scoring[1] - scoring[0] == pytest.approx(_taken(300, trained=False), rel=0.1)
