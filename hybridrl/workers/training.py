"""An update of the actor or a critic: this rank's samples, mini-batch by mini-batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hybridrl.config import Config, OptimConfig
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import LOSS_MASK, SampleId
from hybridrl.workers.store import ROUTED_EXPERTS, SampleStore, StoredSample

SampleFields = dict[str, torch.Tensor | float]


@dataclass(frozen=True, slots=True)
class Training:
    """The training of a role: its optimizer, and the number of its steps in all."""

    optim: OptimConfig
    total_updates: int


@dataclass(frozen=True, slots=True)
class UpdateShare:
    """This rank's share of an update.

    `mini_batches` lists the sample ids of each optimizer step, `scalars` the driver's fields of
    those samples. `versions` has the oldest policy version of their tokens, `parcels` the
    references to samples from other ranks. `num_early` further samples of the update, on all ranks
    together, are in their gradients already (`accumulate`).
    """

    mini_batches: tuple[tuple[SampleId, ...], ...]
    scalars: dict[SampleId, dict[str, float]]
    versions: dict[SampleId, int]
    parcels: tuple[Any, ...]
    num_early: int = 0

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """Every sample of the share."""
        return tuple(id for ids in self.mini_batches for id in ids)


def train(
    engine: TrainEngine,
    store: SampleStore,
    config: Config,
    stage: UpdateStage,
    share: UpdateShare,
    *,
    compare: Mapping[str, str] = MappingProxyType({}),
    compared: Callable[[SampleId], SampleFields] | None = None,
    stepped: Callable[[], None] = lambda: None,
    replays: bool = False,
) -> dict[str, float]:
    """Every epoch over every mini-batch, one optimizer step each; metrics are means.

    In the first step the weights are still those that made the samples. There sequences have the
    fields of `compared`, too, and `compare` names the metrics that they give: see
    `TrainEngine.update`. If the loss scales its steps, sequences have them in every step; the
    metrics are those of the first. `stepped` is called after every step. With `replays` tokens take
    the experts that their samples have.
    """
    loss = stage.loss
    history: list[dict[str, float]] = []
    scales = loss.lr_scale(1.0) is not None
    for _ in range(stage.epochs or config.trainer.epochs):
        for ids in share.mini_batches:
            compares = scales or not history
            metrics = engine.update(
                _sequences(store, stage, share, ids, compared if compares else None, replays),
                loss,
                max_response_tokens=config.rollout.max_new_tokens,
                compare=compare if compares else {},
                continues=share.num_early > 0,
            )
            if history:  # by now the policies differ, not only the engines
                metrics = {
                    k: v for k, v in metrics.items() if k.split("/")[0] not in compare.values()
                }
            history.append(metrics)
            stepped()
    means = mean_metrics(history)
    means["bad_steps"] = sum(metrics.get("bad_step", 0.0) for metrics in history)
    means["optimizer_steps"] = len(history)
    means["flops"] = sum(metrics["flops"] for metrics in history)
    return means


def accumulate(
    engine: TrainEngine,
    store: SampleStore,
    stage: UpdateStage,
    share: UpdateShare,
    *,
    compare: Mapping[str, str],
    compared: Callable[[SampleId], SampleFields],
    replays: bool,
) -> None:
    """The gradient of this rank's share, for an update that is to come: see `train`."""
    sequences = _sequences(store, stage, share, share.ids, compared, replays)
    engine.accumulate(sequences, stage.loss, compare=compare)


def _sequences(
    store: SampleStore,
    stage: UpdateStage,
    share: UpdateShare,
    ids: Sequence[SampleId],
    compared: Callable[[SampleId], SampleFields] | None,
    replays: bool,
) -> list[TrainSequence]:
    """Samples with the fields that the stage's loss reads, and those of `compared`."""
    names, sequences = stage.fields, []
    for id in ids:
        sample, scalars = store[id], share.scalars[id]
        fields = {x: _field(names.get(x, x), sample, scalars) for x in stage.loss.fields}
        if compared is not None:
            fields |= compared(id)
        sequences.append(sequence_of(sample, fields, replays))
    return sequences


def sequence_of(
    sample: StoredSample, fields: SampleFields | None = None, replays: bool = False
) -> TrainSequence:
    """A sample as the engines take it; with `replays` together with its experts, if it has any."""
    return TrainSequence(
        sample.tensors["tokens"],
        sample.response_tokens,
        fields or {},
        mask=sample.tensors.get(LOSS_MASK),
        routed_experts=sample.tensors.get(ROUTED_EXPERTS) if replays else None,
    )


def mean_metrics(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every metric over the optimizer steps that have it."""
    by_name: dict[str, list[float]] = {}
    for metrics in history:
        for name, value in metrics.items():
            by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def _field(name: str, sample: StoredSample, scalars: dict[str, float]) -> torch.Tensor | float:
    return scalars[name] if name in scalars else sample.tensors[name]
