"""Pipeline chunks: their layers, parameters, and seconds of passes with what their layers send."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.config import PipelineSchedule
from hybridrl.costs.layers import LayerCosts, LayerWork, LinearPass
from hybridrl.costs.mapping import PlannedRole, TrainLayout
from hybridrl.costs.model_shape import ModelShape

_HALF = 0.5  # of a backward pass's operations on matrices are for the weights


@dataclass(frozen=True, slots=True)
class ChunkSetting:
    """What passes over a chunk depend on, besides its layers and its place."""

    shape: ModelShape
    value_head: bool
    adapters: int
    tp: int
    recomputes: bool
    """Whether a backward pass has a forward pass in it."""
    splits_backward: bool
    reduce: LinearPass
    """An all-reduce of hidden states among tp ranks."""
    traffic: LinearPass
    """What a layer's forward pass sends; its backward pass sends as much."""


class ChunkPasses(NamedTuple):
    """Passes of a micro-batch over a chunk; `weights` only where a backward pass has halves."""

    forward: LinearPass
    backward: LinearPass
    weights: LinearPass

    @property
    def together(self) -> LinearPass:
        """One after the other."""
        return self.forward + self.backward + self.weights


def chunk_passes(
    costs: LayerCosts, setting: ChunkSetting, layers: int, is_first: bool, is_last: bool
) -> ChunkPasses:
    """Return the passes of a chunk with so many layers.

    The first chunk has the embedding, the last one the head.
    """
    shape, tp, reduce = setting.shape, setting.tp, setting.reduce
    work = LayerWork.of(shape, tp, setting.adapters)
    forward = LinearPass.of_layer(costs.forward_flop_s, work) + setting.traffic
    backward = LinearPass.of_layer(costs.backward_flop_s, work) + setting.traffic
    of_weights = _HALF * costs.backward_flop_s
    backward += LinearPass(0.0, -of_weights * (work.flops - work.trained_flops))
    weights = LinearPass(0.0, of_weights * work.trained_flops)
    inputs = backward + weights.times(-1)
    if setting.recomputes:
        backward, inputs = backward + forward, inputs + forward
    outputs = 1.0 if setting.value_head else shape.vocabulary / tp
    head_forward = LinearPass.of_head(costs.forward_flop_s, shape.hidden, outputs).times(is_last)
    is_frozen = bool(setting.adapters) and not setting.value_head
    head_flop_s = costs.backward_flop_s * (1 - _HALF * is_frozen)
    head = (LinearPass.of_head(head_flop_s, shape.hidden, outputs) + reduce).times(is_last)
    row = LinearPass(costs.row_s)
    embedding = reduce.times(is_first)
    halves = row + backward.times(layers) + head, LinearPass()
    if setting.splits_backward and is_first:  # it has no gradient of its input
        halves = halves[::-1]
    elif setting.splits_backward:
        halves = row + inputs.times(layers) + head, weights.times(layers)
    return ChunkPasses(row + forward.times(layers) + head_forward + embedding, *halves)


class Elements(NamedTuple):
    """Parameters of a pipeline stage: those that tp divides, and those of experts."""

    dense: float
    experts: float

    def gathered(self, layout: TrainLayout) -> float:
        """Parameters with which a rank computes, whole over FSDP."""
        return self.dense / layout.tp + self.experts / layout.ep

    def shard(self, layout: TrainLayout) -> float:
        """Parameters that a rank holds."""
        return (self.dense + self.experts) / (layout.tp * layout.fsdp)


class StageElements(NamedTuple):
    """Parameters of a pipeline stage that are trained, and that are below adapters."""

    trained: Elements
    frozen: Elements


def largest_stage(
    role: PlannedRole, pp: int, schedule: PipelineSchedule, sizes: tuple[int, ...]
) -> StageElements:
    """Return the parameters of the largest pipeline stage; `sizes` are `chunk_layers`."""
    shape, layout = role.shape, TrainLayout(pp=pp, schedule=schedule, chunk_layers=sizes)
    layers_of, ends_of = [0] * pp, [0] * pp
    sizes = layout.layers_of_chunks(shape.layers)
    for chunk, layers in enumerate(sizes):
        is_tied = shape.tied and pp == 1 and not role.value_head
        ends = chunk == 0, chunk == len(sizes) - 1 and not (is_tied or role.value_head)
        stage = layout.stage_of_chunk(chunk)
        layers_of[stage] += layers
        ends_of[stage] += sum(ends) * shape.head_parameters
    layers, ends_size = max(
        zip(layers_of, ends_of, strict=True), key=lambda x: x[0] * shape.layer_parameters + x[1]
    )
    dense = layers * shape.dense_parameters + ends_size
    weights = Elements(dense, layers * shape.expert_parameters)
    if role.adapters:
        return StageElements(Elements(layers * role.adapters, 0), weights)
    return StageElements(weights, Elements(0, 0))


def chunk_layers(
    layers: int, stage_of_chunk: Sequence[int], layer_s: float, others_s: Sequence[float]
) -> tuple[int, ...]:
    """Layers of each chunk; `others_s` are a chunk's seconds besides its layers, `layer_s` each.

    Embedding and head shall make no slowest stage. RoundPipe (arXiv 2604.27085) partitions layers
    by cost, too; there stages are bound to no rank.

    Each chunk has a layer at least. Every next one goes to the stage that has the least seconds,
    and there to the chunk that has. So no stage could give a layer to another one and be quicker
    than that was. Raises ValueError for fewer layers than chunks.

    Example: 8 layers of 1 s on two stages, and a head of 2 s on the second one, are (5, 3).
    """
    number = len(stage_of_chunk)
    if layers < number:
        raise ValueError(f"{layers} layers cannot be split into {number} pipeline chunks")
    sizes, chunks = [1] * number, [seconds + layer_s for seconds in others_s]
    stages = [0.0] * (1 + max(stage_of_chunk))
    for chunk, stage in enumerate(stage_of_chunk):
        stages[stage] += chunks[chunk]
    for _ in range(layers - number):
        least = min(range(number), key=lambda i: (stages[stage_of_chunk[i]], chunks[i], i))
        sizes[least] += 1
        chunks[least] += layer_s
        stages[stage_of_chunk[least]] += layer_s
    return tuple(sizes)
