"""A server's loop without HTTP: what a client asks, step by step."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridrl.config import Config
from hybridrl.serving.loop import ServeLoop
from hybridrl.serving.requests import (
    CheckpointPath,
    ClientAnswer,
    ClientRequest,
    CreateModel,
    Datum,
    ForwardBackward,
    LossOutputs,
    OptimStep,
    SampleRequest,
    Samples,
    SampleSettings,
    Save,
    Saved,
    Stepped,
    Unload,
)

ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip": 1.0}


@dataclass
class Client:
    """A client with one model, which asks one thing after the other, or several at once."""

    loop: ServeLoop
    model: str = "one:train:0"
    number: int = 0
    requests: int = 0

    def ask(self, *requests: ClientRequest) -> list[ClientAnswer]:
        """Submit requests together; their answers."""

        async def all_of_them() -> list[ClientAnswer]:
            return await asyncio.gather(*(self.loop.submit(request) for request in requests))

        return asyncio.run(all_of_them())

    def create(self, **settings: object) -> None:
        """Make the model."""
        self.ask(CreateModel(self.model, **settings))  # type: ignore[arg-type]

    def gradient(
        self, data: Sequence[Datum], loss: str, *, backward: bool = True, **settings: float
    ) -> LossOutputs:
        """A loss over data."""
        (outputs,) = self.ask(ForwardBackward(self.model, tuple(data), loss, settings, backward))
        assert isinstance(outputs, LossOutputs)
        return outputs

    def step(self, **settings: float) -> dict[str, float]:
        """An optimizer step; its metrics."""
        (stepped,) = self.ask(OptimStep(self.model, **{**ADAM, **settings}))
        assert isinstance(stepped, Stepped)
        return stepped.metrics

    def step_of(self, data: Sequence[Datum], loss: str = "cross_entropy") -> float:
        """A gradient and a step, asked for together; `grad_norm`."""
        gradient = ForwardBackward(self.model, tuple(data), loss, {}, True)
        _, stepped = self.ask(gradient, OptimStep(self.model, **ADAM))
        assert isinstance(stepped, Stepped)
        return stepped.metrics["grad_norm"]

    def save(self, name: str, kind: str = "sampler_weights", files: bool = False) -> str:
        """The path of a checkpoint, or of a snapshot in memory."""
        (saved,) = self.ask(Save(self.model, name, kind, files=files))  # type: ignore[arg-type]
        assert isinstance(saved, Saved)
        return saved.path

    def request(
        self, weights: str | None, prompt: Sequence[int], count: int = 1, **more: object
    ) -> SampleRequest:
        """A request for samples, with the client's next number."""
        own = {"prompt_logprobs", "topk_prompt_logprobs", "topk_logprobs", "named"} & more.keys()
        settings = SampleSettings(**{k: v for k, v in more.items() if k not in own})  # type: ignore[arg-type]
        self.requests += 1
        key, session = (self.number, self.requests), self.model.partition(":")[0]
        rest = {name: more[name] for name in own}
        return SampleRequest(weights, ids(prompt), count, settings, key, session, **rest)  # type: ignore[arg-type]

    def sample(
        self, weights: str | None, prompt: Sequence[int], count: int = 1, **more: object
    ) -> Samples:
        """Samples of a snapshot."""
        (samples,) = self.ask(self.request(weights, prompt, count, **more))
        assert isinstance(samples, Samples)
        return samples

    def unload(self) -> None:
        """End the model."""
        self.ask(Unload(self.model))


@contextmanager
def serving(config: Config) -> Iterator[ServeLoop]:
    """A loop with its ranks up. The log of a rank in this process ends with it."""
    logger = logging.getLogger("hybridrl")
    before = logger.propagate, logger.level
    loop = ServeLoop.start(config)
    try:
        yield loop
    finally:
        asyncio.run(loop.close())
        logger.handlers.clear()
        logger.propagate, level = before
        logger.setLevel(level)


def ids(values: Sequence[int]) -> np.ndarray:
    """Token ids as a request has them."""
    return np.array(values, np.int32)


def floats(values: Sequence[float]) -> np.ndarray:
    """Floats as a request has them."""
    return np.array(values, np.float32)


def shifted(tokens: Sequence[int], **inputs: Sequence[float]) -> Datum:
    """A datum of a whole sequence, whose inputs are those of the positions behind the first."""
    own = {name: floats(values) for name, values in inputs.items()}
    return Datum(ids(tokens[:-1]), ids(tokens[1:]), own)


def folder_of(loop: ServeLoop, path: str) -> Path:
    """The directory of a checkpoint."""
    parts = CheckpointPath.parse(path)
    root = loop.run_dir / "models"
    return root / parts.model / parts.kind / parts.name
