"""The share of a device's memory that vLLM may use, given all other users during generation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.config import ConfigError

GIB = 2**30
_MARGIN = 0.02  # of the device: fragmentation of a caching allocator
_MIN_MARGIN = GIB // 2
_DIGITS = 4  # of the share; it is rounded down


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`utilization` is vLLM's `gpu_memory_utilization`; `explanation` is a line for the log."""

    utilization: float
    explanation: str


def plan_memory(total: int, used: int, resident: Mapping[str, int], needed: int) -> MemoryPlan:
    """The memory that remains for vLLM, as a share of the device. Sizes are bytes of one device.

    `total` is the device's size. `used` is in use now by users that `resident` does not name: other
    processes, CUDA contexts, NCCL. It is total - free - reserved, by `torch.cuda.mem_get_info` and
    `memory_reserved`, once the caches are empty. `resident` names this process's own memory during
    generation, present now or not: training state that is not offloaded, the two buckets of a
    weight switch. Weights of forward-only roles do not count: an instance frees its KV cache before
    it loads one. `needed` is the minimum for vLLM: the rank's weights, activations, the KV cache of
    one sample.

        share = (total - used - sum(resident) - margin) / total

    with a margin of 2 percent of the device, at least 0.5 GiB; rounded down to four digits.

    **The share of vLLM 0.30** covers total * share bytes: its weights, buffers of attention
    backends and libraries, the peak of a profiled forward pass, its CUDA graphs (estimated, unless
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0), and KV cache in the remaining bytes
    (`v1/worker/gpu_worker.py`, `determine_available_memory`). All but the peak and the graphs are
    measured as the loss of memory *free on the device* since the start, by any process
    (`utils/mem_utils.py`, `memory_profiling`). The start is after vLLM creates its process groups
    (`init_device`), so their NCCL buffers are not in the share. Hence for the caller:

    - memory in use before the start is not in the share: it is subtracted here. NCCL buffers that
      are created later fit into the margin, or are named in `resident`;
    - total * share must be free at the start (`v1/worker/utils.py`, `request_memory`, raises), so
      training state is offloaded, and the caches are emptied, before the engine is created, not
      only before it generates;
    - nothing else allocates or frees on the device meanwhile: vLLM would subtract it from the KV
      cache, or fail an assertion.

    `kv_cache_memory_bytes`, if set, makes vLLM ignore the share for the size of the cache; the
    check at the start remains. Sizes are those of one rank that does not share its device; ranks
    that share a device would each have to name the others' memory as `resident`.

    Raises ConfigError (`rollout.engine`) if less than `needed` remains, with the sum.

    Example: of 80 GiB, 1.5 are in use and buckets need 2 GiB: (80 - 1.5 - 2 - 1.6) / 80 = 0.936.
    """
    assert 0 <= used <= total, f"{used} of {total} bytes in use"
    assert needed >= 0, needed
    assert all(size >= 0 for size in resident.values()), resident
    margin = max(_MIN_MARGIN, math.ceil(total * _MARGIN))
    parts = {"others": used, **resident, "margin": margin}
    left = total - sum(parts.values())
    sums = ", ".join(f"{_gib(size)} {name}" for name, size in parts.items() if size)
    if left < max(needed, total / 10**_DIGITS):  # a share of 0 is none
        raise ConfigError(
            "rollout.engine",
            "vllm",
            f"{_gib(needed)} of the device for it, and {_gib(max(left, 0))} of {_gib(total)} are"
            f" left after {sums}; more ranks in rollout.layout.tp need less on each",
        )
    share = math.floor(left / total * 10**_DIGITS) / 10**_DIGITS
    line = f"{share:.{_DIGITS}f} of {_gib(total)}: {_gib(left)} are left after {sums}"
    return MemoryPlan(share, line)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
