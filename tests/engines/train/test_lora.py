"""Adapters in training: gradients against peft's, weights that stay, what a checkpoint holds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dtensor_layouts import layout_of
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridrl.algorithms import Loss
from hybridrl.checkpoint.hf import save_hf
from hybridrl.config import (
    ActivationMode,
    DType,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout import fsdp_groups

pytestmark = pytest.mark.long

TEMPERATURE = 0.7
LORA = LoraConfig(rank=3, alpha=6)  # a rank that no number of ranks divides


class Surrogate(Loss):
    """A smooth policy loss with an entropy bonus; of a critic, a squared error."""

    normalize = "token"
    fields = ("advantages", "old_log_probs")
    needs_entropy = True

    def __call__(self, scores, entropy, fields):
        if entropy is None:
            return (scores - fields["advantages"]) ** 2, {}
        ratio = (scores - fields["old_log_probs"]).exp()
        return -ratio * fields["advantages"] - 0.01 * entropy, {}


def make(path, layout=(1, 1, 1), lora=LORA, dtype=DType.float32, lr=0.05, **options):
    pp, fsdp, tp = layout
    sequence, schedule = options.pop("sequence", False), options.pop("schedule", "one_f_one_b")
    chunk = options.pop("chunk", 0)
    if large := options.pop("large", False):  # groups per layer; without a pipeline resharded
        fsdp_groups.ONE_GROUP_PARAMETERS = fsdp_groups.KEPT_PARAMETERS = 0
    return TrainEngine(
        str(path),
        model=ModelConfig(compute_dtype=dtype),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=chunk or 30,
            chunk_tokens=chunk,
            activations=ActivationMode.recompute if large else ActivationMode.keep,
            optim=OptimConfig(lr=lr, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(
                pp=pp,
                fsdp=fsdp,
                tp=tp,
                sequence_parallel=sequence,
                schedule=PipelineSchedule[schedule],
            ),
        ),
        device=torch.device("cpu"),
        temperature=TEMPERATURE,
        lora=lora,
        seed=5,
        **options,
    )


def three_steps(path, sequences, folder, layout, options):
    """After two steps, so that nothing is zero, a checkpoint and the gradients of a third one."""
    engine = make(path, layout, **options)
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    before = {name: shard.to_local().clone() for name, shard in engine.named_shards().items()}
    check_layout(engine)
    assert all(".lora_" in name or name == "score.weight" for name in engine.trained())
    rows, pack = [], engine._replica.pack
    engine._replica.pack = lambda *args, **more: rows.append(pack(*args, **more)) or rows[-1]
    for _ in range(2):  # a value head begins at zero, and B, which is behind A
        engine.update(mine, Surrogate())
    save_hf(engine, folder)
    gradients = {}

    def before_step(*_):
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                assert (p.grad is not None) == (name in engine.trained()), name
                if p.grad is not None:
                    gradients[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    metrics = engine.update(mine, Surrogate())
    after = {name: shard.to_local() for name, shard in engine.named_shards().items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    held = {name for name in after if after[name].numel()}
    assert changed == engine.trained() & held, "what is trained moves, and nothing else"
    assert len(engine.optimizer.state) == len(gradients)
    chunks = [x.packing.chunk for batches in rows for row in batches for x in row.passes]
    assert any(chunks) == ("chunk" in options)
    assert not any(chunk.sequence.kept for chunk in chunks if chunk), "keys are freed"
    return metrics, gradients


def check_layout(engine):
    """The layout, made from the config, is what the DTensors say, adapters' too."""
    shards, rank = engine.named_shards(), dist.get_rank()
    from_dtensors = layout_of(shards)
    for name, shard in shards.items():
        boxes = engine.layout.local(name, rank)
        assert boxes == from_dtensors.local(name, rank), name
        assert [tuple(shard.to_local().shape)] == [box.shape for box in boxes] or not boxes, name


