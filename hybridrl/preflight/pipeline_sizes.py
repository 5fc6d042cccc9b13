"""Sizes of an update by a zero-bubble pipeline."""

from collections.abc import Sequence

from transformers import PretrainedConfig

from hybridrl.config import PipelineSchedule, TrainLayoutConfig
from hybridrl.costs.train_memory import MASTER, TrainSizes
from hybridrl.costs.zero_bubble import ChunkSizes, ZeroBubbleUpdate
from hybridrl.layout.layout import chunk_bounds
from hybridrl.models.activations import Halves
from hybridrl.pipelines.problem import PassCosts, PassKind, PipelinedModel
from hybridrl.pipelines.standard import standard_plan
from hybridrl.preflight.memory_inputs import PackedRow

_UNKNOWN = 3
"""Rows for each stage where their number is not known: the most are in flight, and some ended."""


def zero_bubble_update(
    shape: PretrainedConfig,
    layout: TrainLayoutConfig,
    row: PackedRow,
    stage: int,
    sizes: TrainSizes,
    halves: Halves,
    has_head: bool,
) -> ZeroBubbleUpdate:
    """The update of a stage that has these `sizes`, the backward pass of a layer in `halves`.

    The first stage has the model's first chunk and its last one; `has_head` is whether that ends in
    a vocabulary.
    """
    pp, rows = layout.pp, row.number or _UNKNOWN * layout.pp
    numbers = stage, 2 * pp - 1 - stage
    bounds = chunk_bounds(shape.num_hidden_layers, 2 * pp, layout.chunk_layers)
    head = has_head * -(-shape.vocab_size // layout.tp) * shape.hidden_size
    hidden = row.tokens * shape.hidden_size * sizes.itemsize
    hidden //= layout.tp if layout.sequence_parallel else 1
    chunks = []
    for number in numbers:
        low, high = bounds[number]
        root = min(head, sizes.root)  # of the last chunk
        if number == 0:
            root = sizes.root if shape.tie_word_embeddings else sizes.root - root
        elif number < 2 * pp - 1:
            root = 0
        chunks.append(_chunk(sizes, halves, high - low, root, hidden, number == 0, stage == 0))
    return ZeroBubbleUpdate(chunks, _order(pp, stage, rows, numbers), rows)


def _chunk(
    sizes: TrainSizes,
    halves: Halves,
    layers: int,
    root: int,
    hidden: int,
    is_first: bool,
    has_ends: bool,
) -> ChunkSizes:
    """A chunk of so many `layers`, and `root` elements besides, on a stage that `has_ends`."""
    layer, ends = sizes.layer_activations, sizes.ends
    is_last = has_ends and not is_first
    trained = root if sizes.trained_root else 0
    # The gradient of an embedding is that of all rows of the vocabulary.
    whole = trained * sizes.tp if is_first else trained
    if is_first:
        first, second = 0, layer.backward - layer.kept
    else:
        first = (layers - 1) * halves.between + halves.first - layer.kept
        second = halves.second - layer.kept - halves.between
    at_head = ends.backward if is_last else 0
    return ChunkSizes(
        kept=layers * layer.kept + (ends.kept if is_last else hidden),
        between=layers * halves.between,
        first=max(first, at_head),
        second=max(second, at_head),
        gathered=sizes.itemsize * (root + layers * sizes.layer),
        gradients=sizes.itemsize * (trained + layers * sizes.trained_layer),
        sums=MASTER * (whole + layers * sizes.trained_layer),
        arriving=sizes.itemsize * max(whole, sizes.trained_layer),
        copied=MASTER * max(trained, sizes.trained_layer),
        reduced=MASTER * (trained + layers * sizes.trained_layer) // sizes.fsdp,
        received=0 if is_first else hidden,
        received_gradient=0 if is_last else hidden,
    )


def _order(pp: int, stage: int, rows: int, numbers: Sequence[int]) -> list[tuple[str, int]]:
    """Passes of a stage with the chunks `numbers`, each with the chunk's index."""
    there = tuple(range(pp))
    model = PipelinedModel.uniform(
        "model",
        ranks=there + there[::-1],
        micro_batches=rows,
        costs=PassCosts(forward_s=1),
        backward=(PassKind.backward_input, PassKind.backward_weights),
    )
    own = standard_plan(model, PipelineSchedule.zero_bubble.value)[stage]
    return [(action.kind.value, numbers.index(action.chunk)) for action in own]
