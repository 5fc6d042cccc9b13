"""The memory that a rollout engine may use on a device, given all other users of it."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from hybridrl.config import ConfigError, RolloutConfig
from hybridrl.engines.rollout.batch import PREFILL_TOKENS
from hybridrl.engines.rollout.decode import FAMILIES as FUSED_FAMILIES
from hybridrl.engines.rollout.interface import EngineParts
from hybridrl.layout.layout import stages_of_layers
from hybridrl.layout.mesh import Mesh
from hybridrl.models.activations import prefill_activations
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.config_json import layers_with_keys
from hybridrl.models.parallel import experts_per_token, kv_heads_of_rank, num_experts
from hybridrl.models.recurrent import layer_state_bytes

logger = logging.getLogger(__name__)

GIB = 2**30
_MARGIN = 0.04  # of the device
_MIN_MARGIN = 3 * 10**9
_LOGITS_COPIES = 8  # of a step's logits in float32, while it samples
_LARGE_DEVICE = 70 * GIB  # from an H100 on, by vLLM's defaults
_MANY_TOKENS, _FEW_TOKENS = 16384, 8192
_PLAIN_COPIES = 3  # where all tokens are drawn from: of tp ranks, joined, exponentiated
SPLIT = 512  # keys, of which the kernel of attention keeps a part: `paged_attention_triton.SPLIT`
_DIGITS = 4  # of the share; it is rounded down
_MORE_TP = "more ranks in rollout.layout.tp need less on each"


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """`left` bytes of a device of `total` for generation; `explanation` is a text for the log."""

    left: int
    total: int
    explanation: str


def device_margin(total: int) -> int:
    """Bytes of a GPU of `total` that no plan counts: 4 percent, at least 3 GB.

    For CUDA's context, modules that it loads late, cuBLAS's workspaces, NCCL's buffers (0.1 to 0.5
    GB a communicator), and what torch's allocator cannot give back. None of it was measured yet.
    """
    return max(_MIN_MARGIN, math.ceil(total * _MARGIN))


def memory_left(total: int, used: int, resident: Mapping[str, int]) -> MemoryLeft:
    """The memory that remains for a rollout engine. Sizes are bytes of one device.

    `total` is the device's size. `used` is in use now by users that `resident` does not name: other
    processes, CUDA contexts, NCCL. It is total - free - reserved, by `torch.cuda.mem_get_info` and
    `memory_reserved`, once the caches are empty. `resident` names this process's own memory during
    generation, present now or not: training state that is not offloaded, the two buckets of a
    weight switch. Weights of forward-only roles do not count: an instance frees its KV cache before
    it loads one.

        left = total - used - sum(resident) - margin

    with the margin of `device_margin`. It can be negative.
    """
    assert 0 <= used <= total, f"{used} of {total} bytes in use"
    assert all(size >= 0 for size in resident.values()), resident
    margin = device_margin(total)
    parts = {"others": used, **resident, "margin": margin}
    left = total - sum(parts.values())
    sums = ", ".join(f"{_gib(size)} {name}" for name, size in parts.items() if size)
    return MemoryLeft(left, total, f"{_gib(max(left, 0))} of {_gib(total)} are left after {sums}")


def device_memory_left(parts: EngineParts) -> MemoryLeft:
    """`memory_left` of this rank's GPU, once torch's caches are empty.

    Training is offloaded, or what will stay of it is in use or among `parts.reserved_bytes`; so is
    what images will take.
    """
    free, total = torch.cuda.mem_get_info(parts.device)
    kept = torch.cuda.memory_reserved(parts.device)
    buckets = 2 * parts.bucket_bytes
    resident = {
        "memory that training keeps": kept,
        "what training and images will take": parts.reserved_bytes,
        "buckets of the weight switch": buckets,
    }
    return memory_left(total, total - free - kept, resident)


def rank_weight_bytes(parts: EngineParts) -> int:
    """Bytes of this rank's generation weights."""
    layout, rank = parts.layout, dist.get_rank()
    sizes = {
        name: torch.float32.itemsize if name in layout.precise else parts.dtype.itemsize
        for name in layout.rules
    }
    return sum(x * box.size for name, x in sizes.items() for box in layout.local(name, rank))


def rank_token_bytes(parts: EngineParts) -> int:
    """Bytes of a token's keys and values on this rank."""
    mesh = parts.layout.mesh
    stage = mesh.coordinates(dist.get_rank())["pp"]
    return kv_bytes_per_token(parts.model_config, mesh, stage, parts.dtype)


