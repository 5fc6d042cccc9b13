"""Layer costs from measured seconds: of updates, forward passes, decode steps and weight switches.

All seconds are linear in the costs, so they are found by least squares without negative costs
(`flow.costs.robust_fit`), of all sizes and lengths together. Then calls that another process slowed
down do not count. What measurements cannot tell apart is divided between the costs, and predicts
such calls as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridrl.flow.costs import robust_fit
from hybridrl.planner.layer_costs import (
    DecodeRates,
    LayerCosts,
    LayerWork,
    LinearPass,
    PassRates,
)
from hybridrl.planner.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTokens:
    """What a micro-batch has: tokens, those that are scored, pairs of a query and a key."""

    tokens: int
    scored: int
    pairs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedPass:
    """Micro-batches of a model on one rank, scored or trained, and their seconds together.

    `optimizer_s` of an update's seconds are those of the optimizer's step.
    """

    shape: ModelShape
    rows: tuple[PackedTokens, ...]
    trains: bool
    seconds: float
    optimizer_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedDecoding:
    """A few steps of a rollout engine on `pp` x `tp` ranks, or the admission of prompts.

    `rows` and `cached` tokens are summed over the steps. `admitted` requests have prompts of
    `prefill` tokens together.
    """

    shape: ModelShape
    pp: int = 1
    tp: int = 1
    steps: int = 0
    rows: int = 0
    cached: int = 0
    admitted: int = 0
    prefill: int = 0
    pairs: int = 0
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedSwitch:
    """A weight switch on one rank alone, in which nothing moves between ranks."""

    shape: ModelShape
    seconds: float


_OWN_RATES = (
    "step_s", "layer_s", "weight_byte_s", "cached_byte_s", "row_s", "flop_s", "logit_s",
)  # fmt: skip
"""Of `DecodeRates`, those of a rank's own work."""


def fit_layers(
    passes: Sequence[TimedPass],
    decoding: Sequence[TimedDecoding],
    switches: Sequence[TimedSwitch],
    split: Sequence[TimedPass] = (),
    *,
    source: str,
    itemsize: int,
    overlaps: bool,
) -> LayerCosts:
    """The costs that explain the measurements best; `itemsize` is that of the compute format.

    Updates and forward passes of at least two numbers of layers, and of two widths, tell most costs
    apart. `split` are those of two tp ranks together: what they take beyond a rank's own work is
    that of their all-reduces. So it is with what `decoding` has of two ranks, under tp or pp.
    Raises ValueError without an update, a forward pass or a decode step.
    """
    if not any(p.trains for p in passes) or all(p.trains for p in passes):
        raise ValueError("layer costs need updates and forward passes")
    alone = [timed for timed in decoding if timed.pp * timed.tp == 1]
    if not any(timed.steps for timed in alone):
        raise ValueError("layer costs need decode steps")
    costs = _fit_passes(passes, source)
    if split:
        costs = _with_reduces(costs, split, itemsize)
    rates, prefill = _fit_decoding(alone, itemsize)
    together = [timed for timed in decoding if timed.pp * timed.tp > 1 and timed.steps]
    rates = _with_decode_messages(rates, together, itemsize)
    moved = [(1.0, itemsize * float(timed.shape.parameters)) for timed in switches]
    seconds = [timed.seconds for timed in switches]
    switch_s, switch_byte_s = _fit(moved, seconds) if switches else [0.0, 0.0]
    return replace(
        costs,
        decode=rates,
        prefill=prefill,
        switch_s=switch_s,
        switch_byte_s=switch_byte_s,
        itemsize=itemsize,
        overlaps=overlaps,
    )


def _fit_passes(passes: Sequence[TimedPass], source: str) -> LayerCosts:
    """Forward and backward passes together: what is in both is measured twice."""
    rows = []
    for timed in passes:
        layers, head = _pass_work(timed)
        # A trained micro-batch has its fixed part in forward and in backward, a scored one once.
        number = float(len(timed.rows) * (1 + timed.trains))
        trained = [float(timed.trains) * x for x in (*layers, *head)]
        elements = float(timed.shape.parameters)
        update = [float(timed.trains), elements * timed.trains]
        rows.append([*layers, *head, *trained, number, *update, float(not timed.trains)])
    seconds = [timed.seconds - timed.optimizer_s for timed in passes]
    fitted = _fit(rows, seconds)
    forward, backward = fitted[:6], fitted[6:12]
    row_s, update_s, gradient_s, pass_s = fitted[12:]
    stepped = [timed for timed in passes if timed.trains]
    optimizer = _fit(
        [[float(timed.shape.parameters)] for timed in stepped],
        [timed.optimizer_s for timed in stepped],
    )
    return LayerCosts(
        source=source,
        forward=_rates(forward[:4]),
        head_forward=PassRates(flop_s=forward[4], element_s=forward[5]),
        backward=_rates(backward[:4]),
        head_backward=PassRates(flop_s=backward[4], element_s=backward[5]),
        decode=DecodeRates(),
        row_s=row_s,
        pass_s=pass_s,
        update_s=update_s,
        gradient_element_s=gradient_s,
        optimizer_element_s=optimizer[0],
    )


def _with_reduces(costs: LayerCosts, split: Sequence[TimedPass], itemsize: int) -> LayerCosts:
    """With what all-reduces take within steps, beside work that they wait for and that waits."""
    rows, seconds = [], []
    for timed in split:
        number = tp_reduces(timed.shape.layers, timed.trains)
        nbytes = sum(row.tokens for row in timed.rows) * timed.shape.hidden * itemsize
        rows.append([float(number * len(timed.rows)), float(number * nbytes), float(timed.trains)])
        seconds.append(max(0.0, timed.seconds - _own_work_s(costs, timed, tp=2)))
    reduce_s, byte_s, update_s = _fit(rows, seconds)
    return replace(costs, tp_reduce_s=reduce_s, tp_byte_s=byte_s, tp_update_s=update_s)


