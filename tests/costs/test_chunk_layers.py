"""Chunk borders by cost: against every way to cut, and in the search for a mapping."""

import itertools
import random

import pytest

from hybridrl.config import PipelineSchedule
from hybridrl.costs.chunk_passes import chunk_layers
from hybridrl.costs.devices import ACCELERATORS, MODELS
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import (
    PlannedRole,
    SampleLength,
    SampleTotals,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.model import CostModel


def _slowest(
    sizes: tuple[int, ...], stages: list[int], layer_s: float, others_s: list[float]
) -> float:
    seconds = [0.0] * (1 + max(stages))
    for size, stage, other in zip(sizes, stages, others_s, strict=True):
        seconds[stage] += size * layer_s + other
    return max(seconds)


def test_the_slowest_stage_is_as_quick_as_can_be() -> None:
    """Brute force: of all ways to give chunks a layer or more none has a quicker slowest stage."""
    draw = random.Random(0)
    for _ in range(200):
        pp = draw.choice((2, 3, 4))
        zigzag = [*range(pp), *reversed(range(pp))]
        stages = draw.choice([list(range(pp)), zigzag, [*range(pp)] * 2])
        layers = draw.randint(len(stages), len(stages) + 4)
        others = [draw.choice((0.0, 0.5, 2.0, 5.0)) for _ in stages]
        sizes = chunk_layers(layers, stages, 1.0, others)
        assert sum(sizes) == layers
        assert min(sizes) >= 1
        cuts = itertools.combinations(range(1, layers), len(stages) - 1)
        ways = (tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts)
        best = min(_slowest(way, stages, 1.0, others) for way in ways)
        assert _slowest(sizes, stages, 1.0, others) == pytest.approx(best)


def test_examples() -> None:
    """A head of two layers' time; without one the earlier chunks are larger, as even ones are."""
    assert chunk_layers(8, [0, 1], 1.0, [0.0, 2.0]) == (5, 3)
    assert chunk_layers(7, [0, 1], 1.0, [0.0, 0.0]) == (4, 3)
    assert chunk_layers(3, [0, 1, 2], 1.0, [0.0, 0.0, 9.0]) == (1, 1, 1)
    with pytest.raises(ValueError, match="1 layers cannot be split into 2"):
        chunk_layers(1, [0, 1], 1.0, [0.0, 0.0])


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_a_large_vocabulary_takes_layers_from_its_stage(schedule: PipelineSchedule) -> None:
    """Updates are quicker; a value model, whose head is small, is cut evenly."""
    accelerator = ACCELERATORS["a100"]
    costs = CostModel(LayerCosts.of(accelerator), cluster_of(accelerator, nodes=1, per_node=8))
    layout = TrainLayout(pp=4, fsdp=2, schedule=schedule, micro_batch_tokens=4096)
    samples = [SampleLength(128, 896)] * 128
    actor = PlannedRole(name="actor", shape=MODELS["8b"], trained=True)
    args = actor, layout, range(8), SampleTotals.of(samples)
    sizes = costs.balanced_layers(*args)
    assert sum(sizes) == actor.shape.layers
    assert sizes[-1] < min(sizes[:-1])
    balanced = TrainLayout(
        pp=4, fsdp=2, schedule=schedule, micro_batch_tokens=4096, chunk_layers=sizes
    )
    even_s = costs.update_s(actor, layout, range(8), samples)
    assert costs.update_s(actor, balanced, range(8), samples) < 0.97 * even_s
    critic = PlannedRole(name="critic", shape=actor.shape, trained=True, value_head=True)
    assert costs.balanced_layers(critic, *args[1:]) == ()
