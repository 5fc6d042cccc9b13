"""A program that converses with any model, whatever it says: for whole runs."""

import asyncio
import os
import signal
from random import Random
from typing import Any

import aiohttp

from hybridrl.environments import ModelTurn

FAILS = 0.2
"""The share of episodes that fail, in the first answer and again when they are replayed."""


async def talk(
    task: Any,
    model: Any,
    rng: Random,
    fails: float = FAILS,
    turns: int = 3,
    ends: float = 0.0,
    sleep: float = 0.0,
    dies: float = 0.0,
) -> None:
    """Answers with two letters, as often as it is asked; each turn earns its distinct letters.

    It `ends` after a turn with that probability. Before each answer it sleeps, up to `sleep`
    seconds, otherwise at every start. Then its process `dies` with that probability, in every
    replay again.
    """
    reply = task.messages
    for number in range(turns):
        turn = await model.turn(reply)
        model.reward(len(set(turn.text)) / 10)
        model.note("reward", -1.0)  # no field of the sample, whatever its name
        model.note("num_turns", "many")
        if rng.random() < fails / turns:
            raise ValueError("nothing to say")
        if rng.random() < ends:
            return
        await asyncio.sleep(Random().uniform(0, sleep))
        if Random(f"{task.seed} {number}").random() < dies:
            os.kill(os.getpid(), signal.SIGKILL)
        reply = "".join(rng.choice("abc") for _ in range(2))


async def served(task: Any, model: Any, rng: Random) -> None:
    """As `talk`, whose turns come over OpenAI's API."""
    await talk(task, Client(model, *await model.endpoint()), rng)


class Client:
    """A model behind its endpoint: each turn is a request with the whole conversation."""

    def __init__(self, model: Any, address: str, key: str) -> None:
        self.reward, self.note = model.reward, model.note
        self.url, self.headers = f"{address}/chat/completions", {"Authorization": f"Bearer {key}"}
        self.messages: list[Any] = []

    async def turn(self, new: Any) -> Any:
        """The next turn, after these messages or the text of one."""
        self.messages += [{"role": "user", "content": new}] if isinstance(new, str) else new
        body = {"model": "policy", "messages": self.messages}
        async with (
            aiohttp.ClientSession(headers=self.headers) as session,
            session.post(self.url, json=body, raise_for_status=True) as response,
        ):
            message = (await response.json())["choices"][0]["message"]
        self.messages.append(message)
        return ModelTurn(message["content"])


async def mute(task: Any, model: Any, rng: Random) -> None:
    """Fails at every first turn."""
    await model.turn(task.messages)
    raise ValueError("nothing to say")
