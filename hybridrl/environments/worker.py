"""The program of an environment's process: `python -m hybridrl.environments.worker FD PARENT MARK`.

Its parent sends starts and turns of episodes. One event loop runs all of them, and answers each
when its program waits for the model, in any order.
"""

import asyncio
import contextlib
import contextvars
import functools
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from hybridrl.config import EnvironmentConfig
from hybridrl.environments.episode import Episode, Marker
from hybridrl.environments.fork import GuardedSelector
from hybridrl.environments.load import load_environment
from hybridrl.environments.mark import Mark
from hybridrl.environments.program import Environment, Model
from hybridrl.environments.task import ChatMessage, EpisodeTask, ModelTurn, PastTurn
from hybridrl.environments.tool_calls import configure
from hybridrl.rewards import jail
from hybridrl.rewards.child import keep_from_children, limit_process, start_failure

if TYPE_CHECKING:
    from hybridrl.environments.endpoint import ChatEndpoint

STACK_MB = 4
"""Of a thread: the limit of memory counts it whole."""
MOST_THREADS = 512
"""Threads in which programs may wait for the model, say in a client that blocks."""


class Server:
    """Runs the episodes of a process.

    Each request has a number, and gets an answer `[request, start, step, close_error, replaced]`;
    what it did not ask for is null, `replaced` counts lone surrogates. `[request]` before it says
    that its program is queued, and is to be waited for.
    """

    def __init__(
        self,
        connection: Connection,
        environment: Environment,
        config: EnvironmentConfig,
        port: int,
    ) -> None:
        """`port` is that of its endpoint, 0 for any."""
        self.connection, self.environment, self.config = connection, environment, config
        self.episodes: dict[int, Episode] = {}
        self.port = port
        self._endpoint: ChatEndpoint | None = None
        self._listens: asyncio.Task[None]

    async def endpoint(self) -> "ChatEndpoint":
        """That of the process, which starts at the first use."""
        if self._endpoint is None:
            from hybridrl.environments.endpoint import ChatEndpoint  # aiohttp takes long to import

            self._endpoint = ChatEndpoint(self.port)
            # Without the marks of the program that has asked for it.
            loop, bare = asyncio.get_running_loop(), contextvars.Context()
            self._listens = loop.create_task(self._endpoint.start(), context=bare)
        await self._listens
        return self._endpoint

    async def serve_model(self, model: Model) -> tuple[str, str]:
        """Address and key of an episode's model."""
        return (await self.endpoint()).admit(model)

    async def begin(
        self,
        request: int,
        number: int,
        task: EpisodeTask,
        key: str,
        past: tuple[PastTurn, ...],
        opening: tuple[ChatMessage, ...] | None,
        turn: ModelTurn | None,
    ) -> None:
        """Start an episode, through those of the `past`; with `turn` go on through it."""
        episode = Episode(
            number, self.environment.program, task, key, self.config, self.serve_model
        )
        self.episodes[number] = episode
        episode.limit.on_beat = functools.partial(self._wait_on, request)
        start = await episode.start(past, opening)
        if turn is not None and start.failure is None:
            await self.step(request, number, turn, start.to_json())
            return
        self._answer(request, start.to_json(), None, episode.model)
        if start.failure is not None:
            await self.end(number, episode)

    async def step(self, request: int, number: int, turn: ModelTurn, start: Any = None) -> None:
        """Hand an episode its turn.

        One that has ended is closed before that is told; one that has failed after it, since it may
        take long.
        """
        episode = self.episodes[number]
        episode.limit.on_beat = functools.partial(self._wait_on, request)
        step = await episode.step(turn)
        if step.messages is None and step.failure is None:
            await self.end(number)
        self._answer(request, start, step.to_json(), episode.model)
        if step.failure is not None:
            await self.end(number, episode)

    async def end(self, number: int, failed: Episode | None = None) -> None:
        """Close an episode, if it is here; one that has failed may have been started anew."""
        episode = failed or self.episodes.get(number)
        if episode is not None:
            if self.episodes.get(number) is episode:
                del self.episodes[number]
            await episode.close()
            if self._endpoint is not None:
                self._endpoint.dismiss(episode.model)

    async def serve(self) -> None:
        """Handle requests until the parent closes the connection."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        running: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive

        def start(name: str, *arguments: Any) -> None:
            task = loop.create_task(getattr(self, name)(*arguments))
            running.add(task)
            task.add_done_callback(running.discard)

        def read() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(start, *self.connection.recv())
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()
        for number in list(self.episodes):
            start("end", number)
        if running:  # all at once, and those whose end is on its way
            await asyncio.wait(running)
        if self._endpoint is not None:
            await self._endpoint.close()

    def _wait_on(self, request: int) -> None:
        self.connection.send_bytes(json.dumps([request]).encode())

    def _answer(self, request: int, start: Any, step: Any, model: Model) -> None:
        answer = [request, start, step, model.close_error, model.replaced]
        model.replaced = 0
        self.connection.send_bytes(json.dumps(answer).encode())


async def run(
    connection: Connection, config: EnvironmentConfig, sources: Any, port: int, marker: Marker
) -> None:
    """Build the environment, report ready with its tools, and serve."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(marker.make_task)
    num_threads = min(MOST_THREADS, config.memory_mb // STACK_MB // 2)
    loop.set_default_executor(ThreadPoolExecutor(num_threads, "program"))
    try:
        server = Server(connection, load_environment(config, sources), config, port)
        if port:
            await server.endpoint()
        ready: list[Any] = ["ready", list(server.environment.tools)]
    except BaseException as error:
        connection.send_bytes(json.dumps(start_failure(error)).encode())
        return
    connection.send_bytes(json.dumps(ready).encode())
    await server.serve()


def main(descriptor: int, parent: int, mark: int) -> None:
    """Serve the parent, which closes the connection to end the process."""
    connection = Connection(descriptor)
    config, sources, paths, jail_kind, limits, call_form, port = connection.recv()
    limit_process(parent, config.memory_mb << 20)
    keep_from_children(connection)
    threading.stack_size(STACK_MB << 20)
    sys.path[:] = paths  # a user's module is found as in the parent
    jail.configure(jail_kind, limits)
    configure(call_form)
    marker = Marker(Mark(mark).tell)

    def make_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(GuardedSelector(marker.guard))

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run(connection, config, sources, port, marker))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
