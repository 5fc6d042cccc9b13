"""What a run of a checkpoint's text part writes: the whole of it, for images and text."""

from pathlib import Path

import pytest
import torch
from image_checkpoints import MTP, image_checkpoint, open_whole
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from hybridrl.checkpoint import hf
from hybridrl.config import LoraConfig, ModelConfig, TrainerConfig, Vision
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.models import image_text
from hybridrl.models.load import load_config
from hybridrl.models.weight_files import check_files, weight_files

pytestmark = pytest.mark.long


def save_changed(
    source: Path, target: Path, most: int, lora: int = 0, vision: Vision = Vision.frozen
) -> None:
    """Write the model whose every weight, or adapter, is 0.01 more than at `source`."""
    hf.MAX_FILE_BYTES, hf.LEAST_SHARE_BYTES = most, 1
    engine = TrainEngine(
        str(source),
        model=ModelConfig(vision=vision),
        trainer=TrainerConfig(),
        device=torch.device("cpu"),
        lora=LoraConfig(rank=lora, alpha=8.0),
    )
    for name, shard in engine.named_shards().items():
        if not lora or ".lora_" in name:
            shard.to_local().add_(0.01)
    assert hf.save_hf(engine, target, AutoTokenizer.from_pretrained(source)) == []


@pytest.mark.parametrize(
    ("family", "most"),
    [("qwen3_5", 20_000), ("qwen3_vl", 10**9), ("qwen3_vl_moe", 20_000), ("gemma3", 10**9)],
)
def test_reopened_as_the_image_model(fresh_ranks, family, most, tmp_path):
    """On two ranks, each with half of each weight: the tower bit for bit, the text trained."""
    source, target = image_checkpoint(family, tmp_path / "source"), tmp_path / "run" / "final"
    fresh_ranks(2, save_changed, source, target, most)
    check_files(target, "model.path")
    assert (target / "model.safetensors.index.json").exists() == (most < 10**9)
    before, after = open_whole(source).state_dict(), open_whole(target).state_dict()
    assert before.keys() == after.keys()
    of_tower = [name for name in before if "visual" in name or "vision" in name]
    for name, values in before.items():
        text = "language_model" in name or "lm_head" in name
        wanted = values + 0.01 if text else values
        assert torch.equal(after[name], wanted), name
    assert len(of_tower) > 10
    stored = weight_files(str(target))
    assert stored.keys() == weight_files(str(source)).keys()
    if MTP in stored:
        old = load_file(source / "model.safetensors")[MTP]
        assert torch.equal(load_file(stored[MTP])[MTP], old)
    assert (target / "preprocessor_config.json").read_text() == '{"patch_size": 4}'
    config = AutoConfig.from_pretrained(target)
    assert config.model_type == family
    assert config.architectures == [type(open_whole(source)).__name__]
    assert not list(target.parent.glob(".*"))


@pytest.mark.parametrize(("family", "most"), [("qwen3_5", 20_000), ("qwen3_vl_moe", 10**9)])
def test_a_tower_that_trains_is_written(fresh_ranks, family, most, tmp_path):
    source, target = image_checkpoint(family, tmp_path / "source"), tmp_path / "final"
    fresh_ranks(2, save_changed, source, target, most, 0, Vision.train)
    before, after = open_whole(source).state_dict(), open_whole(target).state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(after[name], before[name] + 0.01)] == []
    stored = weight_files(str(target))
    assert stored.keys() == weight_files(str(source)).keys()
    if MTP in stored:
        assert torch.equal(
            load_file(stored[MTP])[MTP], load_file(source / "model.safetensors")[MTP]
        )


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
@torch.no_grad()
def test_adapters_are_of_the_whole_model(fresh_ranks, family, tmp_path):
    """gemma3's tower has modules of the same names, which stay without."""
    from peft import PeftModel

    source, target = image_checkpoint(family, tmp_path / "source"), tmp_path / "final"
    fresh_ranks(2, save_changed, source, target, 10**9, 2)
    base, merged = open_whole(source), open_whole(target).eval()
    adapted = PeftModel.from_pretrained(base, target / "adapter").eval()
    assert all("language_model" in name for name in adapted.state_dict() if "lora_" in name)
    ids = torch.randint(3, 30, (1, 12))
    got, wanted = adapted(input_ids=ids).logits, merged(input_ids=ids).logits
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    without = AutoModelForImageTextToText.from_pretrained(source).eval()(input_ids=ids).logits
    assert (got - without).abs().max() > 1e-3


def test_a_source_that_is_gone_is_an_error_on_all_ranks(fresh_ranks, tmp_path):
    source = image_checkpoint("qwen3_vl", tmp_path / "source")
    for line in fresh_ranks(2, save_after_loss, source, tmp_path / "final"):
        assert str(tmp_path / "final") in line


def test_a_file_for_images_that_cannot_be_had_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start by an error; at an export by a line, when all weights have been written."""
    source = image_checkpoint("gemma3", tmp_path / "source")

    def unreachable(path: str, name: str, **more: bool) -> None:
        raise OSError(f"no hub for {name}")

    monkeypatch.setattr(image_text, "cached_file", unreachable)
    whole = image_text.whole_config(str(source))
    files = hf._files_of_whole(str(source), whole, GenerationConfig(), torch.float32, None)
    missing = hf.write_side_files(tmp_path / "out", files)
    assert missing == [f"{name}: OSError: no hub for {name}" for name in image_text.PROCESSORS]
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_value_model_is_written_without_its_image_model(tmp_path: Path) -> None:
    text = load_config(str(image_checkpoint("qwen3_vl", tmp_path / "source")))
    assert {*image_text.PART_SETTINGS} <= {*vars(text)}
    hf._write_config(text, torch.float32, "Qwen3ForSequenceClassification", tmp_path)
    own = load_config(str(tmp_path))
    assert not {*image_text.PART_SETTINGS} & {*vars(own)}
    assert own.hidden_size == text.hidden_size


def save_after_loss(source: Path, target: Path) -> str:
    engine = TrainEngine(
        str(source), model=ModelConfig(), trainer=TrainerConfig(), device=torch.device("cpu")
    )
    torch.distributed.barrier()
    (source / "model.safetensors").unlink(missing_ok=True)
    torch.distributed.barrier()
    with pytest.raises(OSError, match=target.name) as error:
        hf.save_hf(engine, target)
    return str(error.value)
