"""The engine against a plain single-process padded forward and backward of transformers."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from surrogate_loss import Surrogate
from transformers import AutoModelForCausalLM

from hybridrl.config import (
    ActivationMode,
    DType,
    LRSchedule,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout import fsdp_groups

TEMPERATURE = 0.7
CLOSE = {"rtol": 0, "atol": 1e-5}


def make_engine(path, *, max_tokens=8192, temperature=TEMPERATURE, dtype=DType.float32, **trainer):
    optim = trainer.pop("optim", OptimConfig(lr=1e-2, clip_grad_norm=0.0))
    return TrainEngine(
        str(path),
        model=ModelConfig(compute_dtype=dtype),
        trainer=TrainerConfig(max_tokens_per_micro_batch=max_tokens, optim=optim, **trainer),
        device=torch.device("cpu"),
        temperature=temperature,
    )


def keep_gradients(engine):
    """Whole gradients by name, caught before the optimizer uses them."""
    caught = {}

    def before_step(*_):
        for name, p in engine.model.named_parameters():
            caught[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    return caught


def oracle(path, sequences, padded_log_probs, loss, temperature=TEMPERATURE, constant=0):
    """Loss and gradients of one padded batch, float32."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    longest = max(len(s.ids) for s in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    for row, s in enumerate(sequences):
        ids[row, : len(s.ids)] = s.ids  # causal: what stands after a sequence changes nothing
    logits = model(ids).logits / temperature
    weights = oracle_weights(sequences, loss.normalize, constant)
    total = torch.zeros(())
    for row, s in enumerate(sequences):
        log_p = logits[row, len(s.ids) - s.response_tokens - 1 : len(s.ids) - 1].log_softmax(-1)
        chosen = log_p.gather(-1, s.ids[-s.response_tokens :, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        fields = {
            "advantages": torch.tensor(s.fields["advantages"]),
            "old_log_probs": s.fields["old_log_probs"],
        }
        total = total + (weights[row] * loss(chosen, entropy, fields)[0]).sum()
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


def oracle_weights(sequences, normalize, constant):
    masks = [
        s.mask.float() if s.mask is not None else torch.ones(s.response_tokens) for s in sequences
    ]
    tokens = sum(mask.sum() for mask in masks)
    if normalize == "token":
        return [mask / tokens for mask in masks]
    if normalize == "sequence":
        return [mask / mask.sum() / len(masks) for mask in masks]
    return [mask / (len(masks) * constant) for mask in masks]


def one_update(path, shares, loss, engine_options, constant=0):
    engine = make_engine(path, **engine_options)
    gradients = keep_gradients(engine)
    metrics = engine.update(shares[dist.get_rank()], loss, max_response_tokens=constant)
    return metrics, gradients


def assert_equals_oracle(results, want):
    want_loss, want_gradients = want
    for metrics, gradients in results:
        assert metrics["loss"] == pytest.approx(want_loss, abs=1e-5)
        assert metrics == results[0][0], "all ranks report the same"
        assert gradients.keys() == want_gradients.keys()
        for name, gradient in want_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, **CLOSE, msg=name)
        norm = torch.stack([g.norm() for g in want_gradients.values()]).norm().item()
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


SPLITS = {
    "one rank": [list(range(9))],
    "two ranks": [[0, 2, 4, 6], [1, 3, 5, 7, 8]],
    "one rank without work": [list(range(9)), []],
    "three ranks": [[8], [0, 1, 2, 3, 4, 5, 6], [7]],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("max_tokens", [8192, 20])
def test_gradients_equal_padded_single_process(
    ranks, model_dir, sequences, padded_log_probs, split, max_tokens
):
    shares = [[sequences[i] for i in share] for share in SPLITS[split]]
    loss = Surrogate()
    results = ranks(len(shares), one_update, model_dir, shares, loss, {"max_tokens": max_tokens})
    assert_equals_oracle(results, oracle(model_dir, sequences, padded_log_probs, loss))


@pytest.mark.parametrize("normalize", ["sequence", "constant"])
def test_other_normalizations(ranks, model_dir, sequences, padded_log_probs, normalize):
    shares = [sequences[:3], sequences[3:]]
    loss = Surrogate(normalize)
    results = ranks(2, one_update, model_dir, shares, loss, {"max_tokens": 20}, 11)
    assert_equals_oracle(results, oracle(model_dir, sequences, padded_log_probs, loss, constant=11))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_families(ranks, tiny, sequences, padded_log_probs, family, tied):
    path, loss = tiny(family, tied), Surrogate()
    shares = [sequences[:5], sequences[5:]]
    results = ranks(2, one_update, path, shares, loss, {"max_tokens": 20})
    assert_equals_oracle(results, oracle(path, sequences, padded_log_probs, loss))


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_sliding_window(ranks, tiny, sequences, padded_log_probs, family):
    window = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    path, loss = (
        tiny(family, **(window if family == "qwen2" else {"sliding_window": 4})),
        Surrogate(),
    )
    results = ranks(1, one_update, path, [sequences], loss, {})
    assert_equals_oracle(results, oracle(path, sequences, padded_log_probs, loss))


def per_layer_update(path, shares, loss, keep_unsharded):
    """The settings of large models on a small one."""
    fsdp_groups.ONE_GROUP_PARAMETERS = 0
    if not keep_unsharded:
        fsdp_groups.KEPT_PARAMETERS = 0
    results = {}
    for activations in (m for m in ActivationMode if m is not ActivationMode.auto):
        engine = make_engine(path, max_tokens=20, activations=activations)
        assert engine.describe()["fsdp_groups"] == 4
        gradients = keep_gradients(engine)
        metrics = engine.update(shares[dist.get_rank()], loss)
        results[activations] = metrics, gradients
    return results


@pytest.mark.long
@pytest.mark.parametrize("keep_unsharded", [True, False])
def test_large_model_settings_and_activations(
    fresh_ranks, model_dir, sequences, padded_log_probs, keep_unsharded
):
    loss = Surrogate()
    shares = [sequences[:7], sequences[7:]]
    results = fresh_ranks(2, per_layer_update, model_dir, shares, loss, keep_unsharded)
    want = oracle(model_dir, sequences, padded_log_probs, loss)
    assert_equals_oracle([result[ActivationMode.keep] for result in results], want)
    for result in results:
        for mode, (_, gradients) in result.items():
            for name, gradient in result[ActivationMode.keep][1].items():
                assert torch.equal(gradient, gradients[name]), (mode, name)


def score(path, shares, **options):
    engine = make_engine(path, **options)
    return engine.log_probs(shares[dist.get_rank()])


@pytest.mark.parametrize("split", SPLITS)
def test_log_probs_equal_padded(ranks, model_dir, sequences, padded_log_probs, split):
    shares = [[sequences[i] for i in share] for share in SPLITS[split]]
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        want = padded_log_probs(model, sequences, TEMPERATURE)
    for share, got in zip(SPLITS[split], ranks(len(shares), score, model_dir, shares), strict=True):
        for index, values in zip(share, got, strict=True):
            torch.testing.assert_close(values, want[index], **CLOSE)


def train_bf16(path, shares, loss):
    engine = make_engine(path, dtype=DType.bfloat16, max_tokens=20)
    gradients = keep_gradients(engine)
    metrics = engine.update(shares[dist.get_rank()], loss)
    assert all(p.dtype == torch.float32 for p in engine.named_shards().values())
    return metrics, gradients


def test_bf16_compute_is_close(ranks, model_dir, sequences, padded_log_probs):
    """Within 5 % of the gradient's norm: bf16 keeps 8 bits, and three layers add up."""
    loss = Surrogate()
    want_loss, want = oracle(model_dir, sequences, padded_log_probs, loss)
    for metrics, got in ranks(2, train_bf16, model_dir, [sequences[:4], sequences[4:]], loss):
        assert metrics["loss"] == pytest.approx(want_loss, abs=0.01)
        error = sum((got[name] - want[name]).square().sum() for name in want).sqrt()
        assert error < 0.05 * sum(g.square().sum() for g in want.values()).sqrt()


def bad_step(path, sequences):
    engine = make_engine(path)
    before = {name: shard.to_local().clone() for name, shard in engine.named_shards().items()}
    rank = dist.get_rank()
    good = sequences[rank::2]
    bad = [
        replace(s, fields=s.fields | {"advantages": float("nan")}) if rank == 1 and i == 0 else s
        for i, s in enumerate(good)
    ]
    metrics = engine.update(bad, Surrogate())
    after = {name: shard.to_local() for name, shard in engine.named_shards().items()}
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    next_metrics = engine.update(good, Surrogate())
    return metrics, unchanged, next_metrics, engine.version


def test_bad_step_is_skipped_on_all_ranks(ranks, model_dir, sequences):
    for metrics, unchanged, next_metrics, version in ranks(2, bad_step, model_dir, sequences):
        assert metrics["bad_step"] == 1.0
        assert unchanged
        assert next_metrics["bad_step"] == 0.0
        assert next_metrics["loss"] == pytest.approx(next_metrics["loss"])
        assert version == 1


def clipped(path, sequences, limit):
    optim = OptimConfig(lr=1e-2, clip_grad_norm=limit)
    engine = make_engine(path, optim=optim)
    gradients = keep_gradients(engine)
    metrics = engine.update(sequences[dist.get_rank() :: 2], Surrogate())
    return metrics["grad_norm"], torch.stack([g.norm() for g in gradients.values()]).norm().item()


def test_clipping_by_the_global_norm(ranks, model_dir, sequences):
    for before, after in ranks(2, clipped, model_dir, sequences, 0.05):
        assert before > 0.06
        assert after == pytest.approx(0.05, rel=1e-4)


def three_steps(path, sequences):
    optim = OptimConfig(
        lr=1e-2, schedule=LRSchedule.linear, warmup_steps=1, min_lr_ratio=0.1, clip_grad_norm=1.0
    )
    engine = make_engine(path, optim=optim, steps=3, max_tokens=20)
    rates = []
    for step in range(3):
        share = sequences[dist.get_rank() + step :: 2]
        rates.append(engine.update(share, Surrogate())["lr"])
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.reset_optimizer(OptimConfig(lr=5e-3), total_steps=10)
    reset_rate = engine.update(sequences[:2], Surrogate())["lr"]
    return rates, weights, reset_rate, engine.version


@pytest.mark.long
def test_same_seed_twice_is_bit_equal_and_lr_follows_the_schedule(ranks, model_dir, sequences):
    first, second = (ranks(2, three_steps, model_dir, sequences) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one[0] == pytest.approx([1e-2, 1e-2, 5.5e-3])
        assert one[2:] == (5e-3, 4)
        for name, tensor in one[1].items():
            assert torch.equal(tensor, other[1][name]), name
            assert torch.equal(tensor, first[0][1][name]), name


def nothing_to_train(path, sequences):
    engine = make_engine(path)
    with pytest.raises(ValueError, match="no rank has a response token"):
        engine.update([], Surrogate())
    with pytest.raises(ValueError, match="needs the field 'old_log_probs'"):
        engine.update([replace(sequences[0], fields={"advantages": 1.0})], Surrogate())
    with pytest.raises(ValueError, match="response_tokens=9 of 9 tokens"):
        engine.log_probs([replace(sequences[0], response_tokens=9)])


def test_wrong_input_is_named(ranks, model_dir, sequences):
    ranks(1, nothing_to_train, model_dir, sequences)
