"""Roles that only score, each on one instance: no message leaves the instance's ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybridrl.config import Config, DType, RouterReplay, Vision
from hybridrl.engines.score.engine import ScoreEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.flow.graph import ComputeStage, Stage, StageMethod
from hybridrl.flow.sample import SampleId
from hybridrl.models.load import TORCH_DTYPES, load_config
from hybridrl.models.response_text import ResponseText
from hybridrl.models.shard import GenParallel
from hybridrl.rewards.model import TextReader, other_token
from hybridrl.workers.roles import Scalars
from hybridrl.workers.store import ROUTED_EXPERTS, SampleStore, StoredSample
from hybridrl.workers.training import sequence_of

T = TypeVar("T")
Score = Callable[[ScoreEngine, Sequence[TrainSequence]], list[T]]
Top = tuple[torch.Tensor, torch.Tensor]


class InstanceScorer:
    """A score engine over the samples of an instance, of which each rank's store has a share.

    All ranks of the instance call `compute`, each with the ids of its samples (perhaps none).
    They gather the tokens, score all of them, and each stores the results of its samples.
    """

    replays = False
    """Whether tokens take the experts that their samples have: those of the actor."""

    def __init__(self, engine: ScoreEngine, store: SampleStore) -> None:
        self.engine, self.store = engine, store

    @property
    def weights_bytes(self) -> int:
        """Bytes of this rank's own weights; 0 where it shares another model's."""
        return self.engine.weights_bytes

    def offload(self) -> None:
        """Free the device's memory; shared weights are offloaded by their owner."""
        if self.weights_bytes:
            self.engine.offload()

    def onload(self) -> None:
        """Bring the weights back."""
        if self.weights_bytes:
            self.engine.onload()

    def compute(self, stage: Stage, ids: Sequence[SampleId]) -> tuple[Scalars, tuple[str, ...]]:
        """New scalars by field, aligned with `ids`, and the names of new tensor fields."""
        raise NotImplementedError

    def _own(self, ids: Sequence[SampleId], score: Score[T], privileged: bool = False) -> list[T]:
        """The results of this rank's `ids`, after scoring those of the whole instance.

        With `privileged` after the prompts of `data.privileged_template`.
        """
        return self._scored([self._read(self.store[id], privileged) for id in ids], score)

    def _scored(self, mine: Sequence[tuple[TrainSequence, str]], score: Score[T]) -> list[T]:
        """The results of this rank's sequences, after scoring those of the whole instance."""
        by_rank = instance_gather(self.engine.parallel, list(mine))
        before = sum(map(len, by_rank[: self.engine.parallel.instance_rank]))
        scores = self._of_instance([read for of_rank in by_rank for read in of_rank], score)
        return scores[before : before + len(mine)]

    def _read(self, sample: StoredSample, privileged: bool) -> tuple[TrainSequence, str]:
        """A sample's tokens, and its source where that matters."""
        sequence = sequence_of(sample, replays=self.replays)
        if privileged:
            prompt = torch.tensor(sample.item.privileged_ids, dtype=torch.long)
            ids = torch.cat([prompt, sample.response_ids])
            sequence = TrainSequence(ids, sample.response_tokens, kept_ids=sequence.kept_ids)
        return sequence, self._source(sample)

    def _set_temperature(self, temperature: float) -> None:
        """Compute as samples of this temperature were drawn."""
        self.engine.temperature = temperature

    def _source(self, sample: StoredSample) -> str:
        """Empty: copies of samples in another pool come without their items."""
        return ""

    def _of_instance(
        self, sequences: Sequence[tuple[TrainSequence, str]], score: Score[T]
    ) -> list[T]:
        return score(self.engine, [sequence for sequence, _ in sequences])

    def _log_probs(self, stage: Stage, ids: Sequence[SampleId]) -> tuple[Scalars, tuple[str, ...]]:
        """Log-probabilities of the responses, stored as the stage's output field."""
        (name,) = stage.outputs
        privileged = isinstance(stage, ComputeStage) and stage.privileged
        scored = self._own(ids, ScoreEngine.log_probs, privileged)
        for id, log_probs in zip(ids, scored, strict=True):
            self.store[id].tensors[name] = log_probs
        return {}, (name,)

    def _top_log_probs(
        self, stage: ComputeStage, ids: Sequence[SampleId]
    ) -> tuple[Scalars, tuple[str, ...]]:
        """Ids and log-probabilities of the likeliest tokens, the stage's output fields."""

        def score(engine: ScoreEngine, sequences: Sequence[TrainSequence]) -> list[Top]:
            return engine.top_log_probs(sequences, stage.num_top)

        for id, top in zip(ids, self._own(ids, score, stage.privileged), strict=True):
            self.store[id].tensors.update(zip(stage.outputs, top, strict=True))
        return {}, stage.outputs


