"""Whole experts on the ranks of an instance, for vLLM's CPU kernel, which knows all or none."""

from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def compute_own_experts() -> None:
    """Let vLLM's CPU kernel compute a rank's own experts alone, in this process.

    It takes the numbers of experts as places in the rank's tensors, and ignores the map from one to
    the other. With the map applied, experts of other ranks get the weight 0.
    """
    compute_all = CPUUnquantizedExperts.apply
    if hasattr(compute_all, "__wrapped__"):
        return

    @wraps(compute_all)
    def apply(
        self: Any, *, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None, **others: Any,
    ) -> None:  # fmt: skip
        if expert_map is not None:
            places = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(places < 0, 0)
            topk_ids = places.clamp(min=0)
        compute_all(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **others)

    CPUUnquantizedExperts.apply = apply
