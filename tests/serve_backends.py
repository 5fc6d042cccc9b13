"""A backend at the seam of `hybridrl serve`: it runs nothing, and records what it is asked."""

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from hybridrl.serving.requests import (
    Checkpoint,
    CheckpointPath,
    ClientAnswer,
    ClientRequest,
    Completed,
    CreateModel,
    Delete,
    DropSamples,
    Expire,
    ForwardBackward,
    LikeliestTokens,
    LoadModel,
    LossOutputs,
    OptimStep,
    Refused,
    SampledResponse,
    SampleRequest,
    Samples,
    Save,
    Saved,
    ServedModel,
    ServerFailed,
    Stepped,
    Unload,
)

INFO = ServedModel("tiny/model", "tiny/model", max_tokens=64, lora_rank=8, vocab=32)


def score(tokens: np.ndarray) -> np.ndarray:
    """The "log-probability" of tokens here: -token / 100."""
    return (-tokens / 100).astype(np.float32)


@dataclass
class FakeBackend:
    """Answers by formulas of tokens. `gate` holds samples back while it is clear.

    `metrics` are those of a step, beside its learning rate.

    A loss `wrong` is refused, a loss `broken` kills the server, a loss `bug` is one of ours.
    """

    info: ServedModel = INFO
    asked: list[ClientRequest] = field(default_factory=list)
    files: dict[str, Checkpoint] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    metrics: dict[str, float] = field(default_factory=dict)
    closed: bool = False
    failure: "Future[str]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    async def submit(self, request: ClientRequest) -> ClientAnswer:
        self.asked.append(request)  # before the first wait: the order of the calls
        await asyncio.sleep(0)
        match request:
            case CreateModel():
                if request.source is not None and request.source not in self.files:
                    raise Refused(f"{request.source}: no checkpoint of that name")
                self.models.add(request.model)
                return Completed()
            case ForwardBackward():
                return self._outputs(request)
            case OptimStep():
                return Stepped({"lr": request.lr, **self.metrics})
            case Save():
                return self._save(request)
            case LoadModel(path=path):
                if path not in self.files:
                    raise Refused(f"{path}: no checkpoint of that name")
                return Completed()
            case Unload():
                self.models.discard(request.model)
                return Completed()
            case DropSamples():
                return Completed()
            case SampleRequest():
                await self.gate.wait()
                return self._samples(request)
            case Delete(path=path):
                if self.files.pop(path, None) is None:
                    raise Refused(f"{path}: no checkpoint of that name")
                return Completed()
            case Expire(path=path, ttl_s=ttl_s):
                expires = None if ttl_s is None else time.time() + ttl_s
                self.files[path] = replace(self.files[path], expires=expires)
                return Completed()

    def listed(self, model: str | None = None) -> tuple[Checkpoint, ...]:
        return tuple(
            file
            for path, file in self.files.items()
            if model is None or CheckpointPath.parse(path).model == model
        )

    async def close(self) -> None:
        self.closed = True

    def of_model(self, *kinds: type) -> list[ClientRequest]:
        """The requests of these kinds, in the order of their arrival."""
        return [request for request in self.asked if isinstance(request, kinds)]

    def _outputs(self, request: ForwardBackward) -> LossOutputs:
        if request.loss == "wrong":
            raise Refused("loss_fn=wrong: wanted cross_entropy")
        if request.loss == "broken":
            raise ServerFailed("rank 1 (actor) has died; its log is rank1.log")
        if request.loss == "bug":
            raise ZeroDivisionError("of the server")
        outputs = [score(datum.targets) for datum in request.data]
        total = sum(
            float(-(logprobs * datum.inputs.get("weights", 0)).sum())
            for logprobs, datum in zip(outputs, request.data, strict=True)
        )
        return LossOutputs(outputs, {"loss:sum": total})

    def _save(self, request: Save) -> Saved:
        path = str(CheckpointPath(request.model, request.kind, request.name))
        if path in self.files and not request.overwrite:
            raise Refused(f"{path}: there is one of that name; overwrite=True replaces it")
        if request.files:
            now = time.time()
            expires = None if request.ttl_s is None else now + request.ttl_s
            self.files[path] = Checkpoint(path, self.info.lora_rank, 1234, now, expires)
        return Saved(path)

    def _samples(self, request: SampleRequest) -> Samples:
        length = min(request.settings.max_tokens or 4, 4)
        tokens = np.asarray([(sum(request.key) + i) % self.info.vocab for i in range(length)])
        likeliest = LikeliestTokens(
            np.tile(np.arange(request.topk_logprobs, dtype=np.int32), (length, 1)),
            np.full((length, request.topk_logprobs), -0.5, np.float32),
        )
        sequence = SampledResponse(
            tokens.astype(np.int32),
            score(tokens),
            "length",
            likeliest if request.topk_logprobs else None,
        )
        scores, named, topk = score(request.prompt), None, None
        scores[0] = np.nan
        if request.named is not None:
            named = np.where(request.named < 0, 0, score(request.named)).astype(np.float32)
        if k := request.topk_prompt_logprobs:
            ids = np.tile(np.arange(k, dtype=np.int32), (len(request.prompt), 1))
            topk = LikeliestTokens(ids, score(ids))
            topk.tokens[0], topk.logprobs[0] = 0, -99999.0
        return Samples(
            (sequence,) * request.count, scores if request.prompt_logprobs else None, topk, named
        )
