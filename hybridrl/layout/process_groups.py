"""Process groups that only their members create, under names that all members derive alike.

By default every rank of the world must call `torch.distributed.new_group`, which takes seconds
with many groups at 512 ranks. With `use_local_synchronization` only the members call it. But then
torch puts the process's count of groups into the name, so members whose counts differ wait for
each other under two names.

Here a name consists of the group's ranks and the number of earlier groups of exactly these ranks.
All members count these groups alike, whatever other groups each of them has created. Members must
create their groups in one common order: `WeightSwitch` sorts them, and a mesh goes axis by axis.
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from hybridrl.layout.mesh import Mesh

logger = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 120.0
"""Seconds that a group's members wait for each other."""


class GroupTimeout(RuntimeError):
    """Some members of a process group did not join; the message names the group and them."""


def group_name(ranks: Sequence[int], num_before: int) -> str:
    """The name of the group of `ranks` after `num_before` others of the same ranks."""
    return f"{_prefix(ranks)}{num_before}"


def shared_group(ranks: Sequence[int], number: int = 0) -> dist.ProcessGroup:
    """The group of exactly these ranks, in this order, created at the first call by them alone.

    A communicator on a GPU takes memory, so a process has one for the same ranks. Where that does
    not do, since messages must not wait for others, it has more by `number`.
    """
    is_whole = list(ranks) == list(range(dist.get_world_size()))
    if is_whole and number == 0:
        whole = dist.group.WORLD
        assert whole is not None
        return whole
    name = group_name(ranks, number - is_whole)
    while True:
        world: Any = distributed_c10d._world
        created: dict[str, dist.ProcessGroup] = {n: group for group, n in world.pg_names.items()}
        if name in created:
            return created[name]
        new_group(ranks)


def axis_group(mesh: Mesh, *axes: str) -> dist.ProcessGroup:
    """This rank's group along `axes` of a mesh of all ranks, one process group for the same ranks.

    All ranks ask for the same axes in the same order.
    """
    return shared_group(mesh.along(dist.get_rank(), *axes))


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """torch's mesh of all ranks. A rank creates its own group of each axis, and no other.

    torch's `init_device_mesh` has every rank create the groups of all: with 512 ranks of fsdp 64 x
    tp 8 that is 1,096 calls a mesh.
    """
    # Group ranks are coordinates: torch relies on it, and ranks along an axis may not ascend.
    groups = [shared_group(mesh.line(dist.get_rank(), axis)) for axis in mesh.names]
    ranks = torch.from_numpy(mesh.grid())
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.names)


def warm_up(groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """One all-reduce in each of `groups`, those of one rank and None left out.

    NCCL's communicators are created by a group's first operation, which takes memory and blocks the
    host until all members come. Where that operation is a batch of messages of only some members,
    it hangs. So all members warm a group up before it is used, and before free memory is measured.

    Members call it together, each with all groups that it is in. The order is common to all ranks,
    so that none waits in a circle: by size, then by the distance of the first two ranks. So the
    groups of a mesh's axis come up at the same time. A mesh takes one all-reduce an axis, at
    any number of ranks.
    """
    ordered = {}
    for group in groups:
        if group is not None and group.size() > 1:
            ranks = dist.get_process_group_ranks(group)
            ordered[-len(ranks), ranks[1] - ranks[0], *ranks, group.group_name] = group
    for _, group in sorted(ordered.items()):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def new_group(ranks: Sequence[int], timeout_s: float = GROUP_TIMEOUT_S) -> dist.ProcessGroup:
    """Create the process group of `ranks` (global ranks, in its order); only they call it.

    Raises GroupTimeout if a member has not called it after `timeout_s` seconds.
    """
    members = tuple(ranks)
    rank = dist.get_rank()
    assert len(set(members)) == len(members), f"ranks {members} must differ"
    assert rank in members, f"rank {rank} is no member of {members}"
    world: Any = distributed_c10d._world
    before = [name for name in world.pg_names.values() if name.startswith(_prefix(members))]
    name = group_name(members, len(before))
    store = distributed_c10d._get_default_store()
    logger.debug("process group %s: waiting for ranks %s", name, _listed(members))
    _meet(store, name, members, rank, timeout_s)
    # torch's own `new_group` does the same, but picks the name. OpenRLHF and slime call this helper
    # for the same reason.
    helper: Any = distributed_c10d._new_process_group_helper
    backend = world.pg_map[dist.group.WORLD][0]
    group, _ = helper(
        len(members),
        members.index(rank),
        list(members),
        dist.Backend(backend),
        store,
        name,
        timeout=_timeout_of_world(),
        group_desc=name,
    )
    logger.debug("process group %s is up", name)
    world.pg_group_ranks[group] = {member: i for i, member in enumerate(members)}
    return group


def _timeout_of_world() -> timedelta:
    """The time limit of collectives among all ranks (`cluster.timeout_s`), for every group."""
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    options = getattr(backend, "options", None)
    if options is None:  # a fake backend, which never waits
        return timedelta(seconds=GROUP_TIMEOUT_S)
    limit: timedelta = options._timeout
    return limit


def _prefix(ranks: Sequence[int]) -> str:
    return f"hybridrl/{'_'.join(map(str, ranks))}/"


def _meet(store: Any, name: str, members: Sequence[int], rank: int, timeout_s: float) -> None:
    """Wait until all members have called `new_group` for the group `name`."""
    keys = {member: f"{name}/here/{member}" for member in members}
    store.set(keys[rank], "")
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except RuntimeError as error:  # each kind of store has its own
        missing = [member for member, key in keys.items() if not store.check([key])]
        if not missing:
            raise
        raise GroupTimeout(
            f"process group {name} of ranks {_listed(members)} did not come up in"
            f" {timeout_s:.0f} s: rank {_listed(missing)} did not join"
        ) from error


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
