"""The rollout engine that a config asks for, on one rank."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from hybridrl.config import Config, Engine
from hybridrl.engines.rollout.interface import RolloutEngine
from hybridrl.engines.rollout.memory import plan_memory
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.engines.rollout.vllm.engine import VLLMEngine, kv_bytes_per_token
from hybridrl.layout.switching import Switch
from hybridrl.models.shard import GenParallel
from hybridrl.workers.device_residency import free_cached_memory

logger = logging.getLogger(__name__)


def make_rollout_engine(
    config: Config,
    model_path: str,
    model_config: PretrainedConfig,
    switch: Switch,
    parallel: GenParallel,
    device: torch.device,
    stops: StopStrings | None,
) -> RolloutEngine:
    """The engine at this rank's position of the generation mesh. Collective.

    Training's weights must have left the device. The engine is awake, its weights are random.
    """
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    settings: dict[str, Any] = {
        "dtype": getattr(torch, rollout.dtype.value),
        "device": device,
        "max_running": rollout.max_running,
        "block_size": rollout.block_size,
        "kv_cache_tokens": rollout.kv_cache_tokens,
        # Prompts that would not leave room for a response are not in the data.
        "max_sequence": min(longest, model_config.max_position_embeddings),
        "stops": stops,
        "bucket_bytes": round(rollout.layout.bucket_mb * 2**20),
    }
    if rollout.engine is Engine.native:
        return NativeEngine(
            model_config, parallel=parallel, deterministic=config.strict, **settings
        )
    if device.type == "cuda":
        settings["gpu_memory_utilization"] = _utilization(model_config, switch, **settings)
    return VLLMEngine(model_path, model_config, switch.plan.dst, **settings)


def _utilization(
    model_config: PretrainedConfig,
    switch: Switch,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_sequence: int,
    bucket_bytes: int,
    **_: Any,
) -> float:
    """vLLM's share of the device, while training and forward-only roles are offloaded."""
    free_cached_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    layout = switch.plan.dst
    rank = dist.get_rank()
    held = sum(box.size for name in layout.rules for box in layout.local(name, rank))
    stage = layout.mesh.coordinates(rank)["pp"]
    cache = max_sequence * kv_bytes_per_token(model_config, layout.mesh, stage, dtype)
    resident = torch.cuda.memory_reserved(device)
    plan = plan_memory(
        total,
        total - free - resident,
        {"memory that training keeps": resident, "buckets of the weight switch": 2 * bucket_bytes},
        held * dtype.itemsize + cache,
    )
    logger.warning("vLLM's gpu_memory_utilization: %s", plan.explanation)
    return plan.utilization
