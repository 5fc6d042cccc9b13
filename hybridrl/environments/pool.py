"""Episodes in sandboxes, as the driver has them: many at a time on few event loops."""

import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from hybridrl.config import EnvironmentConfig, JailKind, JailLimits, SourceConfig
from hybridrl.environments.episode import CLOSE_S
from hybridrl.environments.task import (
    ChatMessage,
    EpisodeStart,
    EpisodeStep,
    EpisodeTask,
    FailureKind,
    ModelTurn,
    PastTurn,
    failed,
)
from hybridrl.environments.tool_calls import CallForm
from hybridrl.sandbox import SandboxPool, SandboxProcess, SandboxTask, Settings
from hybridrl.sandbox.process import settle

logger = logging.getLogger(__name__)

EpisodeId = tuple[Any, ...]
"""The identity of a sample: it keys the episode's random numbers."""


@dataclass(eq=False, slots=True, kw_only=True)
class ServedEpisode(SandboxTask):
    """An episode of the pool; `home` is where its program is, None where it must be started.

    `turn` and `future` are what it is to answer: without a turn its start. One is `lost`, of a kind
    and with an error, where its process ended while no answer was due.
    """

    id: EpisodeId
    task: EpisodeTask
    past: list[PastTurn] = field(default_factory=list)
    opening: tuple[ChatMessage, ...] | None = None
    turn: ModelTurn | None = None
    lost: tuple[str, str] | None = None


