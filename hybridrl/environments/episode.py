"""An episode in an environment's process: a program, and the driver's turns that it awaits."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from hybridrl.config import EnvironmentConfig
from hybridrl.config.surrogates import without_surrogates
from hybridrl.environments.program import Model, Program, TurnLimit
from hybridrl.environments.task import (
    ChatMessage,
    EpisodeStart,
    EpisodeStep,
    EpisodeTask,
    ModelTurn,
    PastTurn,
    as_before,
    failed,
)
from hybridrl.environments.time_limit import TimeLimit
from hybridrl.sandbox.worker import start_marked

CLOSE_S = 5.0
"""Seconds for a program that is no longer needed to come to its end."""
CHARACTERS_OF_TOKEN = 64
"""More than a token has: messages are cut to this times `max_reply_tokens` before they are sent."""

Serve = Callable[[Model], Awaitable[tuple[str, str]]]


class Episode:
    """A program that runs until it asks for a turn, and on with each turn that it is given.

    States: new, waits (for a turn), runs (within `start` or `step`), ended. At most one call of
    `start` and `step` is there at a time. `number` tells it from others of its process, above 0.
    """

    def __init__(
        self,
        number: int,
        program: Program,
        task: EpisodeTask,
        key: str,
        config: EnvironmentConfig,
        serve: Serve,
    ) -> None:
        """`key` is what its random numbers follow from: the run's seed and the sample.

        `serve` gives address and key for clients.
        """
        self.number, self.config = number, config
        self.limit = TimeLimit()
        self.model = Model(self._ask, config.max_turns, serve, self.limit.queued)
        self.model.on_limit = self._cancel
        self._program: Callable[[], Awaitable[float | None]] = lambda: program(
            task, self.model, Random(key)
        )
        self._task: asyncio.Task[float | None] | None = None
        self._asked: asyncio.Future[tuple[ChatMessage, ...]]
        self._turn: asyncio.Future[ModelTurn] | None = None
        self._asked_with: tuple[ChatMessage, ...] = ()
        self._kept: ModelTurn | None = None  # a turn that came when its client had hung up
        self._spent = 0.0

    async def start(
        self, past: Sequence[PastTurn] = (), opening: tuple[ChatMessage, ...] | None = None
    ) -> EpisodeStart:
        """Run to the first turn, and on through those of the `past`.

        With `opening`, the first messages have to be these, and the steps those that are known.
        """
        first = await self._advance(None)
        if first.failure is None and first.messages is None:
            first = failed("error", "the program has ended before the model's first turn")
        if first.failure is not None:
            return EpisodeStart((), (), first.failure, first.error)
        messages = first.messages or ()
        if opening is not None and messages != opening:
            error = f"the first messages differ between starts: {_difference(messages, opening)}"
            return EpisodeStart((), (), "replay", error)
        steps: list[EpisodeStep] = []
        for number, known in enumerate(past, 1):
            step = as_before(await self.step(known.turn), known.step, number)
            if step.failure is not None:
                return EpisodeStart((), (), step.failure, step.error)
            steps.append(step)
        return EpisodeStart(messages, tuple(steps), tools=self.model.tools)

    async def step(self, turn: ModelTurn) -> EpisodeStep:
        """Hand the program its turn, and run it to the next one or to its end."""
        return await self._advance(turn)

    async def close(self) -> None:
        """End the program, if it has not ended. May be called twice."""
        if self._task is not None and not self._task.done():
            self._cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)

    def _cancel(self) -> None:
        if self._task is not None and not self._task.cancelling():  # a second one would cut its
            self._task.cancel()  # cleaning up off

    # -- one step ------------------------------------------------------------------------------

    async def _advance(self, turn: ModelTurn | None) -> EpisodeStep:
        seconds = min(self.config.turn_timeout_s, self.config.episode_timeout_s - self._spent)
        reached = self.limit.begin(seconds)
        self._asked = asyncio.get_running_loop().create_future()
        if turn is None:
            self._task = start_marked(self.number, self._run())
        else:
            assert self._turn is not None
            if self._turn.done():
                self._kept = turn
            else:
                self._turn.set_result(turn)
            self._turn = None
        assert self._task is not None
        waited: list[asyncio.Future[Any]] = [self._asked, self._task, reached]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        self._spent += self.limit.end()
        if self._asked.done():
            return self._checked(EpisodeStep(self._asked.result(), tuple(self.model.rewards)))
        if self._task.done():
            return self._checked(self._outcome(self._task))
        self._cancel()  # `close` waits for it
        name = "turn" if seconds == self.config.turn_timeout_s else "episode"
        most = getattr(self.config, f"{name}_timeout_s")
        return failed("timeout", f"no answer within environment.{name}_timeout_s={most:g}")

    async def _run(self) -> float | None:
        return await self._program()

    async def _ask(self, messages: tuple[ChatMessage, ...]) -> ModelTurn:
        """Wait for the next turn; a client that had hung up may ask the same again."""
        if self._kept is not None:
            if messages != self._asked_with:
                raise RuntimeError("model.turn has other messages than those given up before")
            kept, self._kept = self._kept, None
            return kept
        again = self._turn is not None and self._turn.cancelled() and messages == self._asked_with
        if not again and (self._turn is not None or self._asked.done()):
            raise RuntimeError("model.turn is called while another call of it waits")
        self._turn = waits = asyncio.get_running_loop().create_future()
        if not again:
            self._asked_with = messages
            self._asked.set_result(self._cut(messages))
        try:
            return await waits
        except asyncio.CancelledError:
            if waits.done() and not waits.cancelled():  # it hangs up as the turn comes
                self._kept = waits.result()
            raise

    def _cut(self, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
        """Messages without what no reply has room for, but the first ones as they are."""
        if not self.model.turns:
            return messages
        longest = CHARACTERS_OF_TOKEN * self.config.max_reply_tokens
        return tuple({**m, "content": m["content"][:longest]} for m in messages)

    def _outcome(self, task: asyncio.Task[float | None]) -> EpisodeStep:
        """The last step: what its program has returned or raised."""
        finish = "length" if self.model.at_limit else "stop"
        scalars = dict(self.model.scalars)
        if self.model.rewritten:
            return failed("rewritten", self.model.rewritten)
        try:
            value = task.result()
            if value is not None:
                self.model.reward(value)
        except TurnLimit:
            finish = "length"
        except BaseExceptionGroup as group:  # of tasks that the program has started
            if group.split(TurnLimit)[1] is not None:
                return failed("error", group)
            finish = "length"
        except asyncio.CancelledError:
            if not self.model.at_limit:
                return failed("error", "the program has cancelled itself")
        except BaseException as error:  # SystemExit and KeyboardInterrupt are the user's as well
            return failed("error", error)
        rewards = tuple(self.model.rewards)
        return EpisodeStep(None, rewards, finish, scalars)  # type: ignore[arg-type]

    def _checked(self, step: EpisodeStep) -> EpisodeStep:
        """The step as the driver will have it, or a failure where it cannot be sent."""
        try:
            told, replaced = without_surrogates(json.loads(json.dumps(step.to_json())))
            self.model.replaced += replaced
            return EpisodeStep.from_json(told)
        except (TypeError, ValueError, RecursionError) as error:
            return failed("error", f"messages that JSON does not have: {error}")


def _difference(messages: Sequence[ChatMessage], others: Sequence[ChatMessage]) -> str:
    with contextlib.suppress(StopIteration):
        number = next(i for i, (a, b) in enumerate(zip(messages, others, strict=False)) if a != b)
        return f"{messages[number]['content']!r:.60}, before {others[number]['content']!r:.60}"
    return f"{len(messages)} of them, before {len(others)}"
