"""Borders of pipeline chunks by cost, so that embedding and head make no slowest stage.

RoundPipe (arXiv 2604.27085) partitions layers by cost, too; there stages are bound to no rank.
"""

from collections.abc import Sequence


def chunk_layers(
    layers: int, stage_of_chunk: Sequence[int], layer_s: float, others_s: Sequence[float]
) -> tuple[int, ...]:
    """Layers of each chunk; `others_s` are a chunk's seconds besides its layers, `layer_s` each.

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
