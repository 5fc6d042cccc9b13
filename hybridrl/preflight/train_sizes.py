"""Sizes of a trained model on the rank that has most, by pipeline stage."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from hybridrl.config import (
    ActivationMode,
    Config,
    Device,
    LoraConfig,
    OptimConfig,
    OptimName,
    TrainLayoutConfig,
)
from hybridrl.costs.train_memory import (
    EIGHT_BIT_MOMENT,
    MASTER,
    ActivationSizes,
    TrainSizes,
    messages_kept,
    rows_in_flight,
)
from hybridrl.layout.fsdp_groups import is_one_group, stays_unsharded
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layout import Layout, stages_of_layers
from hybridrl.layout.owners import matrices_of, owner_layouts
from hybridrl.layout.parameters import Parameter, train_layout
from hybridrl.layout.transfer_rounds import BUCKET_BYTES
from hybridrl.models.activations import backward_in_halves, head_activations, layer_activations
from hybridrl.models.adapters import adapter_parameters, add_adapters, pair_of
from hybridrl.models.load import SCORE, TORCH_DTYPES
from hybridrl.models.parallel import meta_model, model_parameters, num_experts
from hybridrl.preflight.memory_inputs import (
    PackedRow,
    attention_of,
    has_triton,
    itemsize_of,
    kept_ids_of,
)
from hybridrl.preflight.pipeline_sizes import zero_bubble_update


def train_sizes(
    config: Config,
    shape: PretrainedConfig,
    layout: TrainLayoutConfig,
    lora: LoraConfig,
    row: PackedRow,
    optim: OptimConfig,
    classifier: bool = False,
) -> list[TrainSizes]:
    """The sizes of a trained model on each pipeline stage."""
    parameters = model_parameters(shape, classifier)
    adapters = adapters_of(shape, lora) if lora.rank else []
    frozen = {p.name for p in parameters} - {SCORE} if lora.rank else set()
    axes = TrainAxes.of(layout)
    pp, zigzag = layout.pp, layout.zigzag
    per_rank = layout.num_chunks // pp
    stages = stages_of_layers(shape.num_hidden_layers, pp, per_rank, zigzag, layout.chunk_layers)
    gen = config.rollout.layout
    placed = train_layout([*parameters, *adapters], axes, stages, gen.tp, gen.ep)
    total = sum(math.prod(p.shape) for p in parameters)
    layers = {p.name: p.layer for p in [*parameters, *adapters]}
    files = {p.name for p in parameters}  # no file has adapters
    counted = _counted(config, shape, layout, lora, row)
    mode = config.trainer.activations
    layer = layer_activations(shape, row.tokens, mode=mode, earlier=row.earlier, **counted)
    has_head = not classifier and not lora.rank
    head = -(-shape.vocab_size // layout.tp) * shape.hidden_size * has_head
    embedding = 0
    if layout.tp > 1 and not lora.rank:
        embedding = -(-shape.vocab_size // layout.tp) * layout.tp * shape.hidden_size
    names = matrices_of(adapters if lora.rank else parameters)
    added = {p.name: math.prod(p.shape) for p in adapters}
    saved = _saved(parameters, itemsize_of(config), added)
    muon = _muon_elements(placed, names if optim.name is OptimName.muon else [])
    early = config.schedule.trains_early and layout.replicas > 1 and not classifier
    stays_whole = stays_unsharded(total, layout.pp)
    earlier = not row.number or (early and not stays_whole)
    sizes = []
    for stage in range(layout.pp):
        in_flight = rows_in_flight(layout.pp, layout.schedule, stage, row.number)
        on_stage, read = _on_stage(placed, layers, files, stage, total)
        trained = [{n: s for n, s in g.items() if n not in frozen} for g in on_stage]
        of_rank = sum(sum(group.values()) for group in on_stage)
        trained_by_rank = sum(sum(group.values()) for group in trained)
        heaviest = max(range(1, len(on_stage)), key=lambda i: sum(on_stage[i].values()), default=0)
        in_layers = bool(heaviest)
        sizes.append(
            TrainSizes(
                trained=trained_by_rank,
                frozen=of_rank - trained_by_rank,
                layer=_gathered(placed, on_stage[heaviest]) * in_layers,
                layers=stages.count(stage),
                root=_gathered(placed, on_stage[0]),
                trained_layer=_gathered(placed, trained[heaviest]) * in_layers,
                trained_root=_gathered(placed, trained[0]),
                reduced_layer=sum(trained[heaviest].values()) * in_layers,
                largest=max(math.prod(placed.shapes[n]) for group in on_stage for n in group),
                read=read,
                itemsize=itemsize_of(config),
                fsdp=layout.fsdp,
                tp=layout.tp,
                keep_unsharded=stays_whole,
                head=head * (stage == stages[-1]),
                several_rows=row.number != 1,
                earlier_gradients=earlier or row.number > in_flight,
                early=early,
                layer_activations=ActivationSizes(layer.kept, layer.backward),
                tied=head * (shape.tie_word_embeddings and layout.pp == 1),
                embedding=embedding * (stage == 0),
                chunk_keys=layer.keys * stages.count(stage),
                ends=_ends(config, shape, layout, lora, row, stage == stages[-1], classifier),
                in_flight=in_flight,
                offloads=_offloads(config),
                received=_received(config, shape, layout, row, stage, in_flight),
                saved=saved,
                moment=EIGHT_BIT_MOMENT if optim.name is OptimName.adamw8bit else MASTER,
                zero_bubble=None,  # which depends on the others
                **muon[stage],
            )
        )
    if not zigzag or layout.pp == 1 or _offloads(config):
        return sizes
    halves = backward_in_halves(shape, row.tokens, **counted)
    args = shape, layout, row
    return [
        replace(x, zero_bubble=zero_bubble_update(*args, stage, x, halves, not classifier))
        for stage, x in enumerate(sizes)
    ]


def _muon_elements(placed: Layout, names: Sequence[str]) -> list[dict[str, int]]:
    """`TrainSizes` of the matrices `names`, by pipeline stage; of owners the most on a rank."""
    grid = placed.mesh.grid().reshape(placed.mesh.extent("pp"), -1)
    shards, owned, largest = (np.zeros(placed.mesh.size, np.int64) for _ in range(3))
    for name in names:
        shards += placed.elements(name, placed.mesh.size)
    for owners in owner_layouts(placed, names):
        for name in owners.rules:
            elements = owners.elements(name, placed.mesh.size)
            owned, largest = owned + elements, np.maximum(largest, elements)
    return [
        {
            "matrices": int(shards[ranks].max()),
            "owned_matrices": int(owned[ranks].max()),
            "largest_matrix": int(largest[ranks].max()),
        }
        for ranks in grid
    ]


def _on_stage(
    placed: Layout,
    layers: Mapping[str, int],
    files: Collection[str],
    stage: int,
    total: int,
) -> tuple[list[dict[str, int]], int]:
    """Elements of a rank's shards by name: of the root group, then by layer; `TrainSizes.read`.

    `layers` has the layer of each parameter, `files` the names of those that files have. The rank
    is the stage's first, which has most where shards are not equal.
    """
    rank = placed.mesh.rank({"pp": stage, "replica": 0, "fsdp": 0, "tp": 0})
    root: dict[str, int] = {}
    groups: dict[int, dict[str, int]] = {}
    read = 0
    for names in placed.alike:
        if not (size := sum(box.size for box in placed.local(names[0], rank))):
            continue
        rows = sum(math.prod(box.shape[:-1]) for box in placed.boxes(names[0], rank))
        for name in names:
            in_root = layers[name] < 0 or is_one_group(total)
            group = root if in_root else groups.setdefault(layers[name], {})
            group[name] = size
            read += rows * placed.shapes[name][-1] * (name in files)
    return [root, *(groups[layer] for layer in sorted(groups))], read


def _gathered(placed: Layout, shards: dict[str, int]) -> int:
    """Elements of parameters that FSDP has gathered, from those of a rank's `shards`."""
    meshes = {name: placed.mesh_of(name) for name in shards}
    ranks = {name: mesh.extent("fsdp") * mesh.extent("efsdp") for name, mesh in meshes.items()}
    return sum(size * ranks[name] for name, size in shards.items())


