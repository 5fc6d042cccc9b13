"""Sizes of vLLM's KV cache, and its share of the device."""

import logging
from typing import Any

import torch

from hybridrl.engines.rollout.interface import EngineParts
from hybridrl.engines.rollout.memory import (
    device_memory_left,
    rank_token_bytes,
    rank_weight_bytes,
    vllm_batched_tokens,
    vllm_share,
    vllm_step_bytes,
)

logger = logging.getLogger(__name__)


def cache_arguments(
    blocks: int, block_size: int, bytes_per_token: int, max_sequence: int
) -> dict[str, Any]:
    """vLLM's arguments for a cache of so many blocks; with 0 it sizes the cache itself."""
    if not blocks:
        return {"block_size": block_size, "max_model_len": max_sequence}
    return {
        "block_size": block_size,
        # It starts with no cache that is smaller than this.
        "max_model_len": min(max_sequence, blocks * block_size),
        # vLLM keeps one block for itself.
        "num_gpu_blocks_override": blocks + 1,
        "kv_cache_memory_bytes": (blocks + 1) * block_size * bytes_per_token,
    }


def device_share(parts: EngineParts) -> float:
    """vLLM's share of the GPU, while training and forward-only roles are offloaded."""
    memory = device_memory_left(parts)
    sample = parts.max_sequence * rank_token_bytes(parts)
    of_step = vllm_step_bytes(
        parts.model_config, parts.rollout, parts.dtype, parts.parallel.tp, memory.total
    )
    share = vllm_share(memory, rank_weight_bytes(parts) + sample + max(of_step))
    logger.warning("vLLM's gpu_memory_utilization: %s", share.explanation)
    return share.utilization


def batched_tokens(device: torch.device) -> int | None:
    """Tokens of a step at most, on this device; None: vLLM's own number, which suits a CPU."""
    if device.type != "cuda":
        return None
    return vllm_batched_tokens(torch.cuda.get_device_properties(device).total_memory)
