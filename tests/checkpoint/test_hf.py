"""Checkpoints: readable by transformers, whole or not there."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hybridrl.checkpoint import hf
from hybridrl.config import (
    DType,
    ModelConfig,
    TinyModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.loss import Loss
from hybridrl.engines.probe import random_model
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.shrink import shrink
from hybridrl.models.tiny import make_char_tokenizer, make_tiny_model
from hybridrl.models.weight_files import check_files


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def source(request, tmp_path):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=request.param,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "source")
    make_char_tokenizer("abc", 64).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def save(source, targets, dtype=DType.float32, file_limit=None, shard_bytes=None):
    engine = TrainEngine(
        str(source), model=ModelConfig(), trainer=TrainerConfig(), device=torch.device("cpu")
    )
    if shard_bytes:
        hf.write_hf.__defaults__ = (*hf.write_hf.__defaults__[:-1], shard_bytes)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    try:
        for target in targets:
            hf.save_hf(engine, target, AutoTokenizer.from_pretrained(source), dtype)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def logits(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


@pytest.mark.parametrize("shard_bytes", [None, 2000])
def test_reopened_by_transformers(fresh_ranks, source, tmp_path, shard_bytes):
    target = tmp_path / "run" / "step_1"
    fresh_ranks(
        2, save, source, [target, target], DType.float32, None, shard_bytes
    )  # replaces itself
    assert torch.equal(logits(target), logits(source))
    assert AutoTokenizer.from_pretrained(target).decode([0, 1]) == AutoTokenizer.from_pretrained(
        source
    ).decode([0, 1])
    assert (target / "model.safetensors.index.json").exists() == bool(shard_bytes)
    assert [file.name for file in target.parent.iterdir()] == ["step_1"]


def _save_offloaded(source, target):
    layout = TrainLayoutConfig(pp=2, fsdp=1)
    engine = TrainEngine(
        str(source),
        model=ModelConfig(),
        trainer=TrainerConfig(layout=layout),
        device=torch.device("cpu"),
    )
    engine.device = torch.device("meta")  # its shards are elsewhere: in host memory
    hf.save_hf(engine, target, None, DType.float32)


def test_an_offloaded_model_takes_nothing_of_the_device(ranks, source, tmp_path):
    """After an evaluation the rollout engine has it."""
    ranks(2, _save_offloaded, source, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(source))


def test_dtype_is_chosen(ranks, source, tmp_path):
    ranks(1, save, source, [tmp_path / "out"], DType.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=0.05, atol=0.05)


def _save_apertus(source, target):
    engine = TrainEngine(
        str(source), model=ModelConfig(), trainer=TrainerConfig(), device=torch.device("cpu")
    )
    hf.save_hf(engine, target, None, DType.bfloat16)


def test_buffers_are_saved_as_they_are(ranks, tmp_path):
    """Apertus's activation has two, which transformers reads from checkpoints alone."""
    config = AutoConfig.for_model(
        "apertus", vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("act_fn.beta"):
            buffer.fill_(0.3)  # not a number of bfloat16
    model.save_pretrained(tmp_path / "source")
    ranks(2, _save_apertus, tmp_path / "source", tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(load_file(tmp_path / "source" / "model.safetensors"))
    assert all(
        torch.equal(saved[name], buffer) for name, buffer in model.named_buffers() if name in saved
    )


def test_full_disk_names_the_path_and_leaves_nothing(ranks, source, tmp_path):
    """A limit on the file size stands for the full disk: the write fails in the kernel."""
    target = tmp_path / "run" / "step_1"
    ranks(1, save, source, [target])
    errors = ranks(2, save, source, [target], DType.float32, 4000)
    assert all(error and str(target) in error for error in errors), errors
    assert [file.name for file in target.parent.iterdir()] == ["step_1"]
    assert torch.equal(logits(target), logits(source)), "the earlier checkpoint is whole"


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "minimax_m2",
        *(
            pytest.param(family, marks=pytest.mark.models)
            for family in (
                "qwen2_moe",
                "qwen3_moe",
                "mixtral",
                "olmoe",
                "glm4_moe",
                "gpt_oss",
                "ernie4_5_moe",
                "granitemoe",
                "phimoe",
                "apertus",
                "qwen3",
            )
        ),
    ],
)
def test_what_is_written_is_what_transformers_would_write(family, tmp_path):
    """Names and bits, in one file and in several; so every reader of the hub's opens it."""
    torch.manual_seed(0)
    model = random_model(shrink(AutoConfig.for_model(family)))
    model.save_pretrained(tmp_path / "theirs")
    model.config.dtype = (
        torch.float32
    )  # `save_pretrained` makes it a text, which Apertus cannot read
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    parameters, buffers = dict(model.named_parameters()), persistent_buffers(model)
    shapes = {name: tensor.shape for name, tensor in parameters.items()}
    weights = [(name, tensor.detach()) for name, tensor in parameters.items()]
    for folder, most in (("one", 2**30), ("several", 20_000)):
        stream, path = iter(weights), tmp_path / folder
        hf.write_hf(
            path, model, stream, shapes, torch.float32, buffers=buffers, max_shard_bytes=most
        )
        files = sorted(path.glob("*.safetensors"))
        assert (len(files) > 1) == (folder == "several")
        ours = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        if folder == "several":
            index = json.loads((path / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == ours.keys()
            check_files(path, "model.path")


def _save_trained(source, target, layout, ids):
    """One update of a mixture of experts, saved; its log-probabilities of `ids`."""
    trainer = TrainerConfig(layout=TrainLayoutConfig(**layout))
    engine = TrainEngine(
        str(source), model=ModelConfig(), trainer=trainer, device=torch.device("cpu")
    )
    sequences = [TrainSequence(ids, len(ids) - 1)]
    engine.update(sequences, Likelihood())
    hf.save_hf(engine, target, None)
    return engine.log_probs(sequences)


class Likelihood(Loss):
    normalize, fields, needs_entropy = "token", (), False

    def __call__(self, log_probs, entropy, fields):
        return -log_probs, {}


@pytest.mark.parametrize("layout", [{"fsdp": 2, "ep": 2}, {"fsdp": 1, "pp": 2}], ids=["ep", "pp"])
def test_a_trained_mixture_of_experts_answers_alike_in_transformers(ranks, tmp_path, layout):
    tiny = TinyModelConfig(num_experts=4, experts_per_token=2)
    make_tiny_model(tmp_path / "source", tiny, seed=0)
    ids = torch.arange(3, 19)
    results = ranks(2, _save_trained, tmp_path / "source", tmp_path / "saved", layout, ids)
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert names == load_file(tmp_path / "source" / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
    wanted = logits.gather(-1, ids[1:, None])[:, 0]
    for (log_probs,) in results:
        torch.testing.assert_close(log_probs, wanted, rtol=0, atol=1e-5)
