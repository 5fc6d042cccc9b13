"""vLLM inside of existing processes: its environment and its process groups."""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.layout.mesh import Mesh

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the launcher decides how ranks share the cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def set_environment(layers: Sequence[int]) -> None:
    """Set vLLM's environment variables, before its import.

    `layers` counts the layers of each pipeline stage. Variables that the user has set are kept,
    except those that the engine depends on.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if settings := os.environ.get("PYTORCH_ALLOC_CONF"):
        # vLLM 0.30 knows the old name alone. Unseen, expandable segments would break its pool.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", settings)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layers))
    # vLLM asks for these, though the process group exists.
    os.environ.setdefault("RANK", str(dist.get_rank()))
    os.environ.setdefault("LOCAL_RANK", "0")


@contextmanager
def groups_of(mesh: Mesh) -> Iterator[None]:
    """While vLLM starts: its tp and pp groups are those of the generation mesh.

    vLLM numbers ranks as replicas x pp x tp. Such a number is an index into the mesh, and is
    replaced by the rank with these coordinates. Shared memory gets a name unique on this node,
    which is unlinked once all ranks have mapped it. So it is freed even if processes are killed.
    """
    from vllm.distributed import parallel_state

    # vLLM would use existing groups, whatever their ranks.
    assert not parallel_state.model_parallel_is_initialized(), "close the process's other engine"
    order: list[int] = mesh.grid().ravel().tolist()
    identity = [f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"]
    dist.broadcast_object_list(identity, src=0)
    init_group = parallel_state.init_model_parallel_group

    def init_mesh_group(group_ranks: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> Any:
        os.environ["VLLM_DIST_IDENT"] = identity[0]
        ranks = [[order[index] for index in group] for group in group_ranks]
        logger.debug("vLLM makes process groups of ranks %s", ranks)
        # Its message queues serve workers in other processes, and there are none.
        group = init_group(ranks, *args, **{**kwargs, "use_message_queue_broadcaster": False})
        _unlink_shared_memory(group)
        return group

    set_num_threads = torch.set_num_threads
    parallel_state.init_model_parallel_group = init_mesh_group
    try:
        with _memory_unbound():
            yield
    finally:
        parallel_state.init_model_parallel_group = init_group
        torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it by a stub


@contextmanager
def _memory_unbound() -> Iterator[None]:
    """Keep vLLM's CPU worker from binding this process's memory to one NUMA node.

    It would bind training's memory, too, and that of all ranks to the same node. To bind memory,
    start the ranks under numactl.
    """
    operations: Any = torch.ops._C
    if not hasattr(operations, "init_cpu_memory_env"):  # on a GPU
        yield
        return
    bind = operations.init_cpu_memory_env
    operations.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        operations.init_cpu_memory_env = bind


def _unlink_shared_memory(group: Any) -> None:
    """Unlink this rank's shared memory. vLLM leaks it, 4 MiB, when processes end."""
    module = getattr(group.device_communicator, "dist_module", None)
    name = getattr(module, "group_name", None)  # where its CPU backend shares memory
    if name is not None:
        Path("/dev/shm", f"{name}_{group.rank_in_group}").unlink()


def end_groups() -> None:
    """End vLLM's process groups, so that the process can have an engine on another mesh.

    Also its group of all ranks: after this run the process may take part in another.
    """
    from vllm import envs
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
    envs.disable_envs_cache()  # the next mesh may have other stages
