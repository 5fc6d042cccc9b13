"""Tiny checkpoints for images and text as families publish them: a tower, and a text part."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from hybridrl.config import TinyModelConfig
from hybridrl.models.tiny import make_char_tokenizer

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 24}
TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "patch_size": 4, "num_position_embeddings": 16,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = ROTATION | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
FAMILIES = {
    "qwen3_5": (DELTA, TOWER),
    "qwen3_5_moe": ({**DELTA, **EXPERTS, **SHARED}, TOWER),
    "qwen3_vl": ({"rope_parameters": MROPE}, {**TOWER, "deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": (
        {"rope_parameters": MROPE, **EXPERTS}, {**TOWER, "deepstack_visual_indexes": [0]},
    ),
    "gemma3": ({"sliding_window": 8, "query_pre_attn_scalar": 16}, SIGLIP),
}  # fmt: skip
MTP = "mtp.layers.0.mlp.up_proj.weight"


def image_checkpoint(family: str, folder: Path, tied: bool = True, **changed: object) -> Path:
    """A random model in `folder`; of Qwen3.5 with a head `mtp` that transformers passes by.

    `changed` are other settings of its text part.
    """
    tokenizer = make_char_tokenizer(TinyModelConfig().alphabet, 256)
    text, tower = FAMILIES[family]
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    config = AutoConfig.for_model(
        family,
        text_config={**TEXT, **text, **tokens, **changed, "vocab_size": len(tokenizer)},
        vision_config=tower,
        tie_word_embeddings=tied,
        **({"mm_tokens_per_image": 4, "image_token_index": 5} if family == "gemma3" else {}),
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')
    if family.startswith("qwen3_5"):
        stored = load_file(folder / "model.safetensors")
        stored[MTP] = torch.randn(3, 5, dtype=torch.float32).bfloat16()
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def open_whole(path: Path) -> PreTrainedModel:
    """The image model at `path`; fails where transformers does not find all of it."""
    model, report = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"], report
    assert not report["mismatched_keys"], report
    return model
