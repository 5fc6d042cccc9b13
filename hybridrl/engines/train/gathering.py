"""When FSDP gathers the weights of pipeline chunks and reduces their gradients, around a plan."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from hybridrl.engines.train.fsdp_versions import parameter_groups


def fsdp_modules(roots: Sequence[nn.Module]) -> list[FSDPModule]:
    """Every FSDP group of the chunks."""
    return [m for root in roots for m in root.modules() if isinstance(m, FSDPModule)]


def fsdp_parameters(roots: Sequence[nn.Module]) -> list[Any]:
    """FSDP's own object of every parameter of the chunks, tied ones once."""
    parameters = []
    for module in fsdp_modules(roots):
        for group in parameter_groups(module._get_fsdp_state()):
            parameters += group.fsdp_params
    return parameters


def keep_unreduced(roots: Sequence[nn.Module]) -> None:
    """From now on gradients are summed whole on each rank, until `reduce_gradients`.

    Gathered weights stay until then, too.
    """
    for module in fsdp_modules(roots):
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(False)
        module.set_requires_gradient_sync(False)


def reduce_gradients(root: nn.Module, all_reduce: bool = True) -> None:
    """Reduce and shard what a chunk's backward passes have summed, and shard its weights.

    It is what torch's pipeline stages do after their last pass (`perform_reduce_grad`). Collective
    over the ranks of fsdp and of replicas. Without `all_reduce` FSDP keeps the gradients of this
    replica, and adds them when it next sums over replicas.
    """
    if not isinstance(root, FSDPModule):
        return
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    root.set_requires_all_reduce(all_reduce)
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    for own in state._state_ctx.all_states:
        for group in parameter_groups(own):
            group.post_backward()
    state._root_post_backward_final_callback()


@contextmanager
def gathered(roots: Sequence[nn.Module], trains: bool) -> Iterator[None]:
    """Weights of all chunks gathered within the body, which may run passes in any order.

    They are of engines that keep them so from forward to backward (`keep_unsharded`). After it they
    are sharded, and gradients of what `trains` reduced. Collective.
    """
    modules = fsdp_modules(roots)
    if trains:
        keep_unreduced(roots)
    for module in modules:
        module.unshard()
    yield
    for root in roots if trains else ():
        reduce_gradients(root)
    for module in modules if not trains else ():
        module.reshard()
