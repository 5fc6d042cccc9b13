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
from hybridrl.pipelines.problem import PassKind
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
class _Share:
    """A recorded pass: what it took over what it should take, and how much that is in seconds."""

    ratio: float
    seconds: float


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
    forward = _median([s for role in trained for s in _forward(role, passes, costs, mapping)])
    backward = _median(
        [s for role in trained for s in _backward(role, passes, costs, mapping, forward)]
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
    shares: dict[PassKind, list[_Share]] = {kind: [] for kind in PassKind}
    for shape, each in in_halves:
        role = PlannedRole(name=ACTOR, shape=shape, trained=True)
        work = each.tokens, each.scored, each.pairs
        own = costs.row_passes(role, layout, range(2), *work)[each.chunk]
        is_input = each.kind is PassKind.backward_input
        predicted = own.backward_s if is_input else own.weights_s
        shares[each.kind].append(_Share(each.seconds / predicted, predicted))
    layers = replace(
        costs.layer_costs,
        input_half=_median(shares[PassKind.backward_input]),
        weights_half=_median(shares[PassKind.backward_weights]),
    )
    return MappingCosts(layers, costs.cluster, costs.row_tokens)


def _forward(
    role: PlannedRole,
    passes: Mapping[str, Sequence[RecordedPass]],
    costs: MappingCosts,
    mapping: DeviceMapping,
) -> list[_Share]:
    layout, ranks = mapping.train[role.name], mapping.ranks_of(role.name)
    shares = []
    for each in passes[role.name]:
        if each.kind is PassKind.forward:
            work = each.tokens, each.scored, each.pairs
            predicted = costs.row_passes(role, layout, ranks, *work)[each.chunk].forward_s
            if predicted:
                shares.append(_Share(each.seconds / predicted, predicted))
    return shares


def _backward(
    role: PlannedRole,
    passes: Mapping[str, Sequence[RecordedPass]],
    costs: MappingCosts,
    mapping: DeviceMapping,
    forward: float,
) -> list[_Share]:
    """A pass that computes the forward pass again has that of the scale `forward` in it."""
    layout, ranks = mapping.train[role.name], mapping.ranks_of(role.name)
    kept = replace(layout, activations=ActivationMode.keep)
    shares = []
    for each in passes[role.name]:
        if each.kind is PassKind.forward:
            continue
        work = each.tokens, each.scored, each.pairs
        whole = costs.row_passes(role, layout, ranks, *work)[each.chunk]
        own = costs.row_passes(role, kept, ranks, *work)[each.chunk]
        again_s = forward * (whole.backward_s - own.backward_s)
        predicted = own.backward_s + own.weights_s
        if each.kind is PassKind.backward_input:
            predicted = own.backward_s
        elif each.kind is PassKind.backward_weights:
            predicted, again_s = own.weights_s, 0.0
        if predicted:
            shares.append(_Share((each.seconds - again_s) / predicted, predicted))
    return shares


def _median(shares: Sequence[_Share]) -> float:
    """Weighted by seconds; 1 of none. Not below 0, which no cost is."""
    left = sum(share.seconds for share in shares) / 2
    for share in sorted(shares, key=lambda share: share.ratio):
        left -= share.seconds
        if left <= 0:
            return max(0.0, share.ratio)
    return 1.0


def _times(rates: PassRates, factor: float) -> PassRates:
    return PassRates(**{name: factor * value for name, value in asdict(rates).items()})