class ReferenceScorer(InstanceScorer):
    """A frozen copy of the weights at `model_path`."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        parallel: GenParallel,
        device: torch.device,
        store: SampleStore,
        *,
        key: str = "model.path",
        weights: Mapping[str, torch.Tensor] | None = None,
        num_likeliest: int | None = None,
        vision: Vision = Vision.frozen,
    ) -> None:
        """Read this rank's shard of the weights, once a node; all ranks of the world call it.

        Or share `weights`, see `ScoreEngine.share`. Errors name `key`. A copy of an actor whose
        image tower trains has a tower of its own (`vision`).
        """
        model_config = load_config(model_path, key, vision)
        engine = _engine(config, model_config, parallel, device, num_likeliest=num_likeliest)
        if weights is None:
            engine.load_once(model_path, key=key)
        else:
            engine.share(weights, model_path)
        super().__init__(engine, store)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The rank's own tensors by name, for other weights than those of the file."""
        return self.engine.parameters()

    def compute(self, stage: Stage, ids: Sequence[SampleId]) -> tuple[Scalars, tuple[str, ...]]:
        """Log-probabilities under the frozen weights: of the responses, or the likeliest ones."""
        self._set_temperature(stage.temperature)
        if stage.method is StageMethod.TOP_LOG_PROBS:
            assert isinstance(stage, ComputeStage)
            return self._top_log_probs(stage, ids)
        return self._log_probs(stage, ids)


class TeachersBySource(ReferenceScorer):
    """Several teachers as one role: each reads the samples of its sources (`teacher.by_source`).

    `others` has a scorer by source, one for several where they have the same; `rest` reads samples
    of all other sources. Each is on the device while it scores, one after the other.
    """

    def __init__(self, rest: ReferenceScorer, others: Mapping[str, ReferenceScorer]) -> None:
        InstanceScorer.__init__(self, rest.engine, rest.store)
        self.others = others
        self._all = list({id(scorer): scorer for scorer in (rest, *others.values())}.values())
        self._rest = rest

    @property
    def weights_bytes(self) -> int:
        """Bytes of the largest teacher's own weights on this rank: one is there at a time."""
        return max(scorer.weights_bytes for scorer in self._all)

    def offload(self) -> None:
        """Nothing is on the device between two calls."""

    def onload(self) -> None:
        """Each comes when it scores."""

    def _set_temperature(self, temperature: float) -> None:
        for scorer in self._all:
            scorer.engine.temperature = temperature

    def _source(self, sample: StoredSample) -> str:
        source: str = sample.item.source
        return source

    def _of_instance(
        self, sequences: Sequence[tuple[TrainSequence, str]], score: Score[T]
    ) -> list[T]:
        scored: dict[int, T] = {}
        for scorer in self._all:
            mine = [
                i
                for i, (_, source) in enumerate(sequences)
                if self.others.get(source, self._rest) is scorer
            ]
            if not mine:
                continue
            scorer.onload()
            results = score(scorer.engine, [sequences[i][0] for i in mine])
            scorer.offload()
            scored.update(zip(mine, results, strict=True))
        return [scored[i] for i in range(len(sequences))]


