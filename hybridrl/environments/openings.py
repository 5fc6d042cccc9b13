"""First messages of tasks, which are a run's prompts: asked of the programs before a run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from hybridrl.config import ConfigError, EnvironmentConfig, JailKind, JailLimits, SourceConfig
from hybridrl.environments.pool import EpisodePool
from hybridrl.environments.task import ChatMessage, EpisodeStart, EpisodeTask

TWICE = 32
"""Tasks of each call that are started a second time, in another process."""


class Openings:
    """Starts the program of each task, and gives what it says first.

    Every episode of a prompt has to begin with it. So some tasks are started twice, as other
    samples and in another process, where Python orders sets otherwise.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        sources: Mapping[str, SourceConfig] | None = None,
        *,
        jail: JailKind = JailKind.auto,
        limits: JailLimits | None = None,
    ) -> None:
        """Raises ConfigError for an environment that cannot be built."""
        self.config, self._starts = config, 0
        again = replace(config, num_processes=1, port=0)
        self._pools = [
            EpisodePool(settings, sources, seed=seed, jail=jail, limits=limits)
            for seed, settings in enumerate((config, again))
        ]
        try:
            for pool in self._pools:
                pool.wait_ready(every=True)
        except RuntimeError as error:
            self.close()
            raise self._refusal(f"a program that starts ({error})") from error
        except BaseException:
            self.close()
            raise
        self.tools: tuple[dict[str, Any], ...] = self._pools[0].tools
        """Schemas of the tools that the environment offers; of those that a client tells of, once
        it was asked for first messages."""

    def __call__(self, tasks: Sequence[EpisodeTask]) -> list[tuple[ChatMessage, ...]]:
        """The first messages of each; raises ConfigError where there are none, or others later."""
        starts = self._start(self._pools[0], tasks)
        again = self._start(self._pools[1], tasks[:TWICE])
        for task, start in zip(tasks, starts, strict=True):
            if start.failure is not None:
                where = f"{task.source}: {task.question[:60]!r}"
                raise self._refusal(f"a program that starts ({start.error}; {where})")
        for task, first, second in zip(tasks, starts, again, strict=False):
            if second.messages != first.messages:
                raise self._refusal(
                    f"a program whose first messages follow from the task alone ({task.source}: "
                    f"{_text(first)[:60]!r}, and at a second start {_text(second)[:60]!r})"
                )
        self._take_tools(starts)
        return [start.messages for start in starts]

    def _take_tools(self, starts: Sequence[EpisodeStart]) -> None:
        """Tools that clients tell of: the same for every task, as templates tell of them once."""
        for start in starts:
            if start.tools and self.tools not in ((), start.tools):
                names = [tool.get("function", {}).get("name") for tool in start.tools]
                raise self._refusal(f"a program whose first request has the same tools ({names})")
            self.tools = self.tools or start.tools

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End its processes."""
        for pool in self._pools:
            pool.close()

    def _start(self, pool: EpisodePool, tasks: Sequence[EpisodeTask]) -> list[EpisodeStart]:
        starts = []
        for first in range(0, len(tasks), 256):  # as many episodes are there at a time
            some = tasks[first : first + 256]
            ids = [(self._starts + number,) for number in range(len(some))]
            self._starts += len(some)
            futures = [pool.start(id, task) for id, task in zip(ids, some, strict=True)]
            starts += [future.result() for future in futures]
            for id in ids:
                pool.end(id)
        return starts

    def _refusal(self, allowed: str) -> ConfigError:
        key = "path" if self.config.kind.needs_path else "kind"
        return ConfigError(
            f"environment.{key}", self.config.path or self.config.kind.value, allowed
        )


def _text(start: EpisodeStart) -> str:
    return "".join(str(message["content"]) for message in start.messages) or start.error
