"""When FSDP gathers the weights of pipeline chunks and reduces their gradients, around a plan."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def fsdp_modules(roots: Sequence[nn.Module]) -> list[FSDPModule]:
    """Every FSDP group of the chunks."""
    return [m for root in roots for m in root.modules() if isinstance(m, FSDPModule)]


@contextmanager
def reduced_at_end(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Within the body gradients are summed whole on each rank; reduced and sharded after.

    Weights that a backward pass gathers stay. Collective over the ranks of fsdp and of replicas.
    """
    for module in fsdp_modules(roots):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)
    yield
    for root in roots:
        if isinstance(root, FSDPModule):
            _reduce(root)


@contextmanager
def gathered(roots: Sequence[nn.Module]) -> Iterator[None]:
    """Weights of all chunks gathered within the body, which may run passes in any order.

    They are sharded after it; those that trained already are. Collective as `reduced_at_end`.
    """
    modules = fsdp_modules(roots)
    param_groups = [g for m in modules for g in fully_shard.state(m)._fsdp_param_groups]  # type: ignore[attr-defined]
    after_forward = [group.post_forward_mesh_info for group in param_groups]
    for group in param_groups:
        group.post_forward_mesh_info = None  # no resharding between forward and backward
    for module in modules:
        module.unshard()
    yield
    for group, info in zip(param_groups, after_forward, strict=True):
        group.post_forward_mesh_info = info
    for module in modules:
        module.reshard()


def _reduce(root: FSDPModule) -> None:
    """What torch's pipeline stages do after their last backward pass (`perform_reduce_grad`)."""
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    for own in state._state_ctx.all_states:
        for group in own._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
