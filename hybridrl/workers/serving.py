"""One rank of a server of training: clients' models in turn, and samples of their snapshots."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.checkpoint import distributed
from hybridrl.checkpoint.distributed import Progress
from hybridrl.checkpoint.hf import save_hf
from hybridrl.config.loss import Loss
from hybridrl.costs.memory import PoolSizes
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.score.engine import ScoreEngine
from hybridrl.engines.train.client_models import ClientModels, error_of_any
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.optimizer_steps import AdamWSettings
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.answers import RankDescription
from hybridrl.workers.base_worker import Reply
from hybridrl.workers.colocated import WeightSnapshot
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.sampling import text_stops

Floats = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int32]


class TargetSequence(Protocol):
    """Input tokens [N], their targets [N] or [N, K], and floats by name in the targets' shape."""

    @property
    def tokens(self) -> TokenIds: ...
    @property
    def targets(self) -> TokenIds: ...
    @property
    def inputs(self) -> dict[str, Floats]: ...


class DrawSettings(Protocol):
    """How tokens are drawn; `eos`: the model's own end tokens end a response, too."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def stop_tokens(self) -> tuple[int, ...]: ...
    @property
    def stop_texts(self) -> tuple[str, ...]: ...
    @property
    def eos(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class GradientCall:
    """A loss over data, of which each rank has a share, and with `backward` its gradient.

    The loss's candidates are the targets, where they are not the next input tokens. `model` is the
    name of a client's model, or without `backward` the version of a snapshot.
    """

    model: str | int
    loss: Loss[torch.Tensor]
    backward: bool


@dataclass(frozen=True, slots=True)
class DrawnSample:
    """A response to draw: `id` names it on its instance, `stream` is the key of its draws.

    Samples of one `prefix` have one prompt; None is of no other's.
    """

    id: tuple[int, int]
    prompt: TokenIds
    max_tokens: int
    settings: DrawSettings
    stream: tuple[int, str, int]
    prefix: int | None


@dataclass(frozen=True, slots=True)
class DrawnResponse:
    """A response that has ended: tokens and log-probabilities [n]; `finish` is stop or length."""

    id: tuple[int, int]
    tokens: TokenIds
    log_probs: Floats
    finish: str


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """What is wanted of a sequence [N] whose last `positions` tokens are scored.

    Their log-probabilities, those of the `top` likeliest tokens there, and of `named` tokens
    [positions, K]; all after `temperature`.
    """

    tokens: TokenIds
    positions: int
    log_probs: bool = True
    top: int = 0
    named: TokenIds | None = None
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The scores of `ScoredTokens`: [positions], and [positions, top] or [positions, K]."""

    log_probs: Floats | None = None
    top_tokens: TokenIds | None = None
    top_log_probs: Floats | None = None
    named: Floats | None = None


