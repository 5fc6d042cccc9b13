"""The program of a judge that waits: `python -m hybridrl.rewards.waiting_worker FD PARENT`.

Its parent sends units: responses that are judged together. One event loop judges as many at a time
as it is sent, and answers each when it is done, in any order.
"""

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config import JudgeConfig, RewardCall, RewardKind, SourceConfig
from hybridrl.rewards import jail
from hybridrl.rewards.child import limit_process, start_failure
from hybridrl.rewards.cpu_limit import cpu_limit
from hybridrl.rewards.functions import answer_of, is_async, user_function
from hybridrl.rewards.results import (
    TIMEOUT,
    BudgetSpent,
    EndpointError,
    EndpointTimeout,
    JudgeAnswer,
    JudgeTimeout,
    RewardInput,
    failure,
)
from hybridrl.rewards.verifiers import make_selector
from hybridrl.rewards.worker import jail_of, waits

if TYPE_CHECKING:
    from hybridrl.rewards.endpoint import Endpoint

Unit = Sequence[RewardInput]
JudgeUnit = Callable[[Unit], Awaitable[list[JudgeAnswer]]]

BUDGET_SPENT = "budget"
"""Begins the answer to a unit that the budget does not allow."""


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


def function_judge(config: JudgeConfig) -> JudgeUnit:
    """Judges by a user's function, within `timeout_s`; one that raises is called once more."""
    function, select = user_function(config), make_selector(config)
    call = function.function if is_async(function.function) else in_thread(function.function)

    async def judge(unit: Unit) -> list[JudgeAnswer]:
        with cpu_limit(config.timeout_s):
            texts = [select(item.response) for item in unit]
        try:
            async with asyncio.timeout(config.timeout_s) as limit:
                if config.call is RewardCall.sample and texts == [None]:
                    return [answer_of(0.0, None)]
                arguments = function.arguments(unit, [text or "" for text in texts])
                with contextlib.suppress(Exception):
                    return function.answers(await call(**arguments), texts)
                return function.answers(await call(**arguments), texts)
        except TimeoutError as error:
            if limit.expired():
                raise JudgeTimeout from error
            raise  # the function's own

    return judge


def in_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """`function`, each call in a separate thread: one that hangs takes no other's place."""

    async def call(**arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def resolve(value: Any, error: BaseException | None) -> None:
            if not done.done():  # else it was given up
                done.set_result((value, error))

        def run() -> None:
            value, failed = None, None
            try:
                value = function(**arguments)
            except BaseException as error:  # SystemExit is the user's as well
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(resolve, value, failed)

        threading.Thread(target=run, daemon=True).start()
        value, error = await done
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
    except JudgeTimeout:
        answer = failure(f"{TIMEOUT}no reward within {timeout_s} s")
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        answer = failure(error)  # the function's own
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the user's as well
        answer = failure(error)
    return [answer] * len(unit)


async def serve(connection: Connection, judge: JudgeUnit, config: JudgeConfig, counts: Any) -> None:
    """Judge units until the parent closes the connection.

    Each is answered by `[number, answers, counts]`.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    running: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive

    async def handle(number: int, unit: Unit) -> None:
        answers = await answered(judge, unit, config.timeout_s)
        connection.send_bytes(json.dumps([number, answers, counts]).encode())

    def start(number: int, unit: Unit) -> None:
        task = loop.create_task(handle(number, unit))
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(start, *connection.recv())
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


async def run(
    connection: Connection,
    config: JudgeConfig,
    sources: Mapping[str, SourceConfig],
    replies: str | None,
) -> None:
    """Build the judge, report ready, and serve; with empty `replies` only try the endpoint."""

    def answer(value: object) -> None:
        connection.send_bytes(json.dumps(value).encode())

    async with contextlib.AsyncExitStack() as stack:
        try:
            counts: dict[str, int] = {}
            if config.kind.asks:
                # aiohttp takes longer to import than all the rest, which every verifier does.
                from hybridrl.rewards.endpoint import Endpoint

                endpoint = Endpoint(config, Path(replies) if replies else None)
                stack.push_async_callback(endpoint.close)
                judge, counts = endpoint_judge(config, endpoint), endpoint.counts
                if replies == "":
                    await endpoint.probe()
            else:
                assert config.kind is RewardKind.function, config.kind
                judge = function_judge(config)
            answer(["ready", jail_of(config), waits(config)])
        except BaseException as error:
            answer(start_failure(error))
            return
        await serve(connection, judge, config, counts)


def main(descriptor: int, parent: int) -> None:
    """Serve the parent, which closes the connection to end the process."""
    limit_process(parent)
    # Of threads that a user's function may leave hanging; MEMORY_LIMIT counts them whole.
    threading.stack_size(4 << 20)
    connection = Connection(descriptor)
    config, sources, paths, replies = connection.recv()
    sys.path[:] = paths  # a user's module is found as in the parent
    jail.configure(config.jail, config.limits)
    asyncio.run(run(connection, config, sources, replies))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
