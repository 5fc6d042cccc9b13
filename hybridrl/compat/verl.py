"""The one place that imports verl: its control plane.

`import verl` takes seconds and changes the process (logging, environment), so every function here
imports it lazily. Of verl only worker groups and resource pools are used.
"""

import logging
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config import Device
from hybridrl.system.activity import begin_call
from hybridrl.system.devices import local_index
from hybridrl.telemetry.log import logged
from hybridrl.workers.dispatch import Dispatch, dispatched_methods, runs_concurrently

logger = logging.getLogger(__name__)

_CONCURRENT = "concurrent"  # Ray's concurrency group of methods that run concurrently


_SEES_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Bundle:
    """The resources of one rank: bundle `index` of a placement group, on `node` at `address`."""

    address: str
    node: str
    index: int
    group: Any


def environment(device: Device) -> dict[str, str]:
    """Variables that verl reads at import; they must be set in the driver and in every worker.

    Ranks on GPUs see all GPUs of their node, so that they can map each other's memory: vLLM's
    all-reduce and torch's symmetric memory do.
    """
    if device is Device.cuda:
        # Told, not found: the driver's machine may have no GPU.
        return {"VERL_PLATFORM": "nvidia", "VERL_USE_EXTERNAL_PLUGINS": "none", _SEES_ALL: "1"}
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


def _forward(name: str, is_concurrent: bool) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_concurrent:  # what a rank does beside is user code
            begin_call(name)
        try:
            with logged(logger, f"call {name}"):
                return getattr(self.worker, name)(*args, **kwargs)
        except Exception:
            traceback.print_exc()  # into the rank's log; the driver gets one line
            raise
        finally:
            if not is_concurrent:
                begin_call("")

    method.__name__ = name
    return method


def claim_gpu() -> None:
    """In an actor on a GPU, which sees all of its node: set LOCAL_RANK to its index.

    Raises RuntimeError for a GPU that CUDA does not show it.
    """
    import ray

    if os.environ.pop(_SEES_ALL, None):
        assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["LOCAL_RANK"] = str(local_index(assigned, visible))


def worker_class(cls: type, make: Callable[..., Any], *args: Any, **kwargs: Any) -> type:
    """A verl Worker around `make(rank, world_size, *args, **kwargs)`, marks of `cls` translated.

    Every call returns Ray references, one per rank, at once.
    """
    import ray
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import register

    def init(self: Any) -> None:
        claim_gpu()  # verl would take the GPU's name for its index
        Worker.__init__(self)
        self.worker = make(self.rank, self.world_size, *args, **kwargs)

    methods: dict[str, Any] = {}
    for name, mode in dispatched_methods(cls).items():
        is_concurrent = runs_concurrently(cls, name)
        method = _forward(name, is_concurrent)
        if is_concurrent:
            # The innermost function: Ray unwraps every wrapper for a method's group.
            method = ray.method(concurrency_group=_CONCURRENT)(method)
        methods[name] = register(dispatch_mode=_DISPATCH[mode], blocking=False)(method)
    return type(cls.__name__, (Worker,), {"__init__": init, **methods})


def worker_group(
    worker: type, bundles: Sequence[Bundle], device: Device, env: dict[str, str]
) -> Any:
    """Start the actor of every rank on its bundle; returns a RayWorkerGroup.

    verl would number ranks by bundle, and start a process just to look up the first one's address.
    """
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    free = iter(bundles)

    class OnBundles(RayClassWithInitArgs):
        def __call__(self, *_: Any, **options: Any) -> Any:
            bundle, known = next(free), {"placement_group", "placement_group_bundle_idx"}
            others = {name: value for name, value in options.items() if name not in known}
            return super().__call__(bundle.group, bundle.index, **others)

    class GroupWithAddress(RayWorkerGroup):
        def _get_master_addr_port(self, *_: Any, **__: Any) -> None:
            # The port is not used: the first rank binds a free one and tells it.
            self._master_addr, self._master_port = bundles[0].address, "0"

    use_gpu = device is Device.cuda
    # max_colocate_count is the CPUs that verl would ask for per bundle; one actor hosts all roles.
    groups = list({id(bundle.group): bundle.group for bundle in bundles}.values())
    sizes = [group.bundle_count for group in groups]
    pool = RayResourcePool(sizes, use_gpu=use_gpu, max_colocate_count=1)
    pool.pgs = groups
    return GroupWithAddress(
        resource_pool=pool,
        ray_cls_with_init=OnBundles(ray.remote(concurrency_groups={_CONCURRENT: 1})(worker)),
        device_name="cuda" if use_gpu else "cpu",
        use_gpu=use_gpu,
        bin_pack=False,
        worker_env=env,
    )


def subgroup(group: Any, ranks: list[int]) -> Any:
    """A group of the actors of some `ranks` of `group`: of one rank, or of a pool."""
    from verl.single_controller.ray import RayWorkerGroup

    return RayWorkerGroup.from_detached(
        worker_handles=[group.workers[rank] for rank in ranks],
        ray_cls_with_init=group.ray_cls_with_init,
        device_name=group.device_name,
        use_gpu=group.use_gpu,
    )


def group_of(worker: type, handles: Sequence[Any]) -> Any:
    """A group over handles that have the methods of `worker`, on whatever actors."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

    return RayWorkerGroup.from_detached(
        worker_handles=list(handles),
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(worker)),
        device_name="cpu",
        use_gpu=False,
    )
