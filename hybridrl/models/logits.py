"""What model families do to the product of hidden states and head."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

_MULTIPLIED = {
    "logit_scale": {"cohere", "cohere2", "cohere2_moe"},
    "logits_scaling": {"hyperclovax"},
    "lm_head_multiplier": {"falcon_h1"},
}
_DIVIDED = {"logits_scaling": {"granite", "granitemoe", "granitemoehybrid", "granitemoeshared"}}


@dataclass(frozen=True, slots=True)
class LogitsTransform:
    """Logits are s x, or c tanh(s x / c) with a `cap` c; x is the product plus the head's bias.

    Example: Granite with `logits_scaling` 8 has the scale 1/8, Gemma 2 has the cap 30.
    """

    scale: float = 1.0
    cap: float | None = None

    def under(self, temperature: float) -> dict[str, Any]:
        """The keywords of `linear_log_probs` for logits that are divided by `temperature`.

        c tanh(s x / c) / T is (c / s) tanh(x / (c / s)) / (T / s): a scale is a temperature.
        """
        cap = None if self.cap is None else self.cap / self.scale
        return {"temperature": temperature / self.scale, "cap": cap}

    def apply_(self, products: torch.Tensor) -> torch.Tensor:
        """The logits of x [tokens, vocab], in its place."""
        if self.scale != 1:
            products.mul_(self.scale)
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)


def logits_transform(config: PretrainedConfig) -> LogitsTransform:
    """The transform of a model's family; raises ValueError for one that is not computed."""
    scale = 1.0
    for name in dict.fromkeys([*_MULTIPLIED, *_DIVIDED]):
        factor = getattr(config, name, None)
        if factor in (None, 1):
            continue
        if config.model_type in _MULTIPLIED.get(name, ()):
            scale *= factor
        elif config.model_type in _DIVIDED.get(name, ()):
            scale /= factor
        else:
            raise ValueError(f"model type {config.model_type}: {name} is not supported")
    if scale <= 0:
        raise ValueError(f"model type {config.model_type}: logits are scaled by {scale}")
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitsTransform(scale, None if cap is None else float(cap))
