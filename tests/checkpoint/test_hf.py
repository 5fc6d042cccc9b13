"""Checkpoints: readable by transformers, whole or not there."""

import json
import math
import os
import resource
import shutil
import signal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hybridrl.checkpoint import hf
from hybridrl.checkpoint.weight_shares import WeightShare
from hybridrl.config import (
    ConfigError,
    DType,
    LoraConfig,
    ModelConfig,
    TinyModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.loss import Loss
from hybridrl.engines.probe import random_model
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.layout.layout import Layout, Rule
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.weight_switch import WeightSwitch
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.hub_names import HubNames
from hybridrl.models.parallel import meta_model
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
        num_key_value_heads=2,
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
        hf.MAX_FILE_BYTES = shard_bytes
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


@pytest.mark.long
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


def _save_without_source(source, target):
    engine = TrainEngine(
        str(source), model=ModelConfig(), trainer=TrainerConfig(), device=torch.device("cpu")
    )
    shutil.rmtree(source)
    return hf.save_hf(engine, target)


@pytest.mark.parametrize("source", [True], indirect=True, ids=["tied"])
def test_a_model_of_text_alone_needs_its_source_no_more(ranks, source, tmp_path):
    wanted = logits(source)
    assert ranks(1, _save_without_source, source, tmp_path / "final") == [[]]
    assert torch.equal(logits(tmp_path / "final"), wanted)


def _save_shares(source, target, layout, lora, failing_rank=None):
    """Bytes that this rank writes and receives, and its largest file; the error, if any.

    Every tensor may be a file, and every rank writes.
    """
    hf.MAX_FILE_BYTES, hf.LEAST_SHARE_BYTES = 4000, 1
    engine = TrainEngine(
        str(source),
        model=ModelConfig(),
        trainer=TrainerConfig(layout=TrainLayoutConfig(**layout)),
        device=torch.device("cpu"),
        lora=LoraConfig(rank=lora, alpha=8.0),
    )
    torch.manual_seed(1)  # B is zero at first, and its shards' numbers would not show
    for name, shard in sorted(engine.named_shards().items()):
        if name.endswith("lora_B.weight"):
            shard.to_local().fill_(0.01 * len(name))
    sizes, received = [], []
    save_file, switch = hf.save_file, WeightSwitch.switch

    def counted_file(tensors, file, **more):
        if dist.get_rank() == failing_rank:
            raise OSError(28, "No space left on device")
        if file.name.startswith("model"):  # no adapters'
            sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, file, **more)

    def counted_switch(*args, **more):
        received.append(switch(*args, **more).bytes_received)

    error = ""
    with (
        patch.object(hf, "save_file", counted_file),
        patch.object(WeightSwitch, "switch", counted_switch),
    ):
        try:
            hf.save_hf(engine, target, AutoTokenizer.from_pretrained(source))
        except OSError as caught:
            error = str(caught)
    return {"written": sum(sizes), "file": max(sizes, default=0), "received": sum(received)}, error


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        ({"pp": 2, "fsdp": 2}, 0),
        pytest.param({"fsdp": 4}, 4, marks=pytest.mark.layouts),
        pytest.param({"fsdp": 2, "tp": 2}, 0, marks=pytest.mark.layouts),
        pytest.param(
            {"replicas": 2, "fsdp": 2, "tp": 2}, 4, marks=[pytest.mark.layouts, pytest.mark.wide]
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("source", [False], indirect=True, ids=["untied"])
def test_every_rank_writes_its_share(fresh_ranks, source, tmp_path, layout, lora):
    """A rank receives no more than its share: a parameter goes to its writer alone."""
    number = math.prod(layout.values())
    if lora:  # what one rank writes
        fresh_ranks(1, _save_shares, source, tmp_path / "alone", {"fsdp": 1}, lora)
    wanted = tmp_path / "alone" if lora else source
    target = tmp_path / "saved"
    figures = [f for f, _ in fresh_ranks(number, _save_shares, source, target, layout, lora)]
    files = sorted(file.name for file in target.glob("model-*.safetensors"))
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert all(name in load_file(target / file) for name, file in index["weight_map"].items())
    # Bytes on each rank, exactly.
    written = [own["written"] for own in figures]
    assert sum(written) == index["metadata"]["total_size"]
    whole = AutoModelForCausalLM.from_pretrained(wanted, dtype=torch.float32)
    largest = max(p.nbytes for p in whole.parameters())
    stages = layout.get("pp", 1)
    per_stage = number // stages
    for stage in range(stages):
        of_stage = written[stage * per_stage : (stage + 1) * per_stage]
        assert max(of_stage) <= sum(of_stage) / per_stage + largest
        assert min(of_stage) > 0
    for own in figures:
        adapters = 200_000 if lora else 0
        assert own["file"] <= max(4000, largest)
        assert own["received"] <= own["written"] + adapters
    assert torch.equal(logits(target), logits(wanted))
    assert (target / "adapter").is_dir() == bool(lora)


@pytest.mark.long
def test_an_error_of_one_writer_is_that_of_all(fresh_ranks, ranks, source, tmp_path):
    """The earlier checkpoint stays whole, and nothing else is left."""
    target = tmp_path / "run" / "step_1"
    ranks(1, save, source, [target])
    layout = {"fsdp": 2}
    for _, error in fresh_ranks(2, _save_shares, source, target, layout, 0, 1):
        assert "No space left" in error
        assert str(target) in error
    assert [file.name for file in target.parent.iterdir()] == ["step_1"]
    assert torch.equal(logits(target), logits(source))


def test_a_rank_that_does_not_see_the_directory_says_so(tmp_path):
    with pytest.raises(OSError, match="rank 3 does not see"):
        hf.write_share(tmp_path / "here", None, WeightShare(3, (), ()), [])


def _save_until_killed(source, target):
    """Rank 0 is killed when all files of weights are there."""
    hf.write_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    _save_shares(source, target, {"fsdp": 2}, 0)


def test_a_killed_run_leaves_no_half_checkpoint(fresh_ranks, ranks, source, tmp_path):
    """What it leaves has a hidden name, and the next run deletes it."""
    target = tmp_path / "run" / "final"
    with pytest.raises(AssertionError, match="a rank ended with -9"):
        fresh_ranks(2, _save_until_killed, source, target)
    (left,) = target.parent.iterdir()
    assert left.name == ".final.tmp"
    assert list(left.glob("*.safetensors")), "all weights are there"
    assert not list(left.glob("*.json")), "but none that says what they are"
    ranks(1, save, source, [target])
    assert [file.name for file in target.parent.iterdir()] == ["final"]
    assert torch.equal(logits(target), logits(source))


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
def test_what_is_written_is_what_transformers_would_write(family, tmp_path, monkeypatch):
    """Names and bits, in one file and in those of three writers; so every reader of the hub's
    opens it."""
    torch.manual_seed(0)
    model = random_model(shrink(AutoConfig.for_model(family)))
    model.save_pretrained(tmp_path / "theirs")
    model.config.dtype = (
        torch.float32
    )  # `save_pretrained` makes it a text, which Apertus cannot read
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    parameters, buffers = dict(model.named_parameters()), persistent_buffers(model)
    shapes = {name: tensor.shape for name, tensor in parameters.items()}
    tensors = {name: tensor.detach() for name, tensor in (parameters | buffers).items()}
    mesh = Mesh((("pp", 1), ("fsdp", 3)))
    layout = Layout(mesh, shapes, dict.fromkeys(shapes, Rule()))
    hub = HubNames(meta_model(model.config))
    for folder, most, writers in (("one", 2**30, 1), ("several", 20_000, 3)):
        path = tmp_path / folder
        path.mkdir()
        monkeypatch.setattr(hf, "MAX_FILE_BYTES", most)
        monkeypatch.setattr(hf, "LEAST_SHARE_BYTES", 1)
        shares = hf.shares_of(hub, shapes, buffers, layout, torch.float32)
        assert len(shares) == writers
        for share in shares:
            hf.write_share(path, hub, share, [(name, tensors[name]) for name in share.names])
        hf.write_index(path, shares)
        files = hf.side_files(model.config, type(model).__name__, None, torch.float32)
        assert hf.write_side_files(path, files) == []
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


@pytest.mark.long
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


def _save_with_broken_files(source, target):
    """Rank 0 cannot write the tokenizer, and fails in the middle of generation_config.json."""
    engine = TrainEngine(
        str(source),
        model=ModelConfig(),
        trainer=TrainerConfig(layout=TrainLayoutConfig(fsdp=2)),
        device=torch.device("cpu"),
        lora=LoraConfig(rank=2),
    )
    tokenizer = AutoTokenizer.from_pretrained(source)

    def refuses(directory):
        raise ValueError("no such\nmerges")

    def half(config, file, **more):
        file.write_text('{"eos_')
        raise OSError(28, "No space left on device")

    with (
        patch.object(tokenizer, "save_pretrained", refuses),
        patch.object(GenerationConfig, "to_json_file", half),
    ):
        return hf.save_hf(engine, target, tokenizer)


@pytest.mark.long
def test_a_file_beside_the_weights_never_takes_them_with_it(ranks, source, tmp_path):
    target = tmp_path / "run" / "final"
    first, second = ranks(2, _save_with_broken_files, source, target)
    wanted = ["generation_config.json: OSError: [Errno 28] No space left on device"]
    wanted += ["tokenizer: ValueError: no such merges"]
    assert first == 2 * wanted, "of the model and of its adapter"
    assert second == []
    assert torch.equal(logits(target), logits(source))
    assert not list(target.rglob("generation_config.json")), "no half is left"
    assert (target / "adapter" / "adapter_model.safetensors").is_file()


def test_what_is_written_at_the_end_is_tried_at_the_start(source, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(source)
    hf.check_side_files(str(source), tokenizer, tmp_path)
    with (
        patch.object(tokenizer, "save_pretrained", side_effect=ValueError("no merges")),
        pytest.raises(ConfigError, match=r"model.path=.*written \(tokenizer: .*no merges\)"),
    ):
        hf.check_side_files(str(source), tokenizer, tmp_path)
    full = OSError(28, "No space left on device")
    with (
        patch.object(tokenizer, "save_pretrained", side_effect=full),
        pytest.raises(ConfigError, match=r"run.dir=.*room for a model \(tokenizer: .*No space"),
    ):
        hf.check_side_files(str(source), tokenizer, tmp_path)
    assert not list(tmp_path.glob(".probe*"))
