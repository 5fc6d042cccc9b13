"""From a whole model without weights to this rank's part: pipeline, tensor parallel, FSDP2."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from hybridrl.config import ActivationMode, TrainLayoutConfig
from hybridrl.engines.train.activation_offload import ActivationOffload
from hybridrl.engines.train.fsdp_versions import Sharding
from hybridrl.engines.train.gathering import fsdp_modules
from hybridrl.engines.train.packed import PackedModel
from hybridrl.engines.train.pipeline import StageModel
from hybridrl.engines.train.state_memory import StateMemory
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layout import Layout, chunk_bounds, rank_of_chunk, stages_of_layers
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import (
    Parameter,
    context_mesh,
    expert_mesh,
    fsdp_dim,
    has_expert_axes,
    train_layout,
)
from hybridrl.layout.process_groups import axis_group, device_mesh, warm_up
from hybridrl.models.adapters import adapter_parameters
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.compiled_layers import compile_layers
from hybridrl.models.expert_parallel import apply_expert_parallel, experts_of
from hybridrl.models.fused_layers import fuse_layers
from hybridrl.models.local_weights import fill_parameters
from hybridrl.models.parallel import check_train_layout, model_parameters
from hybridrl.models.recomputation import recompute_layers
from hybridrl.models.stages import Chunk, cut, head_name, hollow, whole
from hybridrl.models.stored_weights import StoredWeights
from hybridrl.models.tensor_parallel import apply_tensor_parallel, pad_vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainDims:
    """The training axes, and this rank's coordinates on them."""

    axes: TrainAxes
    config: TrainLayoutConfig
    mesh: DeviceMesh
    replica_group: ProcessGroup
    """The ranks pp x tp, which compute the same sequences."""
    cp_group: ProcessGroup | None
    """The ranks that share rows too long for one of them: consecutive ones of fsdp. None for 1."""
    reverse: bool = False
    """Whether the first chunk is on the last pipeline rank."""

    @classmethod
    def make(
        cls, layout: TrainLayoutConfig, ranks: int, device_type: str, reverse: bool = False
    ) -> "TrainDims":
        """All ranks of the world in the order of `TrainAxes`; raises ConfigError for the sizes."""
        layout.resolve(ranks)
        layout.check(ranks)
        axes = TrainAxes.of(layout)
        logger.debug("creating the process groups of training: %s", axes)
        sizes = (axes.pp, axes.replicas, axes.fsdp, axes.tp)
        mesh = Mesh(tuple(zip(("pp", "replica", "fsdp", "tp"), sizes, strict=True)))
        groups = device_mesh(mesh, device_type), axis_group(mesh, "pp", "tp")
        cp_group = None
        if layout.cp > 1:
            cp_group = axis_group(context_mesh(axes, layout.cp), "cp")
        return cls(axes, layout, *groups, cp_group, reverse)

    def groups(self) -> list[ProcessGroup]:
        """This rank's process groups, one an axis."""
        groups = [self.mesh.get_group(axis) for axis in self.mesh.mesh_dim_names or ()]
        return groups if self.cp_group is None else [*groups, self.cp_group]

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        return int(self.mesh.get_local_rank(axis))

    @property
    def token_parts(self) -> int:
        """Number of shards of a row's tokens between the blocks."""
        return self.axes.tp if self.config.sequence_parallel else 1

    @property
    def chunk_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each chunk."""
        pp, chunks = self.axes.pp, range(self.config.num_chunks)
        ranks = (rank_of_chunk(chunk, pp, self.config.zigzag) for chunk in chunks)
        return tuple(pp - 1 - rank if self.reverse else rank for rank in ranks)

    @property
    def chunk_numbers(self) -> list[int]:
        """The chunks of this rank."""
        own = self.rank("pp")
        return [chunk for chunk, rank in enumerate(self.chunk_ranks) if rank == own]

    def stage_of_layer(self, num_layers: int) -> list[int]:
        """The pipeline rank of every layer."""
        pp = self.axes.pp
        per_rank, sizes = self.config.num_chunks // pp, self.config.chunk_layers
        stages = stages_of_layers(num_layers, pp, per_rank, self.config.zigzag, sizes)
        return [pp - 1 - stage for stage in stages] if self.reverse else stages


@dataclass(frozen=True)
class Parts:
    """This rank's part of a model: its chunks as they were cut, and wrapped as they are called.

    `layout` is that of the model's own `parameters` and of its `adapters`. So many
    modules are fused (`models.fused_layers`).
    """

    parameters: list[Parameter]
    adapters: list[Parameter]
    layout: Layout
    chunks: list[Chunk]
    roots: list[PackedModel]
    num_fused: int


def build(
    model: PreTrainedModel,
    dims: TrainDims,
    *,
    compute: torch.dtype,
    activations: ActivationMode,
    compiled: bool,
    fused: bool,
    keep_unsharded: bool,
    one_group: bool,
    gen_tp: int = 1,
    gen_ep: int = 1,
) -> Parts:
    """Shard `model`, on the meta device: a causal language model, or a value model.

    `load` gives its parts their weights. Raises ConfigError for axes that the model does not allow,
    with the reason.
    """
    axes, config = dims.axes, model.config
    check_train_layout(config, dims.config)

    # Which rank holds what, while the model is still whole.
    parameters = model_parameters(config, classifier=head_name(model) == "score")
    adapters = adapter_parameters(model, parameters)
    all_parameters = [*parameters, *adapters]
    layers = config.num_hidden_layers
    layout = train_layout(all_parameters, axes, dims.stage_of_layer(layers), gen_tp, gen_ep)

    # The order matters: the vocabulary is padded while it is whole, so that tp divides its rows,
    # and FSDP comes last, since it shards what tp has left, around the modules that are called.
    pad_vocabulary(model, axes.tp)
    chunks = _cut_into_chunks(model, dims)
    # Modules are tried with tensors that no style has distributed.
    num_fused = sum(fuse_layers(chunk.model).number for chunk in chunks) if fused else 0
    if axes.tp > 1:  # linear layers, and tokens where that is wanted
        for chunk in chunks:
            apply_tensor_parallel(chunk.model, dims.mesh["tp"], dims.config.sequence_parallel)
    experts = _apply_ep(chunks, dims, parameters)
    _apply_activations(chunks, activations, torch.device(dims.mesh.device_type))
    if compiled:
        for chunk in chunks:
            compile_layers(chunk.model)
    root_class = StageModel if dims.config.num_chunks > 1 else PackedModel
    tp_group = dims.mesh.get_group("tp") if axes.tp > 1 else None
    roots = [root_class(chunk, tp_group) for chunk in chunks]
    shards = {p.name: Shard(fsdp_dim(p, axes, gen_tp, gen_ep)) for p in all_parameters}
    of_experts = {p.name for p in parameters if p.experts}
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    sharding = Sharding(
        mesh=dims.mesh["replica", "fsdp"] if axes.replicas > 1 else dims.mesh["fsdp"],
        policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        # A pipeline keeps them: each of its rows would gather them anew. A backward pass in halves
        # looks for weights in the graph of the forward pass: others would get no gradient.
        reshard_after_forward=not keep_unsharded,
        placements={id(p): shards[name] for name, p in named},
        experts=experts,
        of_experts=frozenset(id(p) for name, p in named if name in of_experts),
        precise=frozenset(
            id(p) for name, p in named if name in layout.precise and compute != torch.float32
        ),
    )
    assert keep_unsharded or dims.config.num_chunks == 1
    for root in roots:
        _apply_fsdp(root, sharding, one_group)
    logger.debug("the model is cut into %d chunks and sharded", dims.config.num_chunks)
    return Parts(parameters, adapters, layout, chunks, roots, num_fused)


def load(parts: Parts, weights: StoredWeights, device: torch.device) -> StateMemory:
    """Give the parameters memory on `device`, and this rank's boxes of the weights.

    Those that have values, which are adapters, keep them.
    """
    memory = StateMemory(device)
    memory.allocate_weights(parts.roots)
    for chunk in parts.chunks:
        fill_parameters(weights, chunk.named_parameters(), parts.layout, dist.get_rank())
    return memory


def _cut_into_chunks(model: PreTrainedModel, dims: TrainDims) -> list[Chunk]:
    """This rank's pipeline chunks of `model`, which is empty afterwards; without pp all of it."""
    if dims.config.num_chunks == 1:
        return [whole(model)]
    layers, sizes = model.config.num_hidden_layers, dims.config.chunk_layers
    bounds = chunk_bounds(layers, dims.config.num_chunks, sizes)
    chunks = [cut(model, *bounds[number]) for number in dims.chunk_numbers]
    hollow(model)
    return chunks


