"""Costs of layers as a run has found them: those of a calibration, scaled to its micro-batches.

A run has few sizes of micro-batches and one layout of each role, which cannot tell the costs of
calls, operations and elements apart. So their proportions are those of other costs. The run says by
how much they are off: one number each for forward passes, backward passes, decode steps, prompts.

*Example*: rows of 2,048 tokens should take 100 ms forward and 200 ms backward. In the run most take
150 and 280 ms. The costs of forward passes are scaled by 1.5, those of backward passes by 1.4, and
what a row costs in either by 1.45.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from hybridrl.config import ActivationMode, PipelineSchedule
from hybridrl.flow.costs import Costs
from hybridrl.pipelines.problem import PassCosts, PassKind
from hybridrl.pipelines.recorded import RecordedPass
from hybridrl.planner.layer_costs import DecodeRates, LayerCosts, PassRates
from hybridrl.planner.mapping import ACTOR, DeviceMapping, PlannedRole, TrainLayout
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class RecordedDecoding:
    """What a run has learned of its instances, and how much they did at once in the mean.

    `held` are the cached tokens of a row.
    """

    costs: Costs
    rows: float
    held: float


@dataclass(frozen=True, slots=True)
class CostScales:
    """By how much recorded work took longer than costs say: below 1 it was faster."""

    forward: float = 1.0
    backward: float = 1.0
    decode: float = 1.0
    prefill: float = 1.0


@dataclass(frozen=True, slots=True)
class _Compared:
    """Seconds of a recorded pass, and those that costs predict, which may be none."""

    seconds: float
    predicted: float


def scales_of(
    passes: Mapping[str, Sequence[RecordedPass]],
    decoding: RecordedDecoding | None,
    costs: MappingCosts,
    roles: Sequence[PlannedRole],
    mapping: DeviceMapping,
) -> CostScales:
    """What the run of `mapping` says of `costs`; `passes` are by role.

    Each scale is a median over micro-batches, weighted by their seconds, so that those that
    another process slowed down do not count. What is not recorded has the scale 1.
    """
    trained = [role for role in roles if passes.get(role.name) and role.name in mapping.train]
    compared = [
        (each.kind is PassKind.forward, own, again_s)
        for role in trained
        for each in passes[role.name]
        for own, again_s in [_compared(each, role, costs, mapping)]
    ]
    forward = _median([own for is_forward, own, _ in compared if is_forward])
    backward = _median(
        [
            replace(own, seconds=own.seconds - forward * again_s)
            for is_forward, own, again_s in compared
            if not is_forward
        ]
    )
    decode = prefill = 1.0
    if decoding is not None:
        (actor,) = [role for role in roles if role.name == ACTOR]
        own = costs.generation(actor, mapping.gen, mapping.ranks_of(ACTOR))
        at = decoding.rows, 1, decoding.rows * decoding.held
        decode = decoding.costs.decode(*at) / own.decode(*at)
        if decoding.costs.prefill_token_s and own.prefill_token_s:
            prefill = decoding.costs.prefill_token_s / own.prefill_token_s
    return CostScales(forward, backward, decode, prefill)


def scaled(
    costs: LayerCosts, scales: CostScales, decoding: RecordedDecoding | None, source: str
) -> LayerCosts:
    """The costs by these scales, with the seconds of a call and of a round trip of the run."""
    own = costs if decoding is None else decoding.costs
    return replace(
        costs,
        source=source,
        forward=_times(costs.forward, scales.forward),
        head_forward=_times(costs.head_forward, scales.forward),
        backward=_times(costs.backward, scales.backward),
        head_backward=_times(costs.head_backward, scales.backward),
        row_s=costs.row_s * (scales.forward + scales.backward) / 2,
        prefill=_times(costs.prefill, scales.prefill),
        decode=DecodeRates(**{k: scales.decode * v for k, v in asdict(costs.decode).items()}),
        call_s=own.call_s,
        round_trip_s=own.round_trip_s,
    )


def with_halves(
    costs: MappingCosts, in_halves: Sequence[tuple[ModelShape, RecordedPass]]
) -> MappingCosts:
    """The costs with those of backward passes in halves.

    `in_halves` are passes of zero-bubble pipelines of two ranks. A half's factor is what it took
    over its share of a whole pass, as a median weighted by seconds. It is 1 without measurements.
    """
    layout = TrainLayout(pp=2, schedule=PipelineSchedule.zero_bubble)
    compared: dict[PassKind, list[_Compared]] = {kind: [] for kind in PassKind}
    for shape, each in in_halves:
        role = PlannedRole(name=ACTOR, shape=shape, trained=True)
        work = each.tokens, each.scored, each.pairs
        own = costs.row_passes(role, layout, range(2), *work)[each.chunk]
        predicted = _predicted_s(each.kind, own)
        compared[each.kind].append(_Compared(each.seconds, predicted))
    layers = replace(
        costs.layer_costs,
        input_half=_median(compared[PassKind.backward_input]),
        weights_half=_median(compared[PassKind.backward_weights]),
    )
    return MappingCosts(layers, costs.cluster, costs.row_tokens)


def _compared(
    each: RecordedPass, role: PlannedRole, costs: MappingCosts, mapping: DeviceMapping
) -> tuple[_Compared, float]:
    """A pass, and the predicted seconds of the forward pass that it computes again."""
    layout, ranks = mapping.train[role.name], mapping.ranks_of(role.name)
    work = each.tokens, each.scored, each.pairs
    whole = costs.row_passes(role, layout, ranks, *work)[each.chunk]
    kept = replace(layout, activations=ActivationMode.keep)
    own = costs.row_passes(role, kept, ranks, *work)[each.chunk]
    again_s = _predicted_s(each.kind, whole) - _predicted_s(each.kind, own)
    return _Compared(each.seconds, _predicted_s(each.kind, own)), again_s


def _predicted_s(kind: PassKind, costs: PassCosts) -> float:
    """Of a pass that was timed; one backward pass has both halves where it is not in halves."""
    match kind:
        case PassKind.forward:
            return costs.forward_s
        case PassKind.backward:
            return costs.backward_s + costs.weights_s
        case PassKind.backward_input:
            return costs.backward_s
        case PassKind.backward_weights:
            return costs.weights_s


def _median(compared: Sequence[_Compared]) -> float:
    """Of recorded over predicted seconds, weighted by the latter; 1 of none. Not below 0."""
    known = [one for one in compared if one.predicted > 0]
    left = sum(one.predicted for one in known) / 2
    for one in sorted(known, key=lambda one: one.seconds / one.predicted):
        left -= one.predicted
        if left <= 0:
            return max(0.0, one.seconds / one.predicted)
    return 1.0


def _times(rates: PassRates, factor: float) -> PassRates:
    return PassRates(**{name: factor * value for name, value in asdict(rates).items()})