class EpisodePool(SandboxPool[ServedEpisode]):
    """Runs episodes in `num_processes` sandboxes; each has one event loop for all that it has.

    Life of an episode: `start`, then a `turn` for each turn of the model's. It is over when a step
    says that it has ended or failed, or `end` gives it up. At most one answer is due at a time.

    See `SandboxPool` for who has failed where a process hangs or dies. The others are rebuilt by
    replay, when their next turn comes: their programs run again on the turns already made, and must
    answer the same. An episode that fails is replayed once at that turn.

    `counts` has `episodes`, `turns`, `replays`, `failed/KIND`, `close_errors`, and
    `replaced_surrogates`. Each replaced surrogate is a question mark in a program's text.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        sources: Mapping[str, SourceConfig] | None = None,
        *,
        seed: int = 0,
        jail: JailKind = JailKind.auto,
        limits: JailLimits | None = None,
        call_form: CallForm | None = None,
    ) -> None:
        """`seed` is the run's; the jail is that of `reward.jail` and `reward.limits`.

        `call_form` is how the model writes calls of tools; None: in any form.
        """
        self.config, self.seed, self.tries_again = config, seed, config.replay
        self.tools: tuple[dict[str, Any], ...] = ()
        """Schemas of the tools that the model may call, once a process is ready."""
        self._episodes: dict[EpisodeId, ServedEpisode] = {}
        known, form = dict(sources or {}), call_form or CallForm()
        ports = [config.port and config.port + place for place in range(config.num_processes)]
        super().__init__(
            [
                Settings(
                    "hybridrl.environments.worker",
                    (config, known, form, port),
                    jail,
                    limits or JailLimits(),
                    config.memory_mb,
                )
                for port in ports
            ],
            f"environment ({config.kind.value})",
            step_s=config.turn_timeout_s,
            late=f"no answer within environment.turn_timeout_s={config.turn_timeout_s:g}",
            closes_s=CLOSE_S,
        )

    def start(
        self,
        id: EpisodeId,
        task: EpisodeTask,
        past: Sequence[PastTurn] = (),
        opening: tuple[ChatMessage, ...] | None = None,
    ) -> "Future[EpisodeStart]":
        """Start the episode of a sample, or take it up again after those of the `past`.

        `opening` are the first messages that it must have, if they are known: those of the task.
        """
        first = task.opening if opening is None else opening
        episode = ServedEpisode(id=id, task=task, past=list(past), opening=first)
        self._do(functools.partial(self._begin, episode), episode.future)
        return episode.future

    def turn(self, id: EpisodeId, turn: ModelTurn) -> "Future[EpisodeStep]":
        """Hand an episode the model's turn; its next step comes when it waits again or has ended.

        A step that has ended or failed is the last: the pool has forgotten the episode then.
        """
        future: Future[EpisodeStep] = Future()
        self._do(functools.partial(self._take_turn, id, turn, future), future)
        return future

    def end(self, id: EpisodeId) -> None:
        """Give an episode up, and close its environment; one that has ended is passed over."""
        self._do(functools.partial(self._end, id))

    # -- in the thread -------------------------------------------------------------------------

    def _begin(self, episode: ServedEpisode) -> None:
        if episode.id in self._episodes:
            error = ValueError(f"the episode of sample {episode.id} is there already")
            settle(episode.future, error)
            return
        self.counts["episodes"] += 1
        self._episodes[episode.id] = episode
        self._queue.append(episode)

    def _take_turn(self, id: EpisodeId, turn: ModelTurn, future: "Future[EpisodeStep]") -> None:
        episode = self._episodes.get(id)
        if episode is None or episode.due:
            settle(future, ValueError(f"no episode of sample {id} waits for a turn"))
            return
        self.counts["turns"] += 1
        episode.turn, episode.future, episode.due = turn, future, True
        if episode.lost is not None:
            (kind, reason), episode.lost = episode.lost, None
            self._fail(episode, kind, reason)
        else:
            self._queue.append(episode)

    def _end(self, id: EpisodeId) -> None:
        episode = self._episodes.pop(id, None)
        if episode is None:
            return
        if episode.home is not None:
            episode.home.send(("end", episode.number))
            episode.home.leave(episode)
        if episode.due:
            episode.settle(None)

    def _is_ready(self, process: SandboxProcess, details: list[Any]) -> None:
        self.tools = tuple(details[0])

    def _request(
        self, task: ServedEpisode, process: SandboxProcess
    ) -> tuple[str, tuple[Any, ...], float]:
        """An episode's start, its turn, or both."""
        if task.home is not None:
            return "step", (task.turn,), self.config.turn_timeout_s
        # The 0 was a part of ids in earlier versions, whose runs resume.
        key, past = "/".join(map(str, (self.seed, *task.id, 0))), tuple(task.past)
        seconds = (2 + len(past)) * self.config.turn_timeout_s
        return "begin", (task.task, key, past, task.opening, task.turn), seconds

    def _read(self, task: ServedEpisode, answer: list[Any]) -> Any:
        start, step, close_error, replaced = answer
        started = None if start is None else EpisodeStart.from_json(start)
        stepped = None if step is None else EpisodeStep.from_json(step)
        return started, stepped, close_error, replaced

    def _answered(self, task: ServedEpisode, answer: Any) -> None:
        """Hand an answer to the driver, or see to a failure."""
        start, step, close_error, replaced = answer
        self.counts["replaced_surrogates"] += replaced
        if close_error:
            self.counts["close_errors"] += 1
            logger.warning("environment of sample %s: close failed: %s", task.id, close_error)
        if not task.due:
            return
        for one in (start, step):
            if one is not None and one.failure is not None:
                self._leave(task)
                self._fail(task, one.failure, one.error)
                return
        if start is not None:
            task.opening = start.messages
            task.past = [
                PastTurn(known.turn, step)
                for known, step in zip(task.past, start.steps, strict=True)
            ]
        task.strikes = 0  # of other turns: who dies of bad luck has a second one
        if task.turn is None:
            task.settle(start)
            return
        assert step is not None
        task.past.append(PastTurn(task.turn, step))
        task.turn = None
        if step.messages is None:
            self._episodes.pop(task.id, None)
            self._leave(task)
        task.settle(step)

    def _again(self, task: ServedEpisode) -> None:
        self.counts["replays"] += 1
        super()._again(task)

    def _failed(self, task: ServedEpisode, kind: str, error: BaseException | str) -> None:
        self.counts[f"failed/{kind}"] += 1
        step = failed(cast(FailureKind, kind), error)
        self._episodes.pop(task.id, None)
        is_start = task.turn is None
        task.settle(EpisodeStart((), (), step.failure, step.error) if is_start else step)

    def _bereaved(self, task: ServedEpisode, suspect: bool, error: tuple[str, str] | None) -> None:
        """It is replayed when an answer is due."""
        if not self.config.replay and error is None:
            error = "crash", "its process ended with another episode, and environment.replay=false"
            if task.due:
                self._fail(task, *error)
                return
        if error is not None:
            task.lost = error
            return
        self.counts["replays"] += 1
        if task.due:
            super()._bereaved(task, suspect, error)

    def _leave(self, task: ServedEpisode) -> None:
        """An episode's program has ended in its process."""
        if task.home is not None:
            task.home.leave(task)