class OldPolicyScorer(InstanceScorer):
    """The generation weights, shared with the rollout engine: `model` is `SharesWeights.model`."""

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        parallel: GenParallel,
        device: torch.device,
        store: SampleStore,
    ) -> None:
        """An engine over `model`, whose weights must be on the device whenever it computes."""
        dtype = config.rollout.dtype
        engine = _engine(config, model.config, parallel, device, dtype=dtype, model=model)
        super().__init__(engine, store)
        self.replays = config.trainer.router_replay is RouterReplay.rollout
        self._records = config.trainer.router_replay is RouterReplay.trainer

    def compute(self, stage: Stage, ids: Sequence[SampleId]) -> tuple[Scalars, tuple[str, ...]]:
        """Log-probabilities of the responses under the generation weights.

        Under `RouterReplay.trainer` also the experts that this pass took.
        """
        self._set_temperature(stage.temperature)
        if not self._records:
            return self._log_probs(stage, ids)

        def score(
            engine: ScoreEngine, sequences: Sequence[TrainSequence]
        ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
            log_probs = engine.log_probs(sequences, records_experts=True)
            return [(x, s.routed_experts) for x, s in zip(log_probs, sequences, strict=True)]

        (name,) = stage.outputs
        for id, (log_probs, experts) in zip(ids, self._own(ids, score), strict=True):
            self.store[id].tensors[name] = log_probs
            if experts is not None:
                self.store[id].tensors[ROUTED_EXPERTS] = experts
        return {}, (name, ROUTED_EXPERTS)


class NeuralReward(InstanceScorer):
    """A judge that is a model (`kind=model`): a sequence classifier's score at the last token.

    It reads the sample's tokens as they are where its tokenizer is the actor's. Else it reads the
    text of prompt and response, in its own tokens and chat template.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        parallel: GenParallel,
        device: torch.device,
        store: SampleStore,
        tokenizer: PreTrainedTokenizerBase,
        *,
        key: str = "reward.model",
    ) -> None:
        """Read this rank's shard of the weights at `model_path`, the value of `key`, once a node.

        All ranks of the world call it. `tokenizer` is the actor's.
        """
        self.text_of = ResponseText(tokenizer, config.rollout.skip_special_tokens)
        self.reader = TextReader(model_path) if other_token(model_path, tokenizer, key) else None
        model_config = load_config(model_path)
        engine = _engine(config, model_config, parallel, device, classifier=True)
        engine.load_once(model_path, key=key)
        super().__init__(engine, store)

    def compute(self, stage: Stage, ids: Sequence[SampleId]) -> tuple[Scalars, tuple[str, ...]]:
        """The score of prompt and response and its status, as a verifier gives them.

        A score that is not finite is marked as failed.
        """
        value, status = stage.scalars
        read = [self._sequence(self.store[id]) for id in ids]
        sequences = [(x, "") for x in read if isinstance(x, TrainSequence)]
        scores = iter(self._scored(sequences, ScoreEngine.values_at_end))
        judged = [next(scores) if isinstance(x, TrainSequence) else x for x in read]
        reasons = [x if isinstance(x, str) else _no_number(x) for x in judged]
        return {
            value: tuple(0.0 if reason else x for x, reason in zip(judged, reasons, strict=True)),
            status: tuple(f"error: {reason}" if reason else "ok" for reason in reasons),
        }, ()

    def _sequence(self, sample: StoredSample) -> TrainSequence | str:
        """What the model reads of a sample; or why it cannot."""
        if self.reader is None:
            return self._read(sample, False)[0]
        item = sample.item
        text = self.text_of(sample.response_ids)
        try:
            ids = self.reader.ids(item.messages, item.prompt, text)
        except ValueError as error:
            return str(error)
        return TrainSequence(torch.tensor(ids, dtype=torch.long), 0)


def _no_number(score: float) -> str:
    """Why a score does not count; empty where it does."""
    return "" if math.isfinite(score) else f"the score is {score}"


def instance_gather(parallel: GenParallel, value: T) -> list[T]:
    """The `value` of every rank of the instance, by `GenParallel.instance_rank`, on all of them.

    Along tp, then along pp: an instance has no group of all its ranks.
    """
    row = _along(parallel.tp, parallel.tp_group, parallel.tp_peers, value)
    rows = _along(parallel.pp, parallel.pp_group, parallel.pp_peers, row)
    return [value for row in rows for value in row]


def _along(size: int, group: dist.ProcessGroup | None, peers: Sequence[int], value: T) -> list[T]:
    if size == 1:
        return [value]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group=group)
    return [gathered[peer] for peer in peers]  # by position in the instance, not by rank


def _engine(
    config: Config,
    model_config: PretrainedConfig,
    parallel: GenParallel,
    device: torch.device,
    *,
    dtype: DType | None = None,
    **more: Any,
) -> ScoreEngine:
    """An engine whose rows, attention and layers are those of training."""
    return ScoreEngine(
        model_config,
        parallel,
        dtype=TORCH_DTYPES[dtype or config.model.compute_dtype],
        device=device,
        attention=config.model.attention,
        max_tokens_per_micro_batch=config.trainer.max_tokens_per_micro_batch,
        deterministic=config.strict,
        shares_prompts=config.trainer.shares_prompts,
        fused=config.trainer.fuses_layers_on(device.type),
        **more,
    )
