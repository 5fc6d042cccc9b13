"""A pool of sandboxes for tests: a service that does what the word of its request says."""

import asyncio
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.sandbox import SandboxPool, SandboxProcess, SandboxTask, Service, Settings

LONG = "line\n" * 600_000
"""What the answer to `long` has besides: more than is read at a time."""


class WordService(Service):
    """Answers with its process and what else it was serving."""

    def __init__(self, answer: Any, word: str) -> None:
        super().__init__(answer)
        self.word = word
        self.words: list[str] = []

    async def open(self) -> list[Any]:
        if self.word == "refuse":
            raise ConfigError("sandbox.word", self.word, "another word")
        if self.word == "raise":
            raise RuntimeError("no such word")
        if self.word == "die":
            os._exit(7)
        return [self.word]

    async def say(self, number: int, word: str) -> None:
        self.words.append(word)
        if word == "die":
            os._exit(3)
        if word == "die in a thread":
            threading.Timer(0.05, os._exit, [3]).start()
            await asyncio.sleep(60)
        if word == "hang":
            time.sleep(60)
        if word == "spin":
            sum(range(10**12))  # holds the interpreter
        if word == "late":
            await asyncio.sleep(60)
        if word == "queued":
            for _ in range(4):
                await asyncio.sleep(1.0)
                self.answer(number)
        if word == "pause":
            await asyncio.sleep(0.2)
        if word == "garbage":
            self.answer(number, "more", "than", "one")
        if word == "noise":
            whole = json.dumps([number, [os.getpid(), self.words]])
            os.write(int(sys.argv[1]), f"{whole}\nnoise\n".encode())
            await asyncio.sleep(60)
        longer = [LONG] if word == "long" else []
        self.answer(number, [os.getpid(), self.words + longer])
        self.words.remove(word)

    async def close(self, running: Collection["asyncio.Task[None]"]) -> None:
        """Nothing is left."""


make = WordService


@dataclass(eq=False, slots=True, kw_only=True)
class Word(SandboxTask):
    word: Any


class WordPool(SandboxPool[Word]):
    """Its answers are `(pid, words)`, and `(kind, error)` of words that have failed."""

    def __init__(self, number: int = 1, word: str = "", seconds: float = 0.5, **more: Any) -> None:
        self.seconds = seconds
        settings = [Settings("sandboxed", (word,))] * number
        super().__init__(settings, "word", step_s=seconds, late="too late", **more)

    def say(self, word: Any) -> "Future[tuple[Any, Any]]":
        task = Word(word=word)
        self._do(functools.partial(self._queue.append, task), task.future)
        return task.future

    def all(self, *words: str) -> list[tuple[Any, Any]]:
        return [future.result(60) for future in [self.say(word) for word in words]]

    def _request(self, task: Word, process: SandboxProcess) -> tuple[str, tuple[Any, ...], float]:
        return "say", (task.word,), self.seconds

    def _read(self, task: Word, answer: list[Any]) -> tuple[int, list[str]]:
        ((pid, words),) = answer
        return pid, words

    def _answered(self, task: Word, answer: tuple[int, list[str]]) -> None:
        assert task.home is not None
        task.home.leave(task)
        task.settle(answer)

    def _failed(self, task: Word, kind: str, error: BaseException | str) -> None:
        task.settle((kind, str(error)))
