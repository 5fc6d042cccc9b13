"""A sharded model: a rank's shards by name, and the full tensors gathered from all ranks."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hybridrl.config import LoraConfig
from hybridrl.engines.train.build import Parts, TrainDims
from hybridrl.engines.train.gathering import fsdp_modules
from hybridrl.engines.train.state_memory import StateMemory
from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.owners import matrices_of, on_owners, restricted
from hybridrl.layout.parameters import Parameter
from hybridrl.layout.plan import plan
from hybridrl.layout.weight_switch import WeightSwitch
from hybridrl.models.adapters import pair_of
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.load import SCORE
from hybridrl.models.local_weights import copy_boxes, fill_parameters
from hybridrl.models.stages import plain_name
from hybridrl.models.stored_weights import StoredWeights


class ModelShards:
    """This rank's shards of a model, by the model's own names.

    `parameters` are the model's, tied ones once; `adapters` those of `lora`, if it has any.
    """

    def __init__(
        self,
        parts: Parts,
        dims: TrainDims,
        device: torch.device,
        lora: LoraConfig | None,
        memory: StateMemory,
    ) -> None:
        """`memory` has the shards of `parts`, and moments."""
        self.memory = memory
        self.parameters, self.adapters, self.layout = parts.parameters, parts.adapters, parts.layout
        self.chunks, self.roots = parts.chunks, parts.roots
        self.num_fused = parts.num_fused
        self.dims, self.device, self.lora = dims, device, lora
        self.fsdp_modules = fsdp_modules(self.roots)
        # Where each parameter is, tied ones once: a walk through the modules takes as long as the
        # copies of a small model's switch.
        places = dict[str, tuple[nn.Module, str]]()
        for chunk in self.chunks:
            own = zip(chunk.named_parameters(), chunk.model.named_parameters(), strict=True)
            for (name, _), (path, _) in own:
                module, _, key = path.rpartition(".")
                places.setdefault(name, (chunk.model.get_submodule(module), key))
        self._places = places

    def trained_parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters: this rank's shards of all that is not frozen."""
        return [p for root in self.roots for p in root.parameters() if p.requires_grad]

    def trained_matrices(self) -> tuple[dict[str, nn.Parameter], Layout]:
        """Trained matrices of decoder layers, or batches of matrices, by name, with their layout.

        The layout is that of all such matrices, which other stages have as well.
        """
        names = matrices_of(self.parameters if self.lora is None else self.adapters)
        own = {name: p for chunk in self.chunks for name, p in chunk.named_parameters()}
        return {name: own[name] for name in names if name in own}, restricted(self.layout, names)

    def named_shards(self) -> dict[str, DTensor]:
        """This rank's shards under their Hugging Face names; tied ones once. Not copies.

        Adapters are among them, see `models.stages.plain_name`. Of an offloaded model they are in
        host memory.
        """
        self.memory.settle_weights()
        shards: dict[str, Any] = {}
        for name, (module, key) in self._places.items():
            shards[name] = module._parameters[key].detach()  # type: ignore[union-attr]
        return shards

    def trained(self) -> set[str]:
        """The names of `named_shards` that are trained; the others are frozen."""
        pairs = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        return {name for name, parameter in pairs if parameter.requires_grad}

    def vocabulary(self) -> list[str]:
        """The names of parameters with a row for each token, which tp pads."""
        return [p.name for p in self.parameters if p.layer < 0 and p.tp_dim is not None]

    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every parameter of the model, in its order; without tied ones and adapters."""
        return {parameter.name: torch.Size(parameter.shape) for parameter in self.parameters}

    def weights(
        self, device: torch.device | None = None, shards: Mapping[str, DTensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of `shapes` in full, one after the other, in float32, adapters merged.

        On `device`, by default this rank's. All ranks iterate together. They are the present
        weights, or other `shards` in the layout of `named_shards`.
        """
        shards = self.named_shards() if shards is None else shards
        for parameter in self.parameters:
            yield parameter.name, self._full_tensor(parameter, shards, device or self.device)

    def adapter_names(self) -> list[str]:
        """Adapters, and a value head that is trained in full with them; of other models none."""
        heads = [p for p in self.parameters if self.lora is not None and p.name == SCORE]
        return [parameter.name for parameter in (*self.adapters, *heads)]

    @torch.no_grad()
    def gather(self, owners: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The parameters that this rank owns in full, in `owners`' order, adapters merged.

        `owners` has the rank that gets each of some parameters; no other rank gets it, nor a buffer
        of it. They are where the shards are, in `dtype`; precise ones, and all of a model with
        adapters, in float32. All ranks call it together, with the same `owners`.
        """
        if not owners:
            return {}
        pairs, scaling = {}, 0.0
        if self.lora is not None:
            dtype, scaling = torch.float32, self.lora.scaling  # the owner rounds the sum once
            pairs = {n: pair for n in owners if (pair := pair_of(n))[0] in self.layout.rules}
        wanted = {**owners, **{x: owners[name] for name, pair in pairs.items() for x in pair}}
        rank, shards, layout = dist.get_rank(), self.named_shards(), self.layout
        whole = {
            name: torch.empty(
                layout.shapes[name],
                dtype=torch.float32 if name in layout.precise else dtype,
                device=self.shards_device(),
            )
            for name, owner in wanted.items()
            if owner == rank
        }
        there = plan(restricted(layout, wanted), on_owners(layout, wanted))
        own_shards = {name: shards[name] for name in wanted if name in shards}
        WeightSwitch(there, rank, dtype).switch(own_shards, whole, waits=False)
        for name, (a, b) in pairs.items():
            if name in whole:
                whole[name].addmm_(whole[b], whole[a], alpha=scaling)
        return {name: whole[name] for name in owners if name in whole}

    def shards_device(self) -> torch.device:
        """Where the shards are: this rank's device, or the CPU while they are offloaded."""
        return next(iter(self.named_shards().values())).to_local().device

    def local_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of this rank's layers that checkpoints have (`models.buffers`), by name.

        Not copies. Every rank of a stage has all of its layers' buffers.
        """
        own: dict[str, torch.Tensor] = {}
        for chunk in self.chunks:
            prefix = f"{chunk.model.base_model_prefix}.layers."
            for name, buffer in persistent_buffers(chunk.model).items():
                if name.startswith(prefix):
                    number, _, suffix = name.removeprefix(prefix).partition(".")
                    name = f"{prefix}{int(number) + chunk.offset}.{suffix}"
                own[plain_name(name)] = buffer.detach()
        return own

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of all stages, on the CPU. All ranks call it together."""
        own = {name: buffer.cpu() for name, buffer in self.local_buffers().items()}
        stages: list[dict[str, torch.Tensor]] = [own] * self.dims.axes.pp
        if self.dims.axes.pp > 1:
            dist.all_gather_object(stages, own, group=self.dims.mesh.get_group("pp"))
        return {name: buffer for stage in stages for name, buffer in stage.items()}

    def _full_tensor(
        self, parameter: Parameter, shards: Mapping[str, DTensor], device: torch.device
    ) -> torch.Tensor:
        """A parameter from the shards of all ranks, with its adapters, in float32 on `device`."""
        name, owner = parameter.name, self.layout.rules[parameter.name].stages[0]
        if owner != self.dims.rank("pp"):
            tensor = torch.empty(parameter.shape, device=device)
        else:
            full = shards[name].full_tensor()[tuple(map(slice, parameter.shape))]
            tensor = full.to(device, torch.float32).contiguous()  # it may be offloaded
            if self.lora is not None and (pair := pair_of(name))[0] in shards:
                a, b = (shards[adapter].full_tensor().to(device) for adapter in pair)
                tensor = tensor.addmm(b, a, alpha=self.lora.scaling)
        if self.dims.axes.pp > 1:
            dist.broadcast(tensor, group=self.dims.mesh.get_group("pp"), group_src=owner)
        return tensor

    @torch.no_grad()
    def fill(self, weights: StoredWeights) -> None:
        """Copy this rank's boxes of the parameters, and the buffers, out of files."""
        self._written()
        for chunk in self.chunks:
            fill_parameters(weights, chunk.named_parameters(), self.layout, dist.get_rank())
        buffers = self.local_buffers()
        for name, stored in weights.buffers().items():
            if name in buffers:  # else it is of another stage
                buffers[name].copy_(stored)

    @torch.no_grad()
    def take_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy another model's full parameters [..], and buffers, to those of the same names.

        Every rank exhausts `weights` (an engine's, of any layout); all others are unchanged.
        """
        self._written()
        buffers = self.local_buffers()
        named_parameters = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        for name, tensor in weights:
            for parameter in [cast(DTensor, p) for key, p in named_parameters if key == name]:
                held = LocalTensor(self.layout.local(name, dist.get_rank()))
                copy_boxes(tensor, parameter.to_local(), held)
            if name in buffers:
                buffers[name].copy_(tensor)
            del tensor  # before the next one is made

    def _written(self) -> None:
        """Before weights or moments are written in place, wherever they are."""
        self.memory.settle()
        self.memory.changed()

    # Phases

    def start_offload(self) -> None:
        """Begin to copy weights and moments to the host; neither changes until `offload`."""
        self.memory.send()

    def offload(self) -> None:
        """Free the device of weights and moments; those that stay there are sharded at least."""
        self._reshard()
        self.memory.leave()

    def onload(self) -> None:
        """Bring weights and moments to the device; the host waits for neither."""
        self._reshard()
        self.memory.come()

    def onload_weights(self) -> None:
        """Bring the weights alone, which is enough to give them away, or to score."""
        self._reshard()
        self.memory.come(moments=False)

    def _reshard(self) -> None:
        for module in self.fsdp_modules:
            module.reshard()
