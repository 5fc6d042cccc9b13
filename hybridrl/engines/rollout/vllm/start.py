"""Starting vLLM's engine in this process: its arguments, and what a stage receives."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from hybridrl.engines.rollout.vllm.groups import groups_of
from hybridrl.engines.rollout.vllm.memory import uniform_cache
from hybridrl.engines.rollout.vllm.sizes import cache_arguments
from hybridrl.layout.mesh import Mesh


def engine_arguments(
    model_path: str,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_running: int,
    block_size: int,
    kv_cache_tokens: int,
    max_sequence: int,
    bytes_per_token: int,
    gpu_memory_utilization: float,
    sampler: type,
    batched_tokens: int | None = None,
    records_experts: bool = False,
    whole_experts: bool = False,
    own: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """vLLM's `EngineArgs`; `sampler` is its logits processor that draws every token.

    A step has at most `batched_tokens`; None: vLLM's own number. `own` are the user's
    (`rollout.vllm`).
    """
    on_gpu = device.type == "cuda"
    blocks = math.ceil(kv_cache_tokens / block_size)
    if not on_gpu and not blocks:
        blocks = max_running * math.ceil(max_sequence / block_size)
    return {
        # the model, with random weights
        "model": model_path,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "hf_overrides": {"head_dtype": "float32"},  # as in training
        "seed": 0,
        # ranks: each is a process that exists
        "tensor_parallel_size": mesh.extent("tp"),
        "pipeline_parallel_size": mesh.extent("pp"),
        "distributed_executor_backend": "external_launcher",
        "enable_expert_parallel": whole_experts,
        # It keeps experts as they are loaded; other kernels rearrange them.
        "moe_backend": "triton" if on_gpu else "auto",
        # the cache
        **cache_arguments(blocks, block_size, bytes_per_token, max_sequence),
        "gpu_memory_utilization": gpu_memory_utilization,
        "enable_prefix_caching": True,
        "disable_hybrid_kv_cache_manager": True,
        "enable_sleep_mode": on_gpu,
        # a step
        "max_num_seqs": max_running,
        "scheduling_policy": "priority",  # continued samples go before those submitted later
        "enforce_eager": not on_gpu,
        "max_num_batched_tokens": batched_tokens,
        # Under pp its V1 runner has one batch at a time; its CPU build has no other device to wait
        # for.
        "async_scheduling": on_gpu and mesh.extent("pp") == 1,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "enable_return_routed_experts": records_experts,
        "logits_processors": [sampler],
        **own,
    }


def start_engine(
    arguments: dict[str, Any], mesh: Mesh, block_size: int, device: torch.device
) -> Any:
    """vLLM's engine on the groups of `mesh`; all its ranks call it. Random state is kept."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    devices = [device] if device.type == "cuda" else []
    if arguments["enable_expert_parallel"] and not devices:
        from hybridrl.engines.rollout.vllm.experts import compute_own_experts

        compute_own_experts()
    with groups_of(mesh), uniform_cache(block_size), torch.random.fork_rng(devices):
        return LLMEngine.from_engine_args(EngineArgs(**arguments))


def make_intermediate_tensors(
    runner: Any, model: Any, dtype: torch.dtype, device: torch.device
) -> None:
    """What a stage receives, which vLLM makes in a warm-up that its CPU worker leaves out."""
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=dtype, device=device
        )
