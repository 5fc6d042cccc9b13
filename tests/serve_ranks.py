"""Ranks at the seam of a server's loop: they compute nothing, and record what they are asked."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np

from hybridrl.config.serve import ServeConfig
from hybridrl.serving.history import ServerHistory
from hybridrl.serving.loop import Turns
from hybridrl.serving.requests import ClientAnswer, ClientRequest, Datum, ServedModel
from hybridrl.workers.serving import DrawnResponse, DrawnSample, ScoredTokens, TokenScores

IDS = np.arange(3, dtype=np.int32)
DATUM = Datum(IDS, IDS, {"weights": np.ones(3, np.float32)})

SERVED = ServedModel("tiny", "tiny", max_tokens=64, lora_rank=4, vocab=32, trained="adapters")


class FakeRanks:
    """`answers` has what a method of the ranks answers, or does; `draws` is off to keep samples."""

    instances = (None,)
    size = 1

    def __init__(self, **answers: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers = {"step_model": {"bad_step": 0.0}, "save_model": _saved, **answers}
        self.draws = True
        self._drawing: list[DrawnSample] = []

    def ask(self, method: Callable[..., Any], *args: Any) -> Any:
        self.asked.append((method.__name__, *args))
        answer = self.answers.get(method.__name__, "")
        return answer(*args) if callable(answer) else answer

    def add_gradient(self, call: Any, data: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        self.asked.append(("add_gradient", call.model, len(data)))
        return [1 + x.targets.astype(np.float32) for x in data], {"loss": 0.0}

    def draw(
        self, new: Mapping[int, Sequence[DrawnSample]], num_decode_steps: int
    ) -> list[DrawnResponse]:
        self._drawing += [sample for samples in new.values() for sample in samples]
        if not self.draws:
            return []
        done, self._drawing = self._drawing, []
        tokens, log_probs = np.ones(1, np.int32), np.zeros(1, np.float32)
        return [DrawnResponse(sample.id, tokens, log_probs, "stop") for sample in done]

    def score(self, wanted: Mapping[int, Sequence[ScoredTokens]]) -> dict[int, list[TokenScores]]:
        self.asked += [("score", one) for own in wanted.values() for one in own]
        return {i: [TokenScores()] * len(own) for i, own in wanted.items()}

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of the calls of a method."""
        return [args for method, *args in self.asked if method == name]  # type: ignore[misc]


def _saved(model: str, folder: str, state: bool) -> str:
    Path(folder).mkdir()
    return ""


def turns_of(
    ranks: FakeRanks,
    run_dir: Path,
    served: ServedModel = SERVED,
    *,
    telemetry: Any = None,
    now: Callable[[], float] = time.monotonic,
    **own: Any,
) -> Turns:
    """A server's loop over these ranks."""
    history = ServerHistory(telemetry or Mock(), 0)
    return Turns(ranks, served, run_dir, ServeConfig(**own), history, 32, now)  # type: ignore[arg-type]


def taken(turns: Turns, request: ClientRequest) -> "Future[ClientAnswer]":
    """The future of a request that waits."""
    future: Future[ClientAnswer] = Future()
    turns.take(request, future)
    return future


def answered(turns: Turns, request: ClientRequest) -> ClientAnswer:
    """The answer to a request, once there is no work left."""
    future = taken(turns, request)
    work_all(turns)
    return future.result(0)


def work_all(turns: Turns) -> None:
    """Work until there is none left, which is soon."""
    for _ in range(100):
        if not turns.work():
            return
    raise AssertionError("there is always work")
