"""The text part of a checkpoint for images and text computes what the whole model does."""

from pathlib import Path

import pytest
import torch
from image_checkpoints import FAMILIES, MTP, image_checkpoint, open_whole
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import ConfigError
from hybridrl.layout.box import Box
from hybridrl.layout.local import LocalTensor
from hybridrl.models.config_json import IMAGE_TEXT, check_config_json
from hybridrl.models.image_text import KeptTensors, language_config, text_name, whole_name
from hybridrl.models.load import check_supported, load_config
from hybridrl.models.stored_weights import StoredWeights


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_the_whole_model(family: str, tied: bool, tmp_path: Path) -> None:
    path = str(image_checkpoint(family, tmp_path, tied))
    check_config_json(path, "model.path")
    config = load_config(path)
    check_supported(config)
    assert (config.model_type, config.whole_type) == (IMAGE_TEXT[family], family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with StoredWeights(path, config) as weights:
        weights.check_left_out()
        for name, parameter in model.named_parameters():
            weights.fill(parameter, name, LocalTensor((Box.whole(tuple(parameter.shape)),)))
        weights.fill_buffers(model)
        kept = weights.kept()
        with safe_open(tmp_path / "model.safetensors", "pt") as stored:
            assert all(torch.equal(values, stored.get_tensor(n)) for n, values in kept.items())
            names = {*stored.keys()}
        of_text = {name for name in names if "language_model" in name or "lm_head" in name}
        assert {*kept} == names - of_text
        assert (MTP in kept) == family.startswith("qwen3_5")
        empty = kept.empty()
        assert {n: (x.shape, x.dtype) for n, x in kept.items()} == {
            n: (x.shape, x.dtype) for n, x in empty.items()
        }
    ids = torch.randint(3, config.vocab_size, (2, 20))
    whole = open_whole(tmp_path).eval()
    # Measured: 0, and 5e-7 where rotations are computed in another order.
    torch.testing.assert_close(model(ids).logits, whole(ids).logits, atol=1e-5, rtol=1e-5)


def test_names() -> None:
    assert whole_name("model.norm.weight") == "model.language_model.norm.weight"
    assert whole_name("lm_head.weight") == "lm_head.weight"
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        assert text_name(whole_name(name)) == name
    assert text_name("model.visual.patch_embed.proj.weight") is None


def test_a_model_of_text_alone_is_its_own_text_part() -> None:
    config = AutoConfig.for_model("qwen3")
    assert language_config(config) is config
    assert not hasattr(config, "whole_type")


def test_what_is_kept_is_known_without_being_read() -> None:
    kept = KeptTensors({"model.visual.x": None})  # which has no values
    assert "model.visual.x" in kept
    assert "model.x" not in kept


def test_other_models_for_images_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llava").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="llava has images"):
        check_config_json(str(tmp_path), "model.path")
