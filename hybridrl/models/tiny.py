"""A small Qwen3, Qwen3-MoE, Qwen3.5 or Qwen3-VL with random weights and a character tokenizer.

It is an ordinary Hugging Face directory, so that callers treat it as a downloaded model.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from hybridrl.config import ConfigError, TinyModelConfig

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
IMAGE_TOKENS = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
_TOWER_WIDTH, _PATCH = 64, 4


def make_tiny_model(path: str | Path, config: TinyModelConfig, seed: int) -> None:
    """Write weights, config and tokenizer to the directory `path`, which is made if need be.

    The same `config` and `seed` give the same files, bit for bit; the caller's random state is
    unchanged. Raises ConfigError if the alphabet cannot be a vocabulary.
    """
    tokenizer = make_char_tokenizer(config.alphabet, config.max_positions)
    if config.vision_layers:
        tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    shape = _shape(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.vision_layers:
            model = AutoModelForImageTextToText.from_config(_with_tower(config, shape, tokenizer))
            _image_processor().save_pretrained(path)
        else:
            model = AutoModelForCausalLM.from_config(shape)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _shape(config: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    others: dict[str, object] = {}
    if config.attention_interval > 1:
        heads = 2 * config.num_kv_heads
        others = {
            "full_attention_interval": config.attention_interval,
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": config.head_dim,
            "linear_value_head_dim": max(1, config.hidden_size // heads),
            # A head of 32 rotated by a quarter, as published ones are, tells too few positions.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 1.0,
            },
            "partial_rotary_factor": 1.0,
        }
    if config.vision_layers:
        # Half of the frequencies turn by frames, the others by rows and columns.
        half = config.head_dim // 2
        others = {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
                "mrope_interleaved": True,
            },
        }
    if config.num_experts:
        others = {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": True,
        }
    return AutoConfig.for_model(
        config.model_type,
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
        **others,
    )


def _with_tower(
    config: TinyModelConfig, text: PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> PretrainedConfig:
    """A Qwen3-VL of this text part, with DeepStack features of the tower's first layer."""
    image, video, start, end = map(tokenizer.convert_tokens_to_ids, IMAGE_TOKENS)
    return AutoConfig.for_model(
        "qwen3_vl",
        text_config=text.to_dict(),
        vision_config={
            "depth": config.vision_layers,
            "hidden_size": _TOWER_WIDTH,
            "intermediate_size": 2 * _TOWER_WIDTH,
            "num_heads": 4,
            "patch_size": _PATCH,
            "out_hidden_size": config.hidden_size,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.05,
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )


def _image_processor() -> Any:
    """The processor of small pictures, which are not made larger."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    half = [0.5] * 3
    size = {"shortest_edge": (2 * _PATCH) ** 2, "longest_edge": 128**2}
    return Qwen2VLImageProcessorPil(
        patch_size=_PATCH, merge_size=2, size=size, image_mean=half, image_std=half
    )


def make_char_tokenizer(alphabet: str, max_positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character of `alphabet`; ids 0, 1, 2 are pad, eos and unk.

    `decode(encode(text)) == text` for any text over the alphabet; no special token is added.
    Raises ConfigError if a character occurs twice or there is none.
    """
    repeated = sorted({char for char in alphabet if alphabet.count(char) > 1})
    if repeated or not alphabet:
        raise ConfigError(
            "model.tiny.alphabet",
            alphabet,
            f"every character once, at least one (repeated: {''.join(repeated) or 'none'})",
        )
    vocab = {token: index for index, token in enumerate([PAD, EOS, UNK, *alphabet])}
    # BPE without merges splits into characters, faster than a pre-tokenizer that cuts at each.
    core = Tokenizer(BPE(vocab, [], unk_token=UNK))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