class ServingWorker(ActorWorker):
    """A rank whose models are those of clients.

    In TRAIN one of the clients' models is in the train engine (`ClientModels`). In GENERATE the
    rollout engine has one of the snapshots; samples of others are parked here. Snapshots are made
    in TRAIN and live here until they are dropped.
    """

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int, sizes: PoolSizes | None = None) -> Reply[RankDescription]:
        """Join the process group, whose first rank listens on `port` of `host`; load the base."""
        reply = super().setup(host, port, sizes)
        engine = self.trainer.train_engine
        self.models = ClientModels(engine, self.model_path, self.config.run.seed)
        self.snapshots: dict[int, WeightSnapshot] = {}  # by version
        self._parked: dict[int, list[Request]] = {}  # likewise
        self._stops_of = lru_cache(maxsize=64)(partial(text_stops, self.tokenizer))
        return reply

    # -- models, in TRAIN ----------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def create_model(self, name: str, seed: int | None) -> Reply[None]:
        """Make a client's model, of the base's weights or of adapters that `seed` draws."""
        with self._training("create"):
            self.models.create(name, seed)
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def drop_model(self, name: str) -> Reply[None]:
        """Forget a client's model; its snapshots stay."""
        with self._span("drop"):
            self.models.drop(name)
        return self._reply(None)

    @dispatch(Dispatch.PER_RANK)
    def add_gradient(
        self, call: GradientCall, data: tuple[TargetSequence, ...]
    ) -> Reply[tuple[list[Floats], dict[str, float]]]:
        """Compute a loss on this rank's `data`, and add its gradient to the model's.

        Answers with the log-probabilities of its targets, in their shapes, and metrics that are
        the same on all ranks.
        """
        with self._training("gradient", number=len(data)), self._holding(call.model):
            self.trainer.train_engine.temperature = 1.0
            sequences = [train_sequence(datum, call.loss) for datum in data]
            scored, metrics = self.trainer.train_engine.accumulate_gradient(
                sequences, call.loss, call.backward
            )
        columns = scored if call.loss.candidates is None else [x[:, 1:] for x in scored]
        pairs = zip(columns, data, strict=True)
        return self._reply(([_shaped(x, datum.targets) for x, datum in pairs], metrics))

    @dispatch(Dispatch.SAME)
    def step_model(self, name: str, settings: AdamWSettings) -> Reply[dict[str, float]]:
        """One optimizer step of a model with the gradient so far; its metrics."""
        with self._training("step", name):
            return self._reply(self.trainer.train_engine.step(settings))

    @dispatch(Dispatch.SAME)
    def save_model(self, name: str, folder: str, state: bool) -> Reply[str]:
        """Write a model as a Hugging Face directory, and with `state` what training resumes from.

        Answers with the error, if any; the first rank knows of every one.
        """
        engine, dtype = self.trainer.train_engine, self.config.model.compute_dtype
        ends = self.trainer.end_ids
        with self._training("save", name):
            try:
                missing = save_hf(engine, Path(folder), self.tokenizer, dtype, ends)
                if state:
                    distributed.save(Path(folder) / STATE, engine, {})
            except OSError as error:  # on all ranks, whichever it befell
                return self._reply(str(error))
        return self._reply("; ".join(missing))

    @dispatch(Dispatch.SAME)
    def load_model(self, name: str, folder: str, progress: Progress | None) -> Reply[str]:
        """Take a saved model's weights, and with `progress` its optimizer's state.

        Answers with the error, if any: then the model is as it was, but for its gradient, which is
        gone either way.
        """
        state = Path(folder) / STATE

        def read() -> None:
            if progress is not None or state.is_dir():
                there = progress or Progress(0, 0)
                distributed.load(state, self.trainer.train_engine, there, {})
            else:
                self.models.read(Path(folder))
            if progress is None:
                self.models.forget_optimizer()

        with self._training("load", name):
            return self._reply(self.models.replace(read))

    # -- snapshots, in TRAIN -------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def take_snapshot(self, version: int, model: str) -> Reply[None]:
        """Keep the present weights of a model under a new `version`."""
        with self._training("snapshot", model):
            self.snapshots[version] = WeightSnapshot(version, self.models.snapshot())
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def read_snapshot(self, version: int, folder: str | None) -> Reply[str]:
        """Keep the weights in a model's `folder` under a new `version`; None: those of the base.

        Answers with the error, if any: then no rank keeps them.
        """

        def read() -> None:
            shards = self.models.base() if folder is None else self.models.stored(Path(folder))
            self.snapshots[version] = WeightSnapshot(version, shards)

        with self._training("snapshot"):
            error = error_of_any(read)
        if error:
            self.snapshots.pop(version, None)
        return self._reply(error)

    @dispatch(Dispatch.SAME)
    def drop_snapshot(self, version: int) -> Reply[None]:
        """Forget a snapshot of which no sample is wanted any more."""
        del self.snapshots[version]
        return self._reply(None)

    # -- phases --------------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def generate_with(self, version: int) -> Reply[None]:
        """Enter GENERATE with the weights of a snapshot, and go on with its parked samples."""
        with self._span("switch"):
            self._park()
            self.actor.enter_generation(self.snapshots[version])
            self.generator.engine.submit(self._parked.pop(version, []))
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def train(self) -> Reply[None]:
        """Enter TRAIN; samples that have not ended are parked."""
        with self._span("to_train"):
            self._park()
            self.actor.enter_training()
        return self._reply(None)

    def _park(self) -> None:
        """Take all unfinished samples out of the rollout engine.

        Their KV caches come with them, or are computed again where the engine gives none.
        """
        engine, with_kv = self.generator.engine, self.config.rollout.features.exports_kv
        ids = [request.id for request in engine.copy()]
        if ids:
            self._parked[self.generator.version] = engine.park(ids, with_kv=with_kv)

    # -- samples, in GENERATE ------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def draw(
        self, samples: tuple[DrawnSample, ...], num_decode_steps: int
    ) -> Reply[list[DrawnResponse]]:
        """Begin samples and decode all that are here, for a bounded number of steps.

        All ranks of an instance have the same ones; answers with those that have ended.
        """
        self._before_decoding()
        with self._span("generate", len(samples)):
            outputs = self.generator.decode([self._request(x) for x in samples], num_decode_steps)
        return self._reply([_drawn(output) for output in outputs])

    @dispatch(Dispatch.SAME)
    def drop_samples(self, requests: frozenset[int]) -> Reply[None]:
        """Forget the samples of these requests, by the first number of their ids: in any phase.

        One whose last token has just been drawn is answered nevertheless, by the next `draw`.
        """
        engine = self.generator.engine
        with self._span("drop"):
            engine.park([one.id for one in engine.copy() if _request_of(one) in requests])
            for version, parked in list(self._parked.items()):
                kept = [one for one in parked if _request_of(one) not in requests]
                self._parked[version] = kept
                if not kept:
                    del self._parked[version]
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def score_tokens(self, wanted: tuple[ScoredTokens, ...]) -> Reply[list[TokenScores]]:
        """Score sequences with the snapshot that generates; all ranks of an instance call it."""
        scorer = self.scorers["actor"]
        with self._span("score", len(wanted)):
            self.residency.release_idle_cache()
            self.residency.activate(scorer)
            return self._reply([_scores(scorer.engine, one) for one in wanted])

    def _request(self, sample: DrawnSample) -> Request:
        """What the rollout engine takes of a sample."""
        settings = sample.settings
        ends = set(self.generator.sampling.all_end_ids) if settings.eos else set()
        params = SamplingParams(
            max_new_tokens=sample.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_token_ids=tuple(sorted(ends | {*settings.stop_tokens})),
        )
        return Request(
            id=sample.id,
            prompt_ids=sample.prompt.tolist(),
            sampling=params,
            stream=stream_key(self.config.run.seed, *sample.stream),
            prefix=sample.prefix,
            stops=self._stops_of(settings.stop_texts) if settings.stop_texts else None,
        )

    @contextmanager
    def _holding(self, model: str | int) -> Iterator[None]:
        """Within, the train engine has a client's model, or the weights of a snapshot."""
        if isinstance(model, str):
            self.models.use(model)
            yield
            return
        with self.models.holding(self.snapshots[model].shards):
            yield

    def _training(self, what: str, model: str | None = None, number: int | None = None) -> Any:
        """Within, the train engine is on the device, with a client's model."""
        self.residency.activate(self.trainer.train_engine)
        if model is not None:
            self.models.use(model)
        return self._span(what, number)


