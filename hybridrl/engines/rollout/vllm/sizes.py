"""Sizes of vLLM's KV cache, and its share of the device."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from hybridrl.engines.rollout.interface import EngineParts
from hybridrl.engines.rollout.memory import plan_memory
from hybridrl.layout.layout import stages_of_layers
from hybridrl.layout.mesh import Mesh
from hybridrl.models.parallel import head_size

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


def kv_bytes_per_token(config: PretrainedConfig, mesh: Mesh, stage: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values on a rank of a pipeline stage.

    With more tp ranks than heads several ranks hold the same one.
    """
    layers = stages_of_layers(config.num_hidden_layers, mesh.extent("pp")).count(stage)
    heads = max(1, config.num_key_value_heads // mesh.extent("tp"))
    return layers * 2 * heads * head_size(config) * dtype.itemsize


def device_share(parts: EngineParts) -> float:
    """vLLM's share of the GPU, while training and forward-only roles are offloaded."""
    free, total = torch.cuda.mem_get_info(parts.device)
    layout, rank = parts.switch.plan.dst, dist.get_rank()
    # Needed: the rank's weights, and the cache of one sample.
    weights = sum(box.size for name in layout.rules for box in layout.local(name, rank))
    stage = layout.mesh.coordinates(rank)["pp"]
    per_token = kv_bytes_per_token(parts.model_config, layout.mesh, stage, parts.dtype)
    needed = weights * parts.dtype.itemsize + parts.max_sequence * per_token
    # In use: this process's memory, that of others.
    resident = torch.cuda.memory_reserved(parts.device)
    buckets = 2 * parts.bucket_bytes
    plan = plan_memory(
        total,
        total - free - resident,
        {"memory that training keeps": resident, "buckets of the weight switch": buckets},
        needed,
    )
    logger.warning("vLLM's gpu_memory_utilization: %s", plan.explanation)
    return plan.utilization
