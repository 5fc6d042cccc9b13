"""The environment inside a sandbox.

The pool sends starts and turns of episodes. One event loop runs all of them, and answers each when
its program waits for the model, in any order.
"""

import asyncio
import contextvars
import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from hybridrl.config import EnvironmentConfig, SourceConfig
from hybridrl.environments.episode import Episode
from hybridrl.environments.load import load_environment
from hybridrl.environments.program import Model
from hybridrl.environments.task import ChatMessage, EpisodeTask, ModelTurn, PastTurn
from hybridrl.environments.tool_calls import CallForm, configure
from hybridrl.sandbox import Service

if TYPE_CHECKING:
    from hybridrl.environments.endpoint import ChatEndpoint


class EpisodeService(Service):
    """Runs the episodes of a process.

    The answer to a request is `[number, start, step, close_error, replaced]`; what it did not ask
    for is null, `replaced` counts lone surrogates.
    """

    marks_requests = False  # an episode marks its program

    def __init__(
        self,
        answer: Callable[..., None],
        config: EnvironmentConfig,
        sources: Mapping[str, SourceConfig],
        call_form: CallForm,
        port: int,
    ) -> None:
        """`port` is that of its endpoint, 0 for any."""
        super().__init__(answer)
        configure(call_form)
        self.config, self.port = config, port
        self.environment = load_environment(config, sources)
        self.episodes: dict[int, Episode] = {}
        self._endpoint: ChatEndpoint | None = None
        self._listens: asyncio.Task[None]

    async def open(self) -> list[Any]:
        """The tools that the environment offers."""
        if self.port:
            await self.endpoint()
        return [list(self.environment.tools)]

    async def endpoint(self) -> "ChatEndpoint":
        """Return the endpoint of the process, which starts at the first use."""
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
        episode.limit.on_beat = functools.partial(self.answer, number)
        start = await episode.start(past, opening)
        if turn is not None and start.failure is None:
            await self.step(number, turn, start.to_json())
            return
        self._answer(number, start.to_json(), None, episode.model)
        if start.failure is not None:
            await self.end(number, episode)

    async def step(self, number: int, turn: ModelTurn, start: Any = None) -> None:
        """Hand an episode its turn.

        One that has ended is closed before that is told; one that has failed after it, since it may
        take long.
        """
        episode = self.episodes[number]
        episode.limit.on_beat = functools.partial(self.answer, number)
        step = await episode.step(turn)
        if step.messages is None and step.failure is None:
            await self.end(number)
        self._answer(number, start, step.to_json(), episode.model)
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

    async def close(self, running: Collection["asyncio.Task[None]"]) -> None:
        """Close all episodes at once, and wait for those whose end is on its way."""
        ends = [asyncio.create_task(self.end(number)) for number in list(self.episodes)]
        if ends or running:
            await asyncio.wait([*ends, *running])
        if self._endpoint is not None:
            await self._endpoint.close()

    def _answer(self, number: int, start: Any, step: Any, model: Model) -> None:
        replaced, model.replaced = model.replaced, 0
        self.answer(number, start, step, model.close_error, replaced)


make = EpisodeService