def oracle(model, sequences):
    """Loss and gradients of one padded batch by peft in float64."""
    model = model.double()
    total = torch.zeros((), dtype=torch.float64)
    masks = [torch.ones(s.response_tokens) if s.mask is None else s.mask for s in sequences]
    tokens = sum(mask.sum() for mask in masks)
    for s, mask in zip(sequences, masks, strict=True):
        span = slice(len(s.ids) - s.response_tokens - 1, len(s.ids) - 1)
        fields = {
            "advantages": torch.tensor(s.fields["advantages"]),
            "old_log_probs": s.fields["old_log_probs"],
        }
        if hasattr(model.base_model.model, "score"):
            hidden = model.base_model.model.model(s.ids[None]).last_hidden_state[0, span]
            scores, entropy = model.base_model.model.score(hidden)[:, 0], None
        else:
            log_p = (model(s.ids[None]).logits[0, span] / TEMPERATURE).log_softmax(-1)
            scores = log_p.gather(-1, s.ids[-s.response_tokens :, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
        total = total + (mask / tokens * Surrogate()(scores, entropy, fields)[0]).sum()
    total.backward()
    plain = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return total.item(), {name.replace(".modules_to_save", ""): g for name, g in plain.items()}


def check(results, want):
    loss, want_gradients = want
    gradients = {}
    for metrics, local in results:
        assert metrics == results[0][0], "all ranks report the same"
        for name, gradient in local.items():
            assert torch.equal(gradients.setdefault(name, gradient), gradient), name
    assert results[0][0]["loss"] == pytest.approx(loss, abs=1e-6)
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in want_gradients.items():
        assert (gradients[name].double() - gradient).abs().max() < 1e-5, name
    norm = torch.stack([g.norm() for g in want_gradients.values()]).norm().item()
    assert results[0][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}
MLP = LoraConfig(rank=3, alpha=6, target_modules=["up_proj", "down_proj"])
LAYOUTS = [
    ("qwen3", (1, 1, 2), {}),
    ("mistral", (1, 2, 1), {"chunk": 5}),
    ("qwen3", (1, 1, 1), {"chunk": 5, "lora": MLP, "large": True}),
    ("qwen3", (2, 1, 1), {"chunk": 8, "lora": MLP, "schedule": "interleaved"}),
    ("llama", (2, 2, 1), {"large": True}),
]
SLOW = [
    ("qwen3", (2, 1, 1), {}),
    ("qwen3", (2, 1, 1), {"schedule": "zero_bubble"}),
    ("llama", (2, 1, 2), {}),
    ("qwen2", (1, 2, 2), {"gen_tp": 4}),
    ("qwen3", (1, 1, 2), {"sequence": True}),
    ("gemma3_text", (1, 2, 2), {"sequence": True}),
    ("mistral", (1, 4, 1), {}),
    ("qwen3", (1, 2, 1), {"large": True}),
]


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("qwen3", (1, 2, 1), {}),
        ("qwen3", (1, 1, 1), {"chunk": 5, "lora": MLP}),
        *(pytest.param(*case, marks=pytest.mark.layouts) for case in LAYOUTS),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_step_equals_peft(
    ranks: Callable,
    fresh_ranks: Callable,
    tiny: Callable,
    sequences: list,
    tmp_path: Path,
    family,
    layout,
    options,
) -> None:
    """What was saved before it is, merged, what peft makes of the base and the adapter."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4} if "gen_tp" in options else {}
    path = tiny(family, True, num_hidden_layers=4, **heads)
    pp, fsdp, tp = layout
    start = fresh_ranks if "large" in options else ranks
    results = start(pp * fsdp * tp, three_steps, path, sequences, tmp_path / "run", layout, options)
    base = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter", is_trainable=True)
    check(results, oracle(model, sequences))
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "run", attn_implementation="eager", dtype=torch.float64
    )
    ids = sequences[2].ids[None]
    with torch.no_grad():
        logits = model(ids).logits
        assert (merged(ids).logits - logits).abs().max() < 1e-4
        with model.disable_adapter():
            assert (model(ids).logits - logits).abs().max() > 0.1, "the adapter does something"


@pytest.mark.layouts
def test_a_critic_trains_its_head_and_adapters(
    ranks: Callable, tiny: Callable, sequences: list, tmp_path: Path
) -> None:
    path = tiny("qwen3")
    options = {"gives_values": True}
    results = ranks(2, three_steps, path, sequences, tmp_path / "run", (1, 2, 1), options)
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    model = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter", is_trainable=True)
    want = oracle(model, sequences)
    assert "score.weight" in want[1]
    check(results, want)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run")
    ids = sequences[2].ids[None]
    with torch.no_grad():
        torch.testing.assert_close(
            merged(ids).logits.double(), model(ids).logits, atol=1e-5, rtol=0
        )


def formats(path, sequences):
    """Three updates in bfloat16, and again with dropout."""
    results = {}
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    for name, dropout in (("none", 0.0), ("some", 0.5), ("again", 0.5)):
        lora = LoraConfig(rank=3, alpha=6, dropout=dropout)
        engine = make(path, (1, 2, 1), lora=lora, dtype=DType.bfloat16)
        start = {x: tensor.to_local().clone() for x, tensor in engine.named_shards().items()}
        losses = [engine.update(mine, Surrogate())["loss"] for _ in range(3)]
        shards = {x: tensor.to_local() for x, tensor in engine.named_shards().items()}
        for x, tensor in shards.items():
            trained = x in engine.trained()
            assert tensor.dtype == (torch.float32 if trained else torch.bfloat16), x
            assert trained or torch.equal(tensor, start[x]), x
        scores = [engine.log_probs(mine) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*scores, strict=True)), "scores drop nothing"
        adapters = {x: engine.named_shards()[x].full_tensor() for x in engine.adapter_names()}
        results[name] = (losses, {x: t.clone() for x, t in adapters.items()})
    return results


@pytest.mark.slow
def test_frozen_weights_lie_in_the_compute_format_and_dropout_is_repeatable(
    ranks: Callable, tiny: Callable, sequences: list
) -> None:
    for result in ranks(2, formats, tiny("qwen3"), sequences):
        assert result["some"][0] == result["again"][0]
        assert all(torch.equal(t, result["again"][1][x]) for x, t in result["some"][1].items())
        assert result["some"][0][0] == result["none"][0][0], "B is zero, so nothing is dropped"
        assert result["some"][0][2] != result["none"][0][2]
