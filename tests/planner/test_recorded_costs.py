"""Costs scaled to recorded passes: the factor of a slower machine is found, whatever the layout."""

from dataclasses import replace

import pytest

from hybridrl.config import ActivationMode, PipelineSchedule
from hybridrl.config.schedule import SerialScheduleConfig
from hybridrl.flow.costs import Costs
from hybridrl.pipelines.problem import PassKind
from hybridrl.pipelines.recorded import RecordedPass
from hybridrl.planner.accelerators import ACCELERATORS, layer_roofline
from hybridrl.planner.layer_costs import PassRates
from hybridrl.planner.mapping import (
    AT_ONCE,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    TrainLayout,
    cluster_of,
)
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.model_shape import ModelShape
from hybridrl.planner.recorded_costs import (
    CostScales,
    RecordedDecoding,
    scaled,
    scales_of,
    with_halves,
)

SHAPE = ModelShape(8, 1024, 4096, 16, 4, 32_000)
# Without traffic, which is not slower on the slower machine.
CLUSTER = replace(cluster_of(ACCELERATORS["a100"], 1, 8), within=AT_ONCE, between=AT_ONCE)
ROLES = [
    PlannedRole(name="actor", shape=SHAPE, trained=True),
    PlannedRole(name="critic", shape=replace(SHAPE, layers=4), trained=True, value_head=True),
]
ROWS = [(300, 200, 45_150), (4000, 900, 900_000), (2048, 5, 10_000)]
LAYOUTS = [
    TrainLayout(fsdp=8),
    TrainLayout(pp=2, tp=4),
    TrainLayout(pp=2, fsdp=4, schedule=PipelineSchedule.zero_bubble),
    TrainLayout(replicas=8, activations=ActivationMode.recompute),
]


def _mapping(layout: TrainLayout) -> DeviceMapping:
    return DeviceMapping(
        pools={"actor": ("actor", "critic")},
        ranks={"actor": 8},
        train={"actor": layout, "critic": TrainLayout(fsdp=8)},
        gen=GenLayout(),
        schedule=SerialScheduleConfig(),
    )


def _recorded(costs: MappingCosts, layout: TrainLayout, disturbed: bool) -> list[RecordedPass]:
    """What a run takes whose machine has these `costs`; a third of the rows may be disturbed."""
    passes = []
    for number, row in enumerate(ROWS * 4):
        more = 3.0 if disturbed and number % 3 == 0 else 1.0
        for chunk, each in enumerate(costs.row_passes(ROLES[0], layout, range(8), *row)):
            passes.append(RecordedPass(PassKind.forward, chunk, *row, each.forward_s * more))
            if each.weights_s and each.backward_s:
                halves = (
                    (PassKind.backward_input, each.backward_s),
                    (
                        PassKind.backward_weights,
                        each.weights_s,
                    ),
                )
                passes += [RecordedPass(kind, chunk, *row, s * more) for kind, s in halves]
            else:
                whole_s = each.backward_s + each.weights_s
                passes.append(RecordedPass(PassKind.backward, chunk, *row, whole_s * more))
    return passes


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_slower_machine(layout: TrainLayout, disturbed: bool) -> None:
    """Of a machine that is 1.5 times slower forward, and 2 times backward."""
    layers = replace(layer_roofline(ACCELERATORS["a100"]), row_s=0.0, overlaps=False)
    costs = MappingCosts(layers, CLUSTER)
    wanted = CostScales(forward=1.5, backward=2.0)
    slower = MappingCosts(scaled(layers, wanted, None, "slower"), CLUSTER)
    recorded = {"actor": _recorded(slower, layout, disturbed)}
    scales = scales_of(recorded, None, costs, ROLES, _mapping(layout))
    assert scales.forward == pytest.approx(1.5)
    assert scales.backward == pytest.approx(2.0)


def test_decoding_and_calls() -> None:
    """Decode steps and prompts by what a run has learned; calls and round trips as they are."""
    layers = layer_roofline(ACCELERATORS["a100"])
    costs = MappingCosts(layers, CLUSTER)
    mapping = _mapping(LAYOUTS[0])
    own = costs.generation(ROLES[0], mapping.gen, range(8))
    learned = Costs(
        step_s=3 * own.step_s,
        row_s=3 * own.row_s,
        cached_token_s=3 * own.cached_token_s,
        prefill_token_s=own.prefill_token_s / 2,
        call_s=0.004,
        round_trip_s=0.001,
    )
    decoding = RecordedDecoding(learned, rows=12.0, held=300.0)
    scales = scales_of({}, decoding, costs, ROLES, mapping)
    assert (scales.forward, scales.backward) == (1.0, 1.0)
    assert scales.decode == pytest.approx(3)
    assert scales.prefill == pytest.approx(0.5)
    result = MappingCosts(scaled(layers, scales, decoding, "run"), CLUSTER)
    predicted = result.generation(ROLES[0], mapping.gen, range(8))
    assert (predicted.call_s, predicted.round_trip_s) == (0.004, 0.001)
    assert predicted.decode(12, 10, 3600) == pytest.approx(learned.decode(12, 10, 3600))
    assert predicted.prefill_token_s == pytest.approx(learned.prefill_token_s)
    assert result.layer_costs.source == "run"


def test_nothing_recorded_changes_nothing() -> None:
    costs = MappingCosts(layer_roofline(ACCELERATORS["a100"]), CLUSTER)
    assert scales_of({}, None, costs, ROLES, _mapping(LAYOUTS[0])) == CostScales()


@pytest.mark.parametrize("with_operations", [True, False])
def test_halves_of_backward_passes(with_operations: bool) -> None:
    """What each took over its share; a share that the costs do not know stays as it is."""
    layers = layer_roofline(ACCELERATORS["a100"])
    if not with_operations:  # a fit may find that elements explain all of a pass
        layers = replace(layers, backward=PassRates(element_s=1e-12))
    costs = MappingCosts(layers, CLUSTER)
    layout = TrainLayout(pp=2, schedule=PipelineSchedule.zero_bubble)
    in_halves = []
    for row in ROWS:
        for chunk, own in list(enumerate(costs.row_passes(ROLES[0], layout, range(2), *row)))[1:]:
            for kind, seconds in (
                (PassKind.backward_input, 1.1 * own.backward_s),
                (PassKind.backward_weights, 1.3 * own.weights_s),
            ):
                in_halves.append((SHAPE, RecordedPass(kind, chunk, *row, seconds)))
    result = with_halves(costs, in_halves)
    assert result.layer_costs.input_half == pytest.approx(1.1)
    wanted = 1.3 if with_operations else 1.0
    assert result.layer_costs.weights_half == pytest.approx(wanted)
    row = ROWS[1]
    before, after = (c.row_passes(ROLES[0], layout, range(2), *row) for c in (costs, result))
    assert after[1].weights_s == pytest.approx(wanted * before[1].weights_s)
    assert (after[0], after[1].forward_s) == (before[0], before[1].forward_s)