def _apply_ep(
    chunks: Sequence[Chunk], dims: TrainDims, parameters: Sequence[Parameter]
) -> DeviceMesh | None:
    """Split the experts of each chunk over the ep ranks; the mesh on which FSDP shards them.

    None for the mesh of all other parameters: a dense model's, or if ep and tp have the same ranks.
    """
    axes = dims.axes
    if not any(has_expert_axes(parameter, axes) for parameter in parameters):
        return None
    mesh, ep, shards = dims.mesh, "tp", None
    if axes.ep != axes.tp:
        mesh, ep = device_mesh(expert_mesh(axes), dims.mesh.device_type), "ep"
        warm_up([mesh.get_group(axis) for axis in ("ep", "efsdp")], torch.device(mesh.device_type))
        shards = mesh["replica", "efsdp"] if axes.replicas > 1 else mesh["efsdp"]
    modules = [module for chunk in chunks for module in experts_of(chunk.model)]
    apply_expert_parallel(
        modules,
        mesh[ep] if axes.ep > 1 else None,
        dims.mesh["tp"] if axes.tp > 1 else None,
    )
    return shards


def _apply_activations(chunks: Sequence[Chunk], mode: ActivationMode, device: torch.device) -> None:
    """Recompute each layer's activations in the backward pass, or bring them back from the host.

    `auto` that no memory plan has decided keeps them.
    """
    offload = ActivationOffload(device) if mode is ActivationMode.offload else None
    for chunk in chunks:
        if offload is not None:
            offload.apply(decoder_layers(chunk.model))
        elif mode.recomputes:
            recompute_layers(chunk.model, mode)


def _apply_fsdp(root: PackedModel, sharding: Sharding, one_group: bool) -> None:
    """Shard a chunk over the ranks of its replica: a group a layer, or one."""
    for layer in () if one_group else decoder_layers(root.model):
        sharding.apply(layer, experts_of(layer))
    sharding.apply(root, experts_of(root.model) if one_group else ())
    for module in fsdp_modules([root]):
        # Token weights are already relative to all ranks: gradients are summed, not averaged. With
        # a factor one rank alone would divide a copy of all gradients by 1.
        if sharding.mesh.size() > 1 or sharding.experts is not None:
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows plain sums only
