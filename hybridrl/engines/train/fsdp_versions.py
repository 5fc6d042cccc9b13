"""Where the supported versions of torch differ in FSDP2: groups of parameters, and their meshes.

From torch 2.12 on a parameter may name a mesh, and a module has a group of parameters for each
mesh. In torch 2.11 a module has one mesh and one group, so experts become modules of FSDP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Shard

from hybridrl.layout.process_groups import shared_group

ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)  # not in 2.11


def keeps_formats() -> bool:
    """Return whether some parameters of a module may be gathered in another format than others."""
    return ShardPlacementResult is not None


def parameter_groups(state: Any) -> Sequence[Any]:
    """Return the groups of parameters that FSDP gathers for a module, by the module's state."""
    if hasattr(state, "_fsdp_param_groups"):
        groups: Sequence[Any] = state._fsdp_param_groups
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@dataclass(frozen=True)
class Sharding:
    """How FSDP shards the modules of a model: on `mesh`, whose last axis shards.

    `placements` say which dimension of each parameter is sharded, by its `id`. `experts` is the
    mesh of the parameters in `of_experts`; None where that is `mesh`, too. Parameters in `precise`
    are gathered as they are kept, whatever format the `policy` has for others.
    """

    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    placements: Mapping[int, Shard]
    experts: DeviceMesh | None
    of_experts: frozenset[int]
    precise: frozenset[int] = frozenset()

    def apply(self, module: nn.Module, experts: Sequence[nn.Module]) -> None:
        """Shard what no call has sharded yet; `experts` are the modules of experts within it."""
        if self.experts is not None and ShardPlacementResult is None:
            # A module of FSDP casts its inputs, but the router's weights stay as they are.
            policy = replace(self.policy, cast_forward_inputs=False)
            for own in experts:
                self._shard(own, self.experts, policy, self._placement)
        placement: Callable[[nn.Parameter], Any] = self._placement
        several = self.experts is not None or self.precise
        if several and ShardPlacementResult is not None:
            placement = self._placement_with_mesh
        assert not self.precise or keeps_formats(), "bfloat16 of recurrent layers"
        self._shard(module, self.mesh, self.policy, placement)
        if self.precise:
            for group in parameter_groups(module._get_fsdp_state()):  # type: ignore[operator]
                if group.mesh_info is self._precise_mesh:
                    group.mp_policy = replace(self.policy, param_dtype=None)

    def _shard(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        placement: Callable[[nn.Parameter], Any],
    ) -> None:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=self.reshard_after_forward,
            shard_placement_fn=placement,
        )

    def _placement(self, parameter: nn.Parameter) -> Shard:
        return self.placements[id(parameter)]

    def _placement_with_mesh(self, parameter: nn.Parameter) -> Any:
        shard = self._placement(parameter)
        if id(parameter) in self.precise:
            return ShardPlacementResult(shard, self._precise_mesh)
        if self.experts is None or id(parameter) not in self.of_experts:
            return shard
        return ShardPlacementResult(shard, self._expert_mesh)

    @cached_property
    def _expert_mesh(self) -> FSDPMeshInfo:
        """The mesh of experts as FSDP wants it; one object, by which FSDP makes its groups."""
        assert self.experts is not None
        return _mesh_info(self.experts)

    @cached_property
    def _precise_mesh(self) -> FSDPMeshInfo:
        """The mesh of precise parameters: the ranks of `mesh`, by a process group of their own.

        FSDP makes its groups by process groups, and a group has one format.
        """
        info = _mesh_info(self.mesh)
        info.shard_process_group = shared_group(
            get_process_group_ranks(info.shard_process_group), 1
        )
        return info


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
