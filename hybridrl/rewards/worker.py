"""The judge inside a sandbox. It imports neither torch nor ray."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config import JailKind, JudgeConfig, RewardCall, RewardKind, SourceConfig
from hybridrl.rewards.functions import answer_of, is_async, user_function
from hybridrl.rewards.results import (
    BUDGET_SPENT,
    TIMEOUT,
    BudgetSpent,
    EndpointError,
    EndpointTimeout,
    JudgeAnswer,
    RewardInput,
    failure,
)
from hybridrl.rewards.verifiers import make_selector, make_verifier
from hybridrl.sandbox import Service, jail
from hybridrl.sandbox.cpu_limit import TimeLimitReached, cpu_limit

if TYPE_CHECKING:
    from hybridrl.rewards.endpoint import Endpoint

Unit = Sequence[RewardInput]
JudgeUnit = Callable[[Unit], Awaitable[list[JudgeAnswer]]]


class JudgeService(Service):
    """Judges units: responses that one call is about."""

    def __init__(
        self,
        answer: Callable[..., None],
        config: JudgeConfig,
        sources: Mapping[str, SourceConfig],
        replies: str | None,
    ) -> None:
        super().__init__(answer)
        self.config, self.sources, self.replies = config, sources, replies
        self._endpoint: Endpoint | None = None
        self._told: dict[str, int] = {}

    async def open(self) -> list[Any]:
        """Build the judge; what confines programs, and whether it waits."""
        config, itself_waits = self.config, waits(self.config)
        # An endpoint's code is not foreign, and its process has requests that others would lose.
        self.marks_requests = not config.kind.asks
        if config.kind.asks:
            # aiohttp takes longer to import than all the rest, which every verifier does.
            from hybridrl.rewards.endpoint import Endpoint

            self._endpoint = Endpoint(config, Path(self.replies) if self.replies else None)
            self._judge = endpoint_judge(config, self._endpoint)
            if self.replies == "":
                await self._endpoint.probe()
        elif config.kind is RewardKind.function:
            self._judge = function_judge(config)
        else:
            self._judge = computing_judge(config, self.sources)
        return [jail_of(config), itself_waits]

    async def judge(self, number: int, unit: Unit) -> None:
        """Answer with `[answers, counts]`, counts since the last answer."""
        answers = await answered(self._judge, unit, self.config.timeout_s)
        told, self._told = self._told, dict(self._endpoint.counts) if self._endpoint else {}
        fresh = {name: count - told.get(name, 0) for name, count in self._told.items()}
        self.answer(number, answers, fresh)

    async def close(self, running: Collection["asyncio.Task[None]"]) -> None:
        """As the base class."""
        if self._endpoint is not None:
            await self._endpoint.close()


make = JudgeService


def computing_judge(config: JudgeConfig, sources: Mapping[str, SourceConfig]) -> JudgeUnit:
    """Judges responses one by one, in the only thread; the owner kills what takes too long."""
    verify = make_verifier(config, sources)

    async def judge(unit: Unit) -> list[JudgeAnswer]:
        return [[reward, None, text] for reward, text in map(verify, unit)]

    return judge


def function_judge(config: JudgeConfig) -> JudgeUnit:
    """Judges by a user's function; one that waits does so within `timeout_s`."""
    function, select = user_function(config), make_selector(config)
    call = function.function
    if config.waits and not is_async(call):
        call = in_thread(call)

    async def judge(unit: Unit) -> list[JudgeAnswer]:
        with cpu_limit(config.timeout_s):  # `extract` holds all others up
            texts = [select(item.response) for item in unit]
        if config.call is RewardCall.sample and texts == [None]:
            return [answer_of(0.0, None)]
        arguments = function.arguments(unit, [text or "" for text in texts])
        try:
            async with asyncio.timeout(config.timeout_s) as limit:
                returned = call(**arguments)
                if inspect.isawaitable(returned):
                    returned = await returned
        except TimeoutError as error:
            if limit.expired():
                raise TimeLimitReached from error
            raise  # the function's own
        return function.answers(returned, texts)

    return judge


def endpoint_judge(config: JudgeConfig, endpoint: "Endpoint") -> JudgeUnit:
    """Judges by an endpoint; a unit is one response, or those to one prompt."""
    select = make_selector(config)

    async def judge(unit: Unit) -> list[JudgeAnswer]:
        with cpu_limit(config.timeout_s):  # `extract` holds all others up
            texts = [select(item.response) for item in unit]
        if all(text is None for text in texts):
            return [answer_of(0.0, text) for text in texts]
        scores = await endpoint.scores(unit, texts)
        return [answer_of(score, text) for score, text in zip(scores, texts, strict=True)]

    return judge


def in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """`function`, each call in a thread, of which one that hangs takes no other's place."""

    def outcome(arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
        try:
            return function(**arguments), None
        except BaseException as error:  # a future takes no StopIteration, and SystemExit ends loops
            return None, error

    async def call(**arguments: Any) -> Any:
        value, error = await asyncio.to_thread(outcome, arguments)
        if error is not None:
            raise error
        return value

    return call


async def answered(judge: JudgeUnit, unit: Unit, timeout_s: float) -> list[Any]:
    """The answers to a unit, or `[BUDGET_SPENT, message]`."""
    try:
        return await judge(unit)
    except BudgetSpent as error:
        return [BUDGET_SPENT, str(error)]
    except EndpointTimeout as error:
        answer = failure(f"{TIMEOUT}{error}")
    except EndpointError as error:
        answer = failure(str(error))
    except TimeLimitReached:
        answer = failure(f"{TIMEOUT}no reward within {timeout_s} s")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        answer = failure(error)  # the function's own
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the user's as well
        answer = failure(error)
    return [answer] * len(unit)


def jail_of(config: JudgeConfig) -> str:
    """What confines the programs that the verifier runs, in words; empty where it runs none."""
    runs_programs = config.kind is RewardKind.code or config.jail is not JailKind.auto
    return str(jail.choose(config.jail)) if runs_programs else ""


def waits(config: JudgeConfig) -> bool:
    """Whether the verifier waits for something else than a core of this machine."""
    if config.waits is None and config.kind is RewardKind.function:
        return is_async(user_function(config).function)
    return bool(config.waits)
