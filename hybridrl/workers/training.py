"""Updates of the actor and of critics: this rank's samples, mini-batch by mini-batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridrl.config import Config, OptimConfig, RouterReplay
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.fused_update import FusedUpdate, ScoreInputs, UpdateInputs
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.flow.graph import Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.roles import Scalars
from hybridrl.workers.store import KEPT_IDS, ROUTED_EXPERTS, SampleStore, StoredSample

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
    those samples. `versions` has the oldest policy version of their tokens. `parcels` are the
    references to samples from other ranks; in a call of several updates the first share has all.
    `num_early` further samples of the update, on all ranks together, are in their gradients already
    (`UpdateSteps.accumulate`).
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


@dataclass(kw_only=True, slots=True)
class UpdateSteps:
    """An update of a role as its optimizer steps: every epoch over every mini-batch.

    In the first step the weights are still those that made the samples. There sequences have the
    fields of `compared`, too, and `compare` names the metrics that they give: see
    `TrainEngine.update`. If the loss scales its steps, sequences have them in every step; the
    metrics are those of the first. `stepped` is called after every step. With `replays` tokens take
    the experts that their samples have. `more_metrics` of the whole update are asked at its end.
    """

    engine: TrainEngine
    store: SampleStore
    config: Config
    stage: UpdateStage
    share: UpdateShare
    compare: Mapping[str, str] = field(default_factory=dict)
    compared: Callable[[SampleId], SampleFields] | None = None
    stepped: Callable[[], None] = lambda: None
    replays: bool = False
    more_metrics: Callable[[], dict[str, float]] = dict
    _history: list[dict[str, float]] = field(default_factory=list)

    def __len__(self) -> int:
        """The number of steps."""
        epochs = self.stage.epochs or self.config.trainer.epochs
        return epochs * len(self.share.mini_batches)

    def inputs(self) -> UpdateInputs:
        """The arguments of the next step."""
        loss, number = self.stage.loss, len(self._history)
        compares = loss.lr_scale(1.0) is not None or not number
        ids = self.share.mini_batches[number % len(self.share.mini_batches)]
        return UpdateInputs(
            sequences=self._sequences(ids, compares),
            loss=loss,
            max_response_tokens=self.config.rollout.max_new_tokens,
            compare=self.compare if compares else {},
            continues=self.share.num_early > 0,
        )

    def accumulate(self) -> None:
        """Compute the gradient of the whole share, for an update that is to come."""
        sequences = self._sequences(self.share.ids, compares=True)
        self.engine.accumulate(sequences, self.stage.loss, compare=self.compare)

    def _sequences(self, ids: Sequence[SampleId], compares: bool) -> list[TrainSequence]:
        """Samples with the fields that the stage's loss reads, and those of `compared`."""
        names, sequences = self.stage.fields, []
        for id in ids:
            sample, scalars = self.store[id], self.share.scalars[id]
            fields: SampleFields = {}
            for field_name in self.stage.loss.fields:
                name = names.get(field_name, field_name)
                fields[field_name] = scalars[name] if name in scalars else sample.tensors[name]
            if compares and self.compared is not None:
                fields |= self.compared(id)
            sequences.append(sequence_of(sample, fields, self.replays))
        return sequences

    def record(self, metrics: dict[str, float]) -> None:
        """The metrics of the step that `inputs` was of, which is done."""
        if self._history:  # by now the policies differ, not only the engines
            apart = self.compare.values()
            metrics = {k: v for k, v in metrics.items() if k.split("/")[0] not in apart}
        self._history.append(metrics)
        self.stepped()

    def metrics(self) -> dict[str, float]:
        """Means over the steps, once all are done."""
        means = mean_metrics(self._history)
        means["bad_steps"] = sum(metrics.get("bad_step", 0.0) for metrics in self._history)
        means["optimizer_steps"] = len(self._history)
        means["flops"] = sum(metrics["flops"] for metrics in self._history)
        return means | self.more_metrics()


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleScoring:
    """A forward-only stage of a role by its training shards, on this rank's samples.

    `keep` stores what the engine says of `inputs`. It gives new scalars by field, and the names of
    new tensor fields.
    """

    engine: TrainEngine
    inputs: ScoreInputs
    keep: Callable[[Sequence[torch.Tensor]], tuple[Scalars, tuple[str, ...]]]


def score(
    stages: Sequence[RoleScoring], together: FusedUpdate | None
) -> list[tuple[Scalars, tuple[str, ...]]]:
    """Forward-only stages of several roles `together`, or of one; what each gives."""
    if together is None:
        scores = [stage.inputs.score(stage.engine) for stage in stages]
    else:
        scores = together.score([(stage.engine, stage.inputs) for stage in stages])
    return [stage.keep(own) for stage, own in zip(stages, scores, strict=True)]


def train(updates: Sequence[UpdateSteps], together: FusedUpdate | None) -> list[dict[str, float]]:
    """Updates of several roles `together`, or of one; the metrics of each.

    The k-th mini-batches of all of them are one plan. What is left over of one is trained alone.
    """
    for number in range(max(map(len, updates))):
        due = [update for update in updates if number < len(update)]
        if len(due) == 1:
            due[0].record(due[0].inputs().train(due[0].engine))
            continue
        assert together is not None, "several roles are trained together"
        even = due[0].config.strict  # then equal bit for bit to separate updates
        of_engines = [(update.engine, update.inputs()) for update in due]
        for update, metrics in zip(due, together.update(of_engines, even), strict=True):
            update.record(metrics)
    return [update.metrics() for update in updates]


def sequence_of(
    sample: StoredSample, fields: SampleFields | None = None, replays: bool = False
) -> TrainSequence:
    """A sample as the engines take it, with the ids that its tokens were drawn from, if it has any.

    With `replays` it has its experts, too.
    """
    return TrainSequence(
        sample.tensors["tokens"],
        sample.response_tokens,
        fields or {},
        mask=sample.mask,
        routed_experts=sample.tensors.get(ROUTED_EXPERTS) if replays else None,
        kept_ids=sample.tensors.get(KEPT_IDS),
        images=sample.images,
    )


def mean_metrics(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every metric over the optimizer steps that have it."""
    by_name: dict[str, list[float]] = {}
    for metrics in history:
        for name, value in metrics.items():
            by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def log_probs_stage(
    engine: TrainEngine,
    store: SampleStore,
    stage: Stage,
    ids: Sequence[SampleId],
    replay: RouterReplay,
) -> RoleScoring:
    """Log-probabilities of a train engine, stored as the stage's output field.

    Under `RouterReplay.trainer` the pass records experts, which are stored as well.
    """
    (name,) = stage.outputs
    records = replay is RouterReplay.trainer
    samples = [store[id] for id in ids]
    sequences = [sequence_of(sample, replays=replay is RouterReplay.rollout) for sample in samples]

    def keep(scored: Sequence[torch.Tensor]) -> tuple[Scalars, tuple[str, ...]]:
        for sample, sequence, log_probs in zip(samples, sequences, scored, strict=True):
            sample.tensors[name] = log_probs
            if records and sequence.routed_experts is not None:
                sample.tensors[ROUTED_EXPERTS] = sequence.routed_experts
        return {}, (name, ROUTED_EXPERTS) if records else (name,)

    inputs = ScoreInputs(sequences=sequences, records_experts=records)
    return RoleScoring(engine=engine, inputs=inputs, keep=keep)
