"""Runs the programs that the model writes, in a jail that stays open for an episode."""

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, TypeVar

from hybridrl.config import EnvironmentConfig, SourceConfig
from hybridrl.environments.arguments import read_params
from hybridrl.environments.program import Environment, Messages, Model
from hybridrl.environments.task import EpisodeTask
from hybridrl.sandbox import jail
from hybridrl.sandbox.jail import Jail, JailError, JailResult

DEFAULTS = {"empty": "The program has printed nothing."}
NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Programs that run at a time. Few: their limits are seconds, which many would not keep to."""
Result = TypeVar("Result")
_BLOCK = re.compile(r"^```(?:python3?|py)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python(config: EnvironmentConfig, sources: Mapping[str, SourceConfig]) -> Environment:
    """kind=python: the last fenced block of Python in a turn is run, and what it prints is told.

    A turn without one ends the episode. Files in /tmp stay for the episode, variables do not. The
    jail is that of `reward.jail`, with `reward.limits`.
    """
    params = read_params(config, DEFAULTS)
    jail.configured()  # raises where none works
    threads = _Threads()

    async def program(task: EpisodeTask, model: Model, rng: Random) -> None:
        opening: asyncio.Future[Jail] | None = None
        reply: Messages = task.messages
        try:
            while True:
                turn = await model.turn(reply)
                blocks = _BLOCK.findall(turn.text)
                if not blocks:
                    return
                if opening is None:
                    opening = asyncio.ensure_future(threads.run(model, Jail, ""))
                opened = await asyncio.shield(opening)
                text = told(await threads.run(model, opened.run_program, blocks[-1]))
                reply = text or params["empty"]
        finally:
            if opening is not None:
                with contextlib.suppress(JailError):
                    await threads.run(model, (await opening).close)

    return Environment(program)


class _Threads:
    """Threads for jobs, each of which ends within the limits of the jail.

    So a long queue is no fault of who waits in it.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "jail")

    async def run(self, model: Model, job: Callable[..., Result], *arguments: Any) -> Result:
        """What `job` gives; the time until it has a thread does not count for the episode."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def work() -> Result:
            loop.call_soon_threadsafe(begun.set)
            return job(*arguments)

        working = loop.run_in_executor(self._executor, work)
        try:
            with model.queued():
                await begun.wait()
            return await working
        except asyncio.CancelledError:
            working.cancel()  # it leaves the queue
            raise


def told(result: JailResult) -> str:
    """What the model is told of a run: what it printed, and the line that names its error."""
    text = result.stdout
    if result.status == "error":
        text += _error_line(result.stderr)
    if result.status in ("timeout", "output"):
        limit = {"timeout": "took too long", "output": "printed too much"}[result.status]
        return f"the program {limit} and was ended\n{text}"
    return text


def _error_line(stderr: str) -> str:
    """The last line that is no frame of a traceback: several processes may have written theirs."""
    lines = stderr.strip().splitlines()
    named = [line for line in lines if line[:1].strip() and not line.startswith("Traceback ")]
    return (named or lines or ["the program has ended with an error"])[-1]
