"""Starting vLLM's engine in this process: its arguments, its sizes, and what it lacks there."""

import importlib.util
import inspect
import logging
import math
import sys
from collections.abc import Mapping
from functools import cache, wraps
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel

from hybridrl.engines.rollout.interface import EngineParts
from hybridrl.engines.rollout.memory import (
    device_memory_left,
    rank_token_bytes,
    rank_weight_bytes,
    vllm_batched_tokens,
    vllm_share,
    vllm_step_bytes,
)
from hybridrl.engines.rollout.vllm.groups import groups_of
from hybridrl.engines.rollout.vllm.memory import uniform_cache
from hybridrl.layout.mesh import Mesh

logger = logging.getLogger(__name__)


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


# Sizes


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


# Parts of vLLM and of transformers that are replaced


def compute_own_experts() -> None:
    """Let vLLM's CPU kernel, which knows all experts or none, compute a rank's own ones alone.

    It takes the numbers of experts as places in the rank's tensors, and ignores the map from one to
    the other. With the map applied, experts of other ranks get the weight 0.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

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


def give_own_classes() -> None:
    """Let vLLM make transformers' models from classes of its own, in this process.

    For a family without a model of its own vLLM runs transformers' model, and rewrites the class of
    its decoder (`support_torch_compile`). The rank trains with that class. So vLLM gets another:
    the module of the model is loaded once more, under another name.
    """
    from vllm.model_executor.models.transformers import base

    base.AutoModel = OwnAutoModel


class OwnAutoModel:
    """What vLLM calls of transformers' `AutoModel`."""

    @staticmethod
    def from_config(
        config: PretrainedConfig, *, trust_remote_code: bool = False, **options: Any
    ) -> PreTrainedModel:
        """A model with random weights, of a copy of the class that `AutoModel` would take."""
        shared = MODEL_MAPPING[type(config)]
        own = getattr(_copy_of(shared.__module__), shared.__name__)
        model: PreTrainedModel = own._from_config(config, **options)
        return model


@cache
def _copy_of(name: str) -> ModuleType:
    """The module `name`, loaded as another; it stays in its package, for relative imports."""
    path = inspect.getfile(sys.modules[name])
    spec = importlib.util.spec_from_file_location(f"{name}_of_vllm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
