"""A model made wider that says the same: size for a bench without the training of that size."""

import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# What these write is all that the next layers see: from the new units nothing, so nothing changes.
_WRITERS = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")


def widen(source: Path, target: Path, times: int) -> None:
    """Write the Llama-like model at `source` with `times` the width, heads and MLP to `target`.

    Function-preserving growth (Net2Net, arXiv 1511.05641): the new units have random weights where
    they read and zeros where they write. Norms over the residual stream, whose mean square falls by
    `times`, are scaled back. Every product is made in full, so work is that of the new size.
    """
    old = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, times * getattr(config, name))
    config.rms_norm_eps /= times  # as the mean square that it is added to
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        new = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    known = dict(old.named_parameters())
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if name.endswith(_WRITERS):
                parameter.zero_()
            old_parameter = known[name]
            grown_norm = old_parameter.ndim == 1 and old_parameter.shape != parameter.shape
            parameter[tuple(slice(size) for size in old_parameter.shape)] = (
                old_parameter / math.sqrt(times) if grown_norm else old_parameter
            )
    new.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