STATE = "state"
"""The folder, in a model's, with what training resumes from."""


def train_sequence(datum: TargetSequence, loss: Loss[torch.Tensor]) -> TrainSequence:
    """A datum [N] as N response tokens behind its first input token.

    With candidates its targets are a field, filled up with token 0, and the last token of the
    sequence is arbitrary: nothing reads it.
    """
    tokens, targets = (torch.tensor(x).long() for x in (datum.tokens, datum.targets))
    inputs = [name for name in loss.fields if name != loss.candidates]
    fields: dict[str, torch.Tensor | float] = {}
    for name in inputs:
        value = torch.tensor(datum.inputs[name])  # copied: bodies of requests are read-only
        fields[name] = _filled(value, loss.num_candidates) if loss.candidates else value
    if loss.candidates is not None:
        fields[loss.candidates] = _filled(targets, loss.num_candidates)
    last = targets.reshape(len(targets), -1)[-1:, 0]
    return TrainSequence(torch.cat([tokens, last]), len(tokens), fields)


def _filled(values: torch.Tensor, num_targets: int) -> torch.Tensor:
    """Values [N] or [N, K] as [N, num_targets], with zeros behind them."""
    whole = values.new_zeros(len(values), num_targets)
    columns = values.reshape(len(values), -1)
    whole[:, : columns.shape[1]] = columns
    return whole


def _shaped(log_probs: torch.Tensor, targets: TokenIds) -> Floats:
    """Log-probabilities [N] or [N, num_targets] in the shape of a datum's targets."""
    width = 1 if targets.ndim == 1 else targets.shape[1]
    columns = log_probs.float().reshape(len(targets), -1)[:, :width]
    return columns.reshape(targets.shape).numpy()


def _request_of(sample: Request) -> int:
    """The number of the client's request that a `DrawnSample` belongs to."""
    return cast(tuple[int, int], sample.id)[0]


def _drawn(output: Output) -> DrawnResponse:
    tokens = np.array(output.token_ids, np.int32)
    return DrawnResponse(output.id, tokens, np.array(output.log_probs, np.float32), output.finish)  # type: ignore[arg-type]


def _scores(engine: ScoreEngine, wanted: ScoredTokens) -> TokenScores:
    """What the scoring engine says of a sequence, in as many passes as kinds are wanted."""
    sequence = TrainSequence(torch.tensor(wanted.tokens).long(), wanted.positions)
    engine.temperature = wanted.temperature
    scores: dict[str, Any] = {}
    if wanted.log_probs:
        (log_probs,) = engine.log_probs([sequence])
        scores["log_probs"] = log_probs.float().numpy()
    if wanted.top:
        ((ids, top),) = engine.top_log_probs([sequence], wanted.top)
        scores |= {"top_tokens": ids.int().numpy(), "top_log_probs": top.float().numpy()}
    if wanted.named is not None:
        sequence.fields[NAMED] = torch.tensor(wanted.named).long()
        (named,) = engine.named_log_probs([sequence], NAMED)
        scores["named"] = named.float().numpy()
    return TokenScores(**scores)


NAMED = "named_tokens"
