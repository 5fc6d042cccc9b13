"""The stages that the driver runs itself, on scalars: by_group, by_batch, filter, judged, join.

Each takes samples in training order and gives samples in training order. The results of the
recipe's functions are checked here, since they are known only now.
"""

from collections.abc import Sequence
from typing import Any

from hybridrl.flow.graph import (
    BarrierStage,
    ByBatchStage,
    ByGroupStage,
    FilterStage,
    JoinStage,
    JudgedStage,
    MergeStage,
    PairStage,
    Stage,
)
from hybridrl.flow.judgements import JudgeFailed, failed_status
from hybridrl.flow.ledger import DropReason, Ledger, groups
from hybridrl.flow.sample import Sample


def run_barrier(
    stage: Stage, samples: list[Sample], others: list[Sample], ledger: Ledger
) -> list[Sample]:
    """Run a driver stage on its upstream's samples; `others` are a join's second stream."""
    match stage:
        case ByGroupStage():
            for group in groups(samples):
                _write(stage, group, _call(stage, group))
            return samples
        case ByBatchStage():
            if samples:  # a mean of none is not there
                _by_batch(stage, samples)
            return samples
        case FilterStage():
            return _filter(stage, samples, ledger)
        case JudgedStage():
            return _judged(stage, samples, ledger)
        case PairStage():
            return _pair(stage, samples, others, ledger)
        case MergeStage():
            return _merge(stage, samples, others, ledger)
        case JoinStage():
            return _join(stage, samples, others, ledger)
    raise AssertionError(f"{stage} is no stage of the driver's")


def _call(stage: BarrierStage, samples: Sequence[Sample]) -> Any:
    return stage.function(*([s.scalars[x] for s in samples] for x in stage.inputs))


def _by_batch(stage: ByBatchStage, samples: list[Sample]) -> None:
    if not stage.grouped:
        _write(stage, samples, _call(stage, samples))
        return
    grouped = groups(samples)
    inputs = ([[s.scalars[x] for s in group] for group in grouped] for x in stage.inputs)
    result = stage.function(*inputs)
    for column, values in zip(stage.outputs, _columns(stage, result), strict=True):
        if len(values) != len(grouped):
            raise ValueError(_wrong_length(stage, column, len(values), len(grouped), "groups"))
        for group, group_values in zip(grouped, values, strict=True):
            _write_column(stage, column, group, group_values)


def _filter(stage: FilterStage, samples: list[Sample], ledger: Ledger) -> list[Sample]:
    kept = []
    for group in groups(samples):
        if _call(stage, group):
            kept += group
        else:
            ledger.leave(group, DropReason.FILTER, f"filter: {stage.name}")
    return kept


def _judged(stage: JudgedStage, samples: list[Sample], ledger: Ledger) -> list[Sample]:
    """Let samples go whose judge has failed, with their partners where they are pairs."""
    for status, role in zip(stage.inputs, stage.roles, strict=True):
        for sample in samples if role in stage.stops else ():
            if reason := failed_status(sample, (status,)):
                raise JudgeFailed(f"{role}.on_failure=stop: sample {sample.id}: {reason}")
    failed = {s.id: reason for s in samples if (reason := failed_status(s, stage.inputs))}
    if not failed:
        return samples
    pairs = {(id.prompt, id.k): reason for id, reason in failed.items()} if stage.pairs else {}
    kept = []
    for sample in samples:
        reason = failed.get(sample.id) or pairs.get((sample.id.prompt, sample.id.k))
        if reason is None:
            kept.append(sample)
        else:
            ledger.leave([sample], DropReason.JUDGE, reason)
    return kept


def _join(
    stage: JoinStage, samples: list[Sample], others: list[Sample], ledger: Ledger
) -> list[Sample]:
    """Copy the partner's scalars; a single partner serves its whole group."""
    partners = {group[0].id.prompt: group for group in groups(others)}
    kept = []
    for group in groups(samples):
        theirs = partners.get(group[0].id.prompt, [])
        by_k = {partner.id.k: partner for partner in theirs}
        for sample in group:
            partner = by_k.get(0 if stage.shared else sample.id.k)
            if partner is None:
                ledger.leave([sample], DropReason.JOIN, f"join: no partner in {stage.name}")
                continue
            for name in stage.outputs:
                sample.scalars[name] = partner.scalars[name.removeprefix(stage.prefix)]
            kept.append(sample)
    ledger.leave(others, DropReason.JOIN, f"join: only its scalars go into {stage.name}")
    return kept


def _pair(
    stage: PairStage, samples: list[Sample], others: list[Sample], ledger: Ledger
) -> list[Sample]:
    """Partners side by side, those of one prompt together."""
    first, second = stage.sides
    partners = {(other.id.prompt, other.id.k): other for other in others}
    kept = []
    for sample in samples:
        partner = partners.pop((sample.id.prompt, sample.id.k), None)
        if partner is None:
            ledger.leave([sample], DropReason.JOIN, f"pair: no partner in {stage.name}")
            continue
        sample.scalars["side"], partner.scalars["side"] = first, second
        kept += [sample, partner]
    ledger.leave(partners.values(), DropReason.JOIN, f"pair: no partner in {stage.name}")
    return kept


def _merge(
    stage: MergeStage, samples: list[Sample], others: list[Sample], ledger: Ledger
) -> list[Sample]:
    """Put the samples of the other stream after the first stream's, prompt by prompt."""
    more = {group[0].id.prompt: group for group in groups(others)}
    kept = []
    for group in groups(samples):
        kept += group + more.pop(group[0].id.prompt, [])
    for group in more.values():
        ledger.leave(group, DropReason.JOIN, f"merge: no such prompt before {stage.name}")
    return kept


def _write(stage: Stage, samples: Sequence[Sample], result: Any) -> None:
    for column, values in zip(stage.outputs, _columns(stage, result), strict=True):
        _write_column(stage, column, samples, values)


def _columns(stage: Stage, result: Any) -> Sequence[Any]:
    """One sequence per output of the stage."""
    num = len(stage.outputs)
    if num == 0:
        if result is not None:
            raise ValueError(f"{stage.name!r} has no outputs but returned {type(result).__name__}")
        return ()
    if num == 1:
        return (result,)
    if not isinstance(result, tuple) or len(result) != num:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(f"{stage.name!r} returned {got}, wanted a tuple: {list(stage.outputs)}")
    return result


def _write_column(stage: Stage, column: str, samples: Sequence[Sample], values: Any) -> None:
    if not hasattr(values, "__len__") or len(values) != len(samples):
        got = len(values) if hasattr(values, "__len__") else type(values).__name__
        raise ValueError(_wrong_length(stage, column, got, len(samples), "samples"))
    for sample, value in zip(samples, values, strict=True):
        by_turn = isinstance(value, list)
        sample.scalars[column] = [float(x) for x in value] if by_turn else float(value)


def _wrong_length(stage: Stage, column: str, got: object, wanted: int, of: str) -> str:
    return (
        f"{stage.name!r} returned {got} values of {column!r}, wanted one for each of {wanted} {of}"
    )
