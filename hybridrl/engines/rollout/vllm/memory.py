"""vLLM's memory, freed and allocated again, and the size of its cache, on a GPU and on a CPU."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def uniform_cache(block_size: int) -> Iterator[None]:
    """While vLLM starts with `disable_hybrid_kv_cache_manager`: equal caches on all ranks.

    Each rank has a scheduler. If their caches differed, they would decide differently and deadlock;
    vLLM compares caches only if one scheduler serves all ranks. So

    - layers with a sliding window cache all tokens, like other layers. On a stage without other
      layers vLLM would free the blocks outside of the window.
    - every rank has as many blocks as the one with the least room: stages of fewer layers have room
      for more.
    """
    from vllm.distributed.parallel_state import get_world_group
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core import kv_cache_utils

    unify = kv_cache_utils.unify_hybrid_kv_cache_specs
    num_blocks_of = kv_cache_utils.may_override_num_blocks

    def cache_all(specs: dict[str, Any]) -> None:
        for name, spec in specs.items():
            if isinstance(spec, kv_cache_interface.SlidingWindowSpec):
                specs[name] = kv_cache_utils.replace_as(
                    spec,
                    kv_cache_interface.FullAttentionSpec,
                    drop=("extra_retained_tokens",),
                    block_size=block_size,
                )

    def least(*args: Any) -> int:
        num_blocks = torch.tensor(num_blocks_of(*args))
        dist.all_reduce(num_blocks, dist.ReduceOp.MIN, group=get_world_group().cpu_group)
        return int(num_blocks)

    kv_cache_utils.unify_hybrid_kv_cache_specs = cache_all
    kv_cache_utils.may_override_num_blocks = least
    try:
        yield
    finally:
        kv_cache_utils.unify_hybrid_kv_cache_specs = unify
        kv_cache_utils.may_override_num_blocks = num_blocks_of


class DeviceMemory:
    """Weights and KV cache on a GPU, by vLLM's allocator: CUDA graphs stay valid.

    Its sleep has level 2, which discards: training fills the weights, and the tokens the cache.
    Level 1 would copy the weights to the host needlessly.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def sleep(self) -> None:
        """Free weights and KV cache."""
        self._worker.sleep(level=2)

    def wake(self) -> None:
        """Allocate the weights; buffers are restored."""
        self._worker.wake_up(tags=["weights"])

    def free_cache(self) -> None:
        """Free the KV cache, keep the weights."""
        from vllm.device_allocator.cumem import CuMemAllocator

        CuMemAllocator.get_instance().discard(("kv_cache",))
        torch.cuda.empty_cache()

    def make_cache(self) -> None:
        """Make room for the KV cache."""
        self._worker.wake_up(tags=["kv_cache"])


class HostMemory:
    """Memory of a CPU: the cache can be freed; the weights, packed by the backend, stay."""

    def __init__(self, caches: Iterable[torch.Tensor]) -> None:
        storages = {cache.data_ptr(): cache.untyped_storage() for cache in caches}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]

    def sleep(self) -> None:
        """Free the KV cache."""
        self.free_cache()

    def wake(self) -> None:
        """Nothing: the weights were not freed."""

    def free_cache(self) -> None:
        """Free the KV cache, keep the weights."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def make_cache(self) -> None:
        """Allocate the KV cache, of zeros: unused entries of a block must not be NaN."""
        for storage, size in self._storages:
            storage.resize_(size)
            storage.fill_(0)  # type: ignore[attr-defined]
