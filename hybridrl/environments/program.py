"""Programs that answer a model, in the forms that users write, and what they see of the model."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

from hybridrl.environments.task import ChatMessage, EpisodeTask, ModelTurn

ROLES = ("system", "developer", "user", "tool")
"""Roles of what an environment writes; the model is the assistant."""
LARGEST_REWARD = (2 - 2**-23) * 2.0**127
"""The largest number of float32, in which ranks keep rewards: bounds those of an episode, summed
without their signs."""

Program = Callable[[EpisodeTask, "Model", Random], Awaitable[float | None]]
"""`await program(task, model, rng)` is an episode; a number that it returns is earned by the last
turn. `rng` is keyed by the sample's identity, so it is the same in every replay."""

Messages = str | ChatMessage | Sequence[ChatMessage]
"""Messages, or one, or the text of one of the user's."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A program, and the JSON schemas of the tools that it offers, for the chat template."""

    program: Program
    tools: tuple[dict[str, Any], ...] = ()


class TurnLimit(BaseException):
    """Ends a program that asks for more than `environment.max_turns`; no `Exception`, which a
    program may catch."""


class Model:
    """The model as a program sees it.

    >>> async def guess(task, model, rng):
    ...     number, reply = rng.randint(1, 9), "Guess a number from 1 to 9."
    ...     while (turn := await model.turn(reply)).text.strip() != str(number):
    ...         reply = "No."
    ...     return 1.0
    """

    def __init__(
        self,
        ask: Callable[[tuple[ChatMessage, ...]], Awaitable[ModelTurn]],
        max_turns: int,
        serve: "Callable[[Model], Awaitable[tuple[str, str]]]",
        queued: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._ask, self._max_turns, self._serve = ask, max_turns, serve
        self.queued = queued
        """`with model.queued():` the program waits for its place in a queue of many episodes: that
        counts for no limit of time. What it then does must have an end."""
        self.messages: list[ChatMessage] = []
        """The conversation so far, the model's turns too."""
        self.tools: tuple[dict[str, Any], ...] = ()
        """The tools that the first request of a client has named."""
        self.rewritten = ""
        """How a client has changed what was there before."""
        self.at_limit = False
        """Whether a client has asked for more turns than there are, or its program has ended so."""
        self.on_limit: Callable[[], None] = lambda: None
        self.turns: list[ModelTurn] = []
        """The turns made so far."""
        self.rewards: list[float] = []
        """What each of them has earned."""
        self.scalars: dict[str, float | int | str] = {}
        """Numbers and short texts that become scalars of the sample."""
        self.replaced = 0
        """Lone surrogates in what was said, each of which is a question mark."""
        self.close_error = ""
        """The error of an environment that could not be closed."""

    async def turn(self, messages: Messages) -> ModelTurn:
        """The model's next turn, after `messages`.

        Those of the first call are the whole prompt, and follow from the task alone. Later ones are
        what is new: the model has read all that was before.
        """
        if len(self.turns) == self._max_turns:
            raise TurnLimit
        new = as_messages(messages)
        turn = await self._ask(new)
        self.messages += [*new, {"role": "assistant", "content": turn.text}]
        self.turns.append(turn)
        self.rewards.append(0.0)
        return turn

    async def endpoint(self) -> tuple[str, str]:
        """Address and key for an OpenAI client, whose completions are the model's turns.

        The client waits on this event loop: an asynchronous one, or one in a thread.
        """
        return await self._serve(self)

    def rewrite(self, difference: str) -> None:
        """A client has changed what the model had read: the episode has failed."""
        self.rewritten = self.rewritten or difference

    def reach_limit(self) -> None:
        """A client has asked for a turn too many: the episode ends."""
        self.at_limit = True
        self.on_limit()

    def reward(self, value: float) -> None:
        """Add to what the last turn has earned."""
        if not self.turns:
            raise ValueError("a reward before the first turn")
        number = as_number(value)
        as_number(sum(map(abs, self.rewards)) + abs(number))  # whatever is summed, in any order
        self.rewards[-1] += number

    def note(self, name: str, value: float | int | str) -> None:
        """Record a number or a short text of the episode: the sample's scalar `note/NAME`."""
        if not isinstance(value, int | float | str):
            raise TypeError(f"{name} is {type(value).__name__}, wanted a number or a text")
        self.scalars[name] = value


def as_messages(value: Messages) -> tuple[ChatMessage, ...]:
    """Messages in one form; raises TypeError or ValueError that says what is wrong."""
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not value:
        raise TypeError(f"model.turn was given {type(value).__name__}, wanted messages or a text")
    return tuple(map(_checked, value))


def _checked(message: Any) -> ChatMessage:
    if not isinstance(message, Mapping) or message.get("role") not in (*ROLES, "assistant"):
        raise ValueError(f"model.turn was given {message!r:.80}, wanted a role of {ROLES}")
    content = message.get("content")
    if not isinstance(content, str | None):
        raise TypeError(f"a message's content is {type(content).__name__}, wanted a text")
    return {**message, "content": content or ""}


def as_number(value: Any) -> float:
    """A reward as a float that ranks can keep; raises TypeError or ValueError if it is none."""
    if not isinstance(value, int | float) and not hasattr(value, "__float__"):
        raise TypeError(f"the reward is {type(value).__name__}, wanted a number")
    number = float(value)
    if number - number != 0:
        raise ValueError(f"the reward is {number}, wanted a finite number")
    if abs(number) > LARGEST_REWARD:
        raise ValueError(f"the reward is {number:g}, wanted at most {LARGEST_REWARD:g} (float32)")
    return number


def of_class(make: Callable[[], Any]) -> Program:
    """The program of a class with `reset` and `step`, and `close` if it likes; sync or async.

    `reset(task, rng)` gives the first messages, `step(text)` the reply, a reward and whether the
    episode has ended.
    """

    async def program(task: EpisodeTask, model: Model, rng: Random) -> None:
        environment = make()
        try:
            messages = await result_of(environment.reset(task, rng))
            while True:
                turn = await model.turn(messages)
                messages, reward, done = await result_of(environment.step(turn.text))
                model.reward(reward)
                if done:
                    return
        finally:
            await closed(environment, model)

    return program


async def closed(environment: Any, model: Model) -> None:
    """Close what has `close`; an error of it is noted, and takes nothing from the episode."""
    try:
        if hasattr(environment, "close"):
            await result_of(environment.close())
    except Exception as error:
        model.close_error = f"{type(error).__name__}: {error}"


async def result_of(value: Any) -> Any:
    """A value, or what awaiting it gives."""
    return await value if inspect.isawaitable(value) else value