def kv_bytes_per_token(config: PretrainedConfig, mesh: Mesh, stage: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values on a rank of a pipeline stage.

    Recurrent layers have none. With more tp ranks than heads several ranks hold the same one.
    """
    stages = stages_of_layers(config.num_hidden_layers, mesh.extent("pp"))
    layers = sum(
        own == stage and has_keys
        for own, has_keys in zip(stages, layers_with_keys(config), strict=True)
    )
    return layers * layer_token_bytes(config, mesh.extent("tp"), dtype)


def num_states(max_running: int) -> int:
    """The sequences whose states an engine has room for: running ones, as many prefixes, one more.

    The last is the one that is computed before its samples have slots.
    """
    return 2 * max_running + 1


def states_bytes(
    config: PretrainedConfig, mesh: Mesh, stage: int, dtype: torch.dtype, max_running: int
) -> int:
    """Bytes of the states of recurrent layers on a rank of a pipeline stage, with the slot 0."""
    stages = stages_of_layers(config.num_hidden_layers, mesh.extent("pp"))
    sizes = zip(stages, layer_state_bytes(config, dtype), strict=True)
    return (num_states(max_running) + 1) * sum(size for own, size in sizes if own == stage)


def layer_token_bytes(config: PretrainedConfig, tp: int, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in one layer on one of `tp` ranks."""
    size = attention_shape(config).head_size
    return 2 * kv_heads_of_rank(config, tp) * size * dtype.itemsize


def native_step_bytes(
    config: PretrainedConfig,
    pass_tokens: int,
    longest: int,
    dtype: torch.dtype,
    tp: int,
    *,
    strict: bool = False,
    sent: int = 0,
) -> tuple[int, int]:
    """Bytes of a prefill's activations, and of a decode step's logits, however it samples.

    A prefill reads prompts of `longest` tokens; a `strict` engine reads one alone. Hidden states
    of `sent` prefills are kept until the next pipeline stage has them.
    """
    tokens = longest if strict else max(PREFILL_TOKENS, longest)
    layer = prefill_activations(config, tokens, longest, dtype=dtype, tp=tp)
    hidden = tokens * config.hidden_size * dtype.itemsize
    return layer + (2 + sent) * hidden, _LOGITS_COPIES * 4 * pass_tokens * config.vocab_size


def sampling_bytes(rollout: RolloutConfig, vocab_size: int) -> int:
    """Bytes of a decode step's logits, as this config samples."""
    narrow = bool(rollout.differing) or rollout.temperature not in (0, 1)
    return (_LOGITS_COPIES if narrow else _PLAIN_COPIES) * 4 * rollout.pass_tokens * vocab_size


def graph_step_bytes(
    config: PretrainedConfig, rollout: RolloutConfig, longest: int, dtype: torch.dtype, strict: bool
) -> int:
    """Bytes that CUDA graphs of decode steps keep besides logits; 0 where there are none.

    The parts of attention, of every split of `longest` tokens in float32, what a layer computes,
    and the block tables. All graphs share them, so they are those of the largest.
    """
    layout = rollout.layout
    takes = config.model_type in FUSED_FAMILIES and not getattr(config, "image_pads", ())
    takes = takes and layout.pp == 1  # `graph_step.obstacle`
    drafts = rollout.draft_length != 0
    if not rollout.graph_buckets or not takes or strict or drafts:
        return 0
    rows = min((n for n in rollout.graph_buckets if n >= rollout.max_running), default=0)
    rows = max(rows, rollout.max_running)
    heads = -(-config.num_attention_heads // layout.tp)
    width = attention_shape(config).head_size
    splits = -(-longest // SPLIT)
    parts = 4 * heads * splits * (width + 2) if splits > 1 else 0
    features = 2 * config.hidden_size + 3 * -(-config.intermediate_size // layout.tp)
    if num_experts(config):  # its layers without any are no larger
        own = getattr(config, "moe_intermediate_size", config.intermediate_size)
        own = own if layout.ep > 1 else -(-own // layout.tp)
        rows_of_experts = experts_per_token(config) * (3 * own + config.hidden_size)
        features = max(features, 3 * config.hidden_size + rows_of_experts)
    tables = 4 * -(-longest // rollout.block_size)
    return rows * (parts + features * dtype.itemsize + tables)


def vllm_batched_tokens(total: int, own: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Tokens of a step of vLLM at most, on a GPU of `total` bytes; `own` is `rollout.vllm`.

    They are those of vLLM's `LLM`. An engine that is made as ours is would have 2,048. It would
    read the prompts of a training step in four to eight times as many passes.
    """
    tokens = own.get("max_num_batched_tokens")
    if isinstance(tokens, int):
        return tokens
    return _MANY_TOKENS if total >= _LARGE_DEVICE else _FEW_TOKENS


def vllm_step_bytes(
    config: PretrainedConfig, rollout: RolloutConfig, dtype: torch.dtype, tp: int, total: int
) -> tuple[int, int]:
    """Bytes of a step's activations, and of its logits, however it samples.

    vLLM measures a pass of as many tokens on a GPU of `total` bytes before it sizes its cache. Its
    attention needs no masks, whatever the prompts' lengths.
    """
    tokens = vllm_batched_tokens(total, rollout.vllm)
    layer = prefill_activations(config, tokens, 1, dtype=dtype, tp=tp)
    hidden = tokens * config.hidden_size * dtype.itemsize
    return layer + 2 * hidden, _LOGITS_COPIES * 4 * rollout.max_running * config.vocab_size


def native_cache(parts: EngineParts) -> int:
    """Tokens of the native engine's KV cache on a GPU, the same on all ranks of an instance.

    The cache comes with memory for what attention copies: the keys and values of one layer.
    """
    config, rollout = parts.model_config, parts.rollout
    prefill, logits = native_step_bytes(
        config,
        rollout.pass_tokens,
        parts.max_sequence,
        parts.dtype,
        parts.parallel.tp,
        strict=parts.deterministic,
        sent=0 if parts.parallel.last else parts.parallel.pp,
    )
    token = rank_token_bytes(parts)
    graphs = graph_step_bytes(config, rollout, parts.max_sequence, parts.dtype, parts.deterministic)
    mesh, most = parts.layout.mesh, rollout.max_running
    stage = mesh.coordinates(dist.get_rank())["pp"]
    states = states_bytes(config, mesh, stage, parts.dtype, most)
    tokens = native_cache_tokens(
        device_memory_left(parts),
        rank_weight_bytes(parts) + logits + graphs + prefill + states,
        token + layer_token_bytes(config, parts.parallel.tp, parts.dtype),
        wanted=rollout.kv_cache_tokens,
        most=most * parts.max_sequence,
        longest=parts.max_sequence,
    )
    least = torch.tensor(tokens)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    logger.info("the KV cache holds %d tokens", least)
    return int(least)


@dataclass(frozen=True, slots=True)
class VLLMShare:
    """`utilization` is vLLM's `gpu_memory_utilization`; `explanation` is a line for the log."""

    utilization: float
    explanation: str


def vllm_share(memory: MemoryLeft, needed: int) -> VLLMShare:
    """What is left, as a share of the device: rounded down to four digits.

    `needed` is the minimum for vLLM, in bytes: the rank's weights, activations, the KV cache of one
    sample.

    **The share of vLLM 0.30** covers total * share bytes: weights, buffers of attention backends
    and libraries, the peak of a profiled forward pass, CUDA graphs (estimated, unless
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). The KV cache has the remaining bytes
    (`v1/worker/gpu_worker.py`, `determine_available_memory`). All but the peak and the graphs are
    measured as the loss of memory *free on the device* since the start, by any process
    (`utils/mem_utils.py`, `memory_profiling`). The start is after vLLM creates its process groups
    (`init_device`), so their NCCL buffers are not in the share. Hence for the caller:

    - memory in use before the start is not in the share: it is subtracted here. NCCL buffers that
      are created later fit into the margin, or are named in `resident`;
    - total * share must be free at the start (`v1/worker/utils.py`, `request_memory`, raises). So
      training state is offloaded, and the caches are emptied, before the engine is created, not
      only before it generates;
    - nothing else allocates or frees on the device meanwhile: vLLM would subtract it from the KV
      cache, or fail an assertion.

    `kv_cache_memory_bytes`, if set, makes vLLM ignore the share for the size of the cache; the
    check at the start remains. Sizes are those of one rank that does not share its device. Ranks
    that share a device would each have to name the others' memory as `resident`.

    Raises ConfigError (`rollout.engine`) if less than `needed` remains, with the sum.

    Example: of 80 GiB, 1.5 are in use and buckets need 2 GiB: (80 - 1.5 - 2 - 3.2) / 80 = 0.916.
    """
    assert needed >= 0, needed
    left, total = memory.left, memory.total
    if left < max(needed, total / 10**_DIGITS):  # a share of 0 is none
        allowed = f"{_gib(needed)} of the device for it, and {memory.explanation}; {_MORE_TP}"
        raise ConfigError("rollout.engine", "vllm", allowed)
    share = math.floor(left / total * 10**_DIGITS) / 10**_DIGITS
    return VLLMShare(share, f"{share:.{_DIGITS}f}: {memory.explanation}")


def native_cache_tokens(
    memory: MemoryLeft, needed: int, token: int, *, wanted: int, most: int, longest: int
) -> int:
    """Tokens of the native engine's KV cache on a GPU, in what its weights and arrays leave.

    `needed` bytes are for weights and the arrays of a step, `token` bytes hold one token. `wanted`
    is `rollout.kv_cache_tokens`; 0 takes as much as fits, `most` at the most. Raises ConfigError
    (`rollout.kv_cache_tokens`) where `wanted`, or a sample of `longest` tokens, does not fit.
    """
    fits = max(0, memory.left - needed) // token
    if fits >= max(wanted, longest):
        return wanted or min(fits, most)
    reason = f"{_gib(needed)} for weights and arrays, {token / 2**10:.1f} KiB a token"
    if fits >= longest:
        allowed = f"at most {fits}: {memory.explanation} ({reason})"
    else:
        allowed = (
            f"room for a sample of {longest} tokens, and {max(fits, 0)} fit: {memory.explanation}"
            f" ({reason}); {_MORE_TP}, a smaller rollout.max_new_tokens, or rollout.dtype=bfloat16"
        )
    raise ConfigError("rollout.kv_cache_tokens", wanted, allowed)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