def _saved(parameters: Sequence[Parameter], itemsize: int, adapters: Mapping[str, int]) -> int:
    """Bytes of the parameters that a rank gathers at a time (`ModelShards.gather`), at most.

    That is the largest, or several small ones up to a bucket, and two buckets on their way. They
    are in the format of the checkpoint. Of a model with `adapters`, elements by name, they are in
    float32, with what is added to them.
    """
    wire = MASTER if adapters else itemsize
    sizes = {p.name: math.prod(p.shape) for p in parameters}
    pairs = {n: sum(adapters.get(x, 0) for x in pair_of(n)) for n in sizes}
    largest = max(wire * size + MASTER * pairs[name] for name, size in sizes.items())
    total = wire * sum(sizes.values())
    several = min(total, BUCKET_BYTES * wire // itemsize)
    return max(largest, several) + 2 * min(total, BUCKET_BYTES)


def adapters_of(shape: PretrainedConfig, lora: LoraConfig) -> list[Parameter]:
    """The adapters of a model, which is built once for each setting."""
    key = shape.to_json_string(use_diff=False), repr(lora)
    if key not in _ADAPTERS:
        model = meta_model(shape)
        add_adapters(model, lora, 0, frozen=model.dtype)
        _ADAPTERS[key] = adapter_parameters(model, model_parameters(shape))
    return _ADAPTERS[key]


_ADAPTERS: dict[tuple[str, str], list[Parameter]] = {}


def _counted(
    config: Config,
    shape: PretrainedConfig,
    layout: TrainLayoutConfig,
    lora: LoraConfig,
    row: PackedRow,
) -> dict[str, Any]:
    """What the counts of a layer's activations are for, however its backward pass goes."""
    return {
        "dtype": TORCH_DTYPES[config.model.compute_dtype],
        "attention": attention_of(config, shape),
        "tp": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "lora": lora,
        "fused_dropout": config.cluster.device is Device.cuda,
        "cp": row.ranks,
        "ep": _spread_over(shape, layout),
        "keys": row.keys,
        "fused": _fuses(config),
    }


def _fuses(config: Config) -> bool:
    return config.trainer.fuses_layers_on(config.cluster.device.value)


def _spread_over(shape: PretrainedConfig, layout: TrainLayoutConfig) -> int | None:
    """The ep of experts that ranks of ep or tp share; None where each rank computes its own."""
    return layout.ep if num_experts(shape) and layout.ep * layout.tp > 1 else None


def _ends(
    config: Config,
    shape: PretrainedConfig,
    layout: TrainLayoutConfig,
    lora: LoraConfig,
    row: PackedRow,
    last: bool,
    classifier: bool,
) -> ActivationSizes:
    """Activations at the ends of a stage, besides its layers.

    It keeps the embedding, or the states that the stage before sends. The `last` stage also has
    norm and head.
    """
    hidden = row.tokens * shape.hidden_size * itemsize_of(config)
    hidden //= layout.tp if layout.sequence_parallel else 1
    if not last or classifier:
        return ActivationSizes(hidden * (1 + last), 0)
    head = head_activations(
        shape,
        row.scored,
        dtype=TORCH_DTYPES[config.model.compute_dtype],
        triton=has_triton(config),
        tp=layout.tp,
        trained=not lora.rank,
        kept=kept_ids_of(config, shape),
    )
    selected = row.scored * shape.hidden_size * itemsize_of(config)
    # The last norm keeps its input; transformers' own code also what it makes of it.
    normed = hidden if _fuses(config) else 2 * hidden
    return ActivationSizes(head.kept + normed + selected, head.backward)


def _received(
    config: Config,
    shape: PretrainedConfig,
    layout: TrainLayoutConfig,
    row: PackedRow,
    stage: int,
    in_flight: float,
) -> int:
    """As `TrainSizes.received`, of the chunks of a stage."""
    if layout.pp == 1:
        return 0
    hidden = row.tokens * shape.hidden_size * itemsize_of(config)
    hidden //= layout.tp if layout.sequence_parallel else 1
    return hidden * messages_kept(layout.pp, layout.schedule, stage, in_flight)


def _offloads(config: Config) -> bool:
    """Whether activations leave the device; a CPU's are in host memory either way."""
    offload = config.trainer.activations is ActivationMode.offload
    return offload and config.cluster.device is not Device.cpu
