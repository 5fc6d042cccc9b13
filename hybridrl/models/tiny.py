"""A small Qwen3, Qwen3-MoE or Qwen3.5 with random weights and a character tokenizer, made here.

It is an ordinary Hugging Face directory, so that callers treat it as a downloaded model.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from hybridrl.config import ConfigError, TinyModelConfig

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def make_tiny_model(path: str | Path, config: TinyModelConfig, seed: int) -> None:
    """Write weights, config and tokenizer to the directory `path`, which is made if need be.

    The same `config` and `seed` give the same files, bit for bit; the caller's random state is
    unchanged. Raises ConfigError if the alphabet cannot be a vocabulary.
    """
    tokenizer = make_char_tokenizer(config.alphabet, config.max_positions)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_shape(config, tokenizer))
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