def tp_reduces(layers: int, trains: bool) -> int:
    """All-reduces of hidden states of a row: two a layer and pass, the embedding's, the head's."""
    return (2 * layers + 1) * (1 + trains)


def _own_work_s(costs: LayerCosts, timed: TimedPass, tp: int) -> float:
    """What a rank of `tp` computes of these rows, without messages."""
    shape = timed.shape
    work, outputs = LayerWork.of(shape, tp), shape.vocabulary / tp
    each = LinearPass.of_layer(costs.forward, work).times(shape.layers)
    each += LinearPass.of_head(costs.head_forward, shape.hidden, outputs)
    seconds = costs.pass_s
    if timed.trains:
        each += LinearPass.of_layer(costs.backward, work).times(shape.layers)
        each += LinearPass.of_head(costs.head_backward, shape.hidden, outputs)
        elements = shape.parameters / tp
        of_element = costs.gradient_element_s + costs.optimizer_element_s
        seconds = costs.update_s + of_element * elements
    number = len(timed.rows) * (1 + timed.trains)
    rows = (each(row.tokens, row.scored, row.pairs) for row in timed.rows)
    return seconds + costs.row_s * number + sum(rows)


def _rates(fitted: Sequence[float]) -> PassRates:
    call_s, flop_s, element_s, pair_s = fitted
    return PassRates(call_s=call_s, flop_s=flop_s, element_s=element_s, pair_s=pair_s)


def _pass_work(timed: TimedPass) -> tuple[list[float], list[float]]:
    """Calls, operations, elements and pairs of all layers; operations and logits of the head."""
    shape, work = timed.shape, LayerWork.of(timed.shape)
    tokens = sum(row.tokens for row in timed.rows)
    scored = sum(row.scored for row in timed.rows)
    pairs = sum(row.pairs for row in timed.rows)
    layers = [
        float(shape.layers * len(timed.rows)),
        shape.layers * work.flops * tokens,
        shape.layers * work.elements * tokens,
        shape.layers * work.pair_flops * pairs,
    ]
    logits = float(scored * shape.vocabulary)
    return layers, [2 * shape.hidden * logits, logits]


def _fit_decoding(
    decoding: Sequence[TimedDecoding], itemsize: int
) -> tuple[DecodeRates, PassRates]:
    """Decode steps first; what is left of a call with prompts is their prefill."""
    stepped = [timed for timed in decoding if timed.steps]
    works = [_decode_work(timed, itemsize) for timed in stepped]
    fitted = _fit(works, [timed.seconds for timed in stepped])
    rates = DecodeRates(**dict(zip(_OWN_RATES, fitted, strict=True)))
    filled = [timed for timed in decoding if timed.prefill and not timed.steps]
    if not filled:
        return rates, PassRates()
    rows = []
    for timed in filled:
        work = LayerWork.of(timed.shape)
        layers = timed.shape.layers
        rows.append(
            [
                float(layers * timed.admitted),
                layers * work.flops * timed.prefill,
                layers * work.elements * timed.prefill,
                layers * work.pair_flops * timed.pairs,
            ]
        )
    return rates, _rates(_fit(rows, [timed.seconds for timed in filled]))


def _with_decode_messages(
    rates: DecodeRates, together: Sequence[TimedDecoding], itemsize: int
) -> DecodeRates:
    """With what messages take within decode steps. They are small, and ranks wait for each."""
    own = [getattr(rates, name) for name in _OWN_RATES]
    reduces, reduced_s, sends, sent_s = [], list[float](), [], list[float]()
    for timed in together:
        work_s = float(np.dot(own, _decode_work(timed, itemsize)))
        rest_s, steps = max(0.0, timed.seconds - work_s), float(timed.steps)
        if timed.pp > 1:
            sends.append([timed.pp * steps])
            sent_s.append(rest_s)
            continue
        number, nbytes = 2 * timed.shape.layers, timed.shape.hidden * itemsize
        reduces.append([number * steps, float(number * nbytes * timed.rows), steps])
        reduced_s.append(rest_s)
    if reduces:
        reduce_s, byte_s, step_s = _fit(reduces, reduced_s)
        rates = replace(rates, tp_reduce_s=reduce_s, tp_byte_s=byte_s, tp_step_s=step_s)
    if sends:
        rates = replace(rates, pp_send_s=_fit(sends, sent_s)[0])
    return rates


def _decode_work(timed: TimedDecoding, itemsize: int) -> list[float]:
    """What `_OWN_RATES` count.

    Stages of a pipeline decode as many batches in turns, as `MappingCosts.generation` has it.
    """
    shape, steps, rows = timed.shape, float(timed.steps), timed.rows / timed.pp
    read = (shape.layers * shape.layer_parameters + shape.head_parameters) / timed.tp
    return [
        steps * timed.pp,
        steps * shape.layers,
        steps * read * itemsize,
        float(timed.cached) * shape.kv_elements * itemsize / (timed.pp * timed.tp),
        rows,
        2.0 * read * rows,
        rows * shape.vocabulary / timed.tp,
    ]


def _fit(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Costs without negative ones; a column that no measurement has costs nothing."""
    columns = np.array(work, dtype=np.float64)
    return robust_fit(columns, np.array(seconds, dtype=np.float64), doubtful=0)
