"""Which trained roles of a pool are never offloaded: its ranks decide it together, once."""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybridrl.costs.memory import PoolSizes, plan_memory, reserved_bytes
from hybridrl.engines.rollout.memory import device_margin

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StayingRoles:
    """Trained roles whose weights and moments stay on the device while it generates and scores.

    `reserved_bytes` are bytes of a rank that the KV cache leaves to them, and to images.
    """

    names: tuple[str, ...] = ()
    reserved_bytes: int = 0


ALL_LEAVE = StayingRoles()


def staying_roles(sizes: PoolSizes | None, device: torch.device) -> StayingRoles:
    """The roles for which all ranks of the pool have room, by the memory plan. Collective.

    `sizes` are those of the driver's plan, None where it has none. The room is that of this rank's
    device before it holds anything, less what others use of it now. A role stays if it stays on
    every rank.
    """
    if sizes is None or device.type == "cpu":
        return ALL_LEAVE
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    plan = plan_memory(sizes, "cuda", total, device_margin(total) + used)
    votes = torch.tensor([role in plan.staying for role in sizes.trained], dtype=torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    names = tuple(role for role, stays in zip(sizes.trained, votes.tolist(), strict=True) if stays)
    for role in sizes.trained:
        does = "stay on the device" if role in names else "are offloaded while others work"
        logger.info("weights and moments of the %s %s", role, does)
    return StayingRoles(names, reserved_bytes(sizes, names))
