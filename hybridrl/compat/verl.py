"""The one place that imports verl: its control plane.

`import verl` takes seconds and changes the process (logging, environment), so every function here
imports it lazily. docs/controller.md says which parts of verl are used.
"""

import logging
import traceback
from collections.abc import Callable
from typing import Any

from hybridrl.telemetry.log import logged
from hybridrl.workers.dispatch import Dispatch, dispatched_methods, runs_concurrently

logger = logging.getLogger(__name__)

_CONCURRENT = "concurrent"  # Ray's concurrency group of methods that run concurrently


def has_gpu() -> bool:
    """Whether this machine has a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def environment() -> dict[str, str]:
    """Variables that verl reads at import; they must be set in the driver and in every worker."""
    if has_gpu():
        return {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "hybridrl.compat.verl_platform",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
    }


def _same(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # execute_all splits lists as long as the group, so every argument is split explicitly.
    n = group.world_size
    return tuple([arg] * n for arg in args), {key: [value] * n for key, value in kwargs.items()}


def _per_rank(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for arg in (*args, *kwargs.values()):
        assert isinstance(arg, list), "one entry per rank"
        assert len(arg) == group.world_size, "one entry per rank"
    return args, kwargs


def _references(group: Any, output: list[Any]) -> list[Any]:
    return output


_DISPATCH = {
    Dispatch.SAME: {"dispatch_fn": _same, "collect_fn": _references},
    Dispatch.PER_RANK: {"dispatch_fn": _per_rank, "collect_fn": _references},
}


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with logged(logger, f"call {name}"):
                return getattr(self.worker, name)(*args, **kwargs)
        except Exception:
            traceback.print_exc()  # into the rank's log; the driver gets one line
            raise

    method.__name__ = name
    return method


def worker_class(cls: type, make: Callable[..., Any], *args: Any, **kwargs: Any) -> type:
    """A verl Worker around `make(rank, world_size, *args, **kwargs)`, marks of `cls` translated.

    Every call returns Ray references, one per rank, at once.
    """
    import ray
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import register

    def init(self: Any) -> None:
        Worker.__init__(self)
        self.worker = make(self.rank, self.world_size, *args, **kwargs)

    methods: dict[str, Any] = {}
    for name, mode in dispatched_methods(cls).items():
        method = _forward(name)
        if runs_concurrently(cls, name):
            # The innermost function: Ray unwraps every wrapper for a method's group.
            method = ray.method(concurrency_group=_CONCURRENT)(method)
        methods[name] = register(dispatch_mode=_DISPATCH[mode], blocking=False)(method)
    return type(cls.__name__, (Worker,), {"__init__": init, **methods})


def worker_group(
    worker: type, placement_groups: list[Any], use_gpu: bool, env: dict[str, str]
) -> Any:
    """Start one actor per bundle of placement groups that are ready; returns a RayWorkerGroup.

    Ranks go through one group after the other, in the order of their nodes' addresses.
    """
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    # max_colocate_count is the CPUs that verl would ask for per bundle; one actor hosts all roles.
    sizes = [group.bundle_count for group in placement_groups]
    pool = RayResourcePool(sizes, use_gpu=use_gpu, max_colocate_count=1)
    pool.pgs = placement_groups
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(
            ray.remote(concurrency_groups={_CONCURRENT: 1})(worker)
        ),
        device_name="cuda" if use_gpu else "cpu",
        use_gpu=use_gpu,
        bin_pack=False,
        worker_env=env,
    )


def subgroup(group: Any, ranks: list[int]) -> Any:
    """The same actors, but only those of `ranks`: one, or a pool."""
    from verl.single_controller.ray import RayWorkerGroup

    return RayWorkerGroup.from_detached(
        worker_handles=[group.workers[rank] for rank in ranks],
        ray_cls_with_init=group.ray_cls_with_init,
        device_name=group.device_name,
        use_gpu=group.use_gpu,
    )
