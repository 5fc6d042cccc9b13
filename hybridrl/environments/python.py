"""Runs the programs that the model writes, in a jail that stays open for an episode."""

import asyncio
import contextlib
import functools
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random

from hybridrl.config import EnvironmentConfig, SourceConfig
from hybridrl.environments.arguments import read_params
from hybridrl.environments.program import Environment, Messages, Model
from hybridrl.environments.task import EpisodeTask
from hybridrl.rewards import jail
from hybridrl.rewards.jail import Jail, JailError, JailResult

DEFAULTS = {"empty": "The program has printed nothing."}
_BLOCK = re.compile(r"^```(?:python3?|py)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python(config: EnvironmentConfig, sources: Mapping[str, SourceConfig]) -> Environment:
    """kind=python: the last fenced block of Python in a turn is run, and what it prints is told.

    A turn without one ends the episode. Files in /tmp stay for the episode, variables do not. The
    jail is that of `reward.jail`, with `reward.limits`.
    """
    params = read_params(config, DEFAULTS)
    jail.configured()  # raises where none works
    # Few at a time: a program's limits are seconds, which many would not keep to on few cores.
    threads = ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4), "jail")

    async def program(task: EpisodeTask, model: Model, rng: Random) -> None:
        in_thread = functools.partial(asyncio.get_running_loop().run_in_executor, threads)
        opening: asyncio.Future[Jail] | None = None
        reply: Messages = task.messages
        try:
            while True:
                turn = await model.turn(reply)
                blocks = _BLOCK.findall(turn.text)
                if not blocks:
                    return
                if opening is None:
                    opening = in_thread(Jail, "")
                opened = await asyncio.shield(opening)
                run = functools.partial(opened.run_program, blocks[-1])
                text = told(await in_thread(run))
                reply = text or params["empty"]
        finally:
            if opening is not None:
                with contextlib.suppress(JailError):
                    await in_thread((await opening).close)

    return Environment(program)


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
