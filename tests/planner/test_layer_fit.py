"""A fit on the times of known costs: it predicts other sizes, lengths and layouts."""

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest

from hybridrl.planner.accelerators import ACCELERATORS
from hybridrl.planner.layer_costs import DecodeRates, LayerCosts, PassRates
from hybridrl.planner.layer_fit import (
    PackedTokens,
    TimedDecoding,
    TimedPass,
    TimedSwitch,
    fit_layers,
)
from hybridrl.planner.links import LinkSpeed
from hybridrl.planner.mapping import (
    ClusterShape,
    GenLayout,
    PlannedRole,
    SampleLength,
    TrainLayout,
)
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.model_shape import ModelShape

# As a processor's core has them: 20 billion operations a second, 2 ns an element.
TRUTH = LayerCosts(
    source="known",
    forward=PassRates(call_s=3e-4, flop_s=5e-11, element_s=5e-10, pair_s=1e-10),
    backward=PassRates(call_s=6e-4, flop_s=1e-10, element_s=1e-9, pair_s=2.5e-10),
    head_forward=PassRates(flop_s=5e-11, element_s=2e-9),
    head_backward=PassRates(flop_s=1e-10, element_s=4e-9),
    decode=DecodeRates(
        step_s=5e-4, layer_s=2e-4, weight_byte_s=1e-10, cached_byte_s=3e-10, row_s=1e-5,
        flop_s=6e-11, logit_s=1e-9, tp_reduce_s=2e-4, tp_byte_s=3e-9, tp_step_s=1e-3,
        pp_send_s=6e-4,
    ),
    prefill=PassRates(call_s=2e-4, flop_s=5e-11, element_s=5e-10, pair_s=1e-10),
    row_s=1e-3,
    pass_s=2e-3,
    update_s=4e-3,
    gradient_element_s=2e-9,
    optimizer_element_s=3e-9,
    tp_reduce_s=4e-4,
    tp_byte_s=1e-9,
    tp_update_s=5e-3,
    switch_s=1e-3,
    switch_byte_s=2e-10,
    itemsize=4,
    overlaps=False,
)  # fmt: skip
SHAPES = [
    ModelShape(2, 128, 384, 4, 2, vocabulary=512, tied=True),
    ModelShape(6, 128, 384, 4, 2, vocabulary=512, tied=True),
    ModelShape(4, 256, 512, 8, 2, vocabulary=512, tied=True),
    ModelShape(4, 256, 512, 8, 2, vocabulary=4096, tied=True),
]
OTHER = ModelShape(8, 320, 1024, 8, 4, vocabulary=1024, tied=True)
STILL = LinkSpeed(1e18)
NODE = ClusterShape(1, 4, ACCELERATORS["h100"], STILL, STILL, STILL)


def measured(costs: LayerCosts, noise: float) -> LayerCosts:
    """What calibration would find on a machine with these costs."""
    draw = random.Random(0)
    known = MappingCosts(costs, NODE)

    def slowed(seconds: float) -> float:
        return seconds * (1 + noise * draw.random()) * (4 if noise and draw.random() < 0.1 else 1)

    passes, decoding, switches, split = [], [], [], []
    halves = TrainLayout(tp=2)
    for shape in SHAPES:
        role = PlannedRole(name="actor", shape=shape, trained=True)
        switches += [TimedSwitch(shape=shape, seconds=slowed(_switch_s(costs, shape)))] * 3
        for length in (64, 256, 1024):
            for number in (1, 2, 4):
                row = [SampleLength(length // 2, length // 2)] * (2048 // length)
                packed = PackedTokens(
                    tokens=2048, scored=1024, pairs=sum(sample.pairs for sample in row)
                )
                (one,) = known.passes(role, TrainLayout(), range(1), row)
                scored = number * one.forward_s + costs.pass_s
                timed = partial(TimedPass, shape=shape, rows=(packed,) * number)
                passes.append(timed(trains=False, seconds=slowed(scored)))
                both = number * (one.forward_s + one.backward_s) + costs.update_s
                both += known.gradient_s(role, TrainLayout(), range(1))
                step = slowed(known.optimizer_s(role, TrainLayout(), range(1)))
                passes.append(timed(trains=True, seconds=slowed(both) + step, optimizer_s=step))
                (half,) = known.passes(role, halves, range(2), row)
                scored = number * half.forward_s + costs.pass_s
                split.append(timed(trains=False, seconds=slowed(scored)))
                both = number * (half.forward_s + half.backward_s)
                both += known.step_s(role, halves, range(2))
                split.append(timed(trains=True, seconds=slowed(both)))
        for (pp, tp), rows, cached in itertools.product(
            ((1, 1), (1, 2), (2, 1)), (1, 8, 32), (32, 256)
        ):
            instance = known.generation(role, GenLayout(pp=pp, tp=tp), range(pp * tp))
            seconds = instance.decode(rows, 16, rows * cached)
            decoding.append(
                TimedDecoding(
                    shape=shape,
                    pp=pp,
                    tp=tp,
                    steps=16,
                    rows=16 * rows,
                    cached=16 * rows * cached,
                    seconds=slowed(seconds),
                )
            )
    about = {"source": "measured", "itemsize": 4, "overlaps": False}
    return fit_layers(passes, decoding, switches, split, **about)


def _switch_s(costs: LayerCosts, shape: ModelShape) -> float:
    return costs.switch_s + costs.switch_byte_s * 4 * shape.parameters


@pytest.mark.parametrize(("noise", "allowed"), [(0.0, 0.01), (0.05, 0.06)])
def test_a_fit_predicts_other_models(noise: float, allowed: float) -> None:
    """A size that was not measured, other lengths, tensor parallelism and pipelines.

    With noise every tenth call takes four times as long; others up to 5 % longer, which the fit
    has as their mean.
    """
    fitted = MappingCosts(measured(TRUTH, noise), NODE)
    known = MappingCosts(TRUTH, NODE)
    role = PlannedRole(name="actor", shape=OTHER, trained=True)
    draw = random.Random(1)
    samples = [SampleLength(draw.randint(8, 128), draw.randint(8, 800)) for _ in range(48)]
    layouts = [TrainLayout(micro_batch_tokens=4096), TrainLayout(fsdp=4), TrainLayout(pp=2, tp=2)]
    for layout in layouts:
        args = role, layout, range(layout.ranks), samples
        assert fitted.update_s(*args) == pytest.approx(known.update_s(*args), rel=allowed)
        assert fitted.score_s(*args) == pytest.approx(known.score_s(*args), rel=allowed)
    for pp, tp in ((1, 1), (1, 4), (2, 2)):
        instance, wanted = (
            costs.generation(role, GenLayout(pp=pp, tp=tp), range(4)) for costs in (fitted, known)
        )
        for rows in (1, 20):
            assert instance.decode(rows, 1, 100 * rows) == pytest.approx(
                wanted.decode(rows, 1, 100 * rows), rel=allowed + 0.02
            )


def test_what_a_fit_needs() -> None:
    fitted = replace(TRUTH, source="measured")
    assert measured(TRUTH, 0.0).overlaps is fitted.overlaps
    with pytest.raises(ValueError, match="need updates and forward passes"):
        fit_layers([], [], [], source="", itemsize=4, overlaps=False)
    row = PackedTokens(tokens=8, scored=4, pairs=36)
    passes = [
        TimedPass(shape=OTHER, rows=(row,), trains=trains, seconds=1) for trains in (True, False)
    ]
    with pytest.raises(ValueError, match="need decode steps"):
        fit_layers(passes, [], [], source="", itemsize=4, overlaps=False)
