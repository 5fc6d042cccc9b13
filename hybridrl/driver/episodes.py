"""The driver's side of conversations: episodes of samples, and replies as tokens."""

import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, cast, get_args

import numpy as np

from hybridrl.config import Config, OnFailure
from hybridrl.data import Item
from hybridrl.driver.async_calls import Calling, EventCalls, result_of
from hybridrl.driver.node_pools import LOST, Lost, NodePool, NodePools
from hybridrl.environments import (
    BusySpan,
    EpisodePool,
    EpisodeStart,
    EpisodeStep,
    FailureKind,
    ModelTurn,
    PastTurn,
    as_before,
    failed,
)
from hybridrl.environments.tool_calls import CallForm
from hybridrl.flow.clock import Clock, WallClock
from hybridrl.flow.executor import EpisodeReply, Replied, TurnEnded
from hybridrl.flow.graph import Graph, SourceStage
from hybridrl.flow.instance_work import Work
from hybridrl.flow.sample import ENVIRONMENT_FAILURE, NOTE, OUT_OF_TOKENS, SampleId
from hybridrl.flow.versions import FailureRecord
from hybridrl.runtime.launcher import Launcher
from hybridrl.schedule.base import PendingSample

logger = logging.getLogger(__name__)


class EnvironmentFailed(Exception):
    """Too large a share of a step's episodes has failed."""


class Composer(Protocol):
    """Makes the tokens between turns: `hybridrl.data.turns.TurnTemplate`."""

    call_form: CallForm
    """How the model writes calls of tools."""

    def reply(
        self, turn: Sequence[int], messages: Sequence[dict[str, Any]], most: int
    ) -> tuple[tuple[int, ...], bool]:
        """Tokens of `messages` after the tokens of a turn, at most so many; and whether cut."""
        ...


@dataclass(slots=True)
class _Conversation:
    """A sample's episode so far; `most` tokens fit into its response.

    `start` is due at its `home`, a node's pool; an episode that is over has neither. `past` are its
    turns, the last of them perhaps not answered yet, and `ended` is that one as its rank has told
    it. In a resumed run one that `recurs` comes a second time, and `known` is what it was answered
    before. The replies to the turns `cut`, from 1 on, were too long. One that `is_over` is not with
    the pool any more.
    """

    item: Item
    most: int
    home: NodePool | None = None
    start: "Future[EpisodeStart | Lost] | None" = None
    past: list[PastTurn] = field(default_factory=list)
    ended: TurnEnded | None = None
    known: EpisodeStep | None = None
    cut: set[int] = field(default_factory=set)
    recurs: bool = False
    is_over: bool = False


@dataclass(slots=True)
class _StepCounts:
    """What the conversations of a step did."""

    ended: int = 0
    turns: int = 0
    reply_tokens: int = 0
    cut_replies: int = 0
    kept_tokens: int = 0
    moved_tokens: int = 0
    recomputed_tokens: int = 0
    replays: int = 0
    waits: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Unchecked:
    """The episodes that have ended since `Episodes.check`, and how many of them have failed."""

    ended: int = 0
    failed: int = 0
    first_failure: str = ""


class Episodes:
    """Starts an episode for each sample that an engine is given, and answers its turns.

    A reply takes what the environment says through the chat template. One that leaves no room for
    another token of the response ends the episode, with finish `length`. An episode that has failed
    ends its sample: it is dropped, or what it earned is 0 (`environment.on_failure`).

    The processes start with the first episode.
    """

    def __init__(
        self,
        config: Config,
        composer: Composer | None,
        launcher: Launcher,
        failures: FailureRecord = MappingProxyType({}),
    ) -> None:
        """With the `failures` of a run that is followed."""
        self.config, self._composer, self._launcher = config, composer, launcher
        self.clock: Clock = WallClock()
        self._pool: NodePools | None = None
        self._there: dict[SampleId, _Conversation] = {}
        self._counts = _StepCounts()
        self._unchecked: dict[str, _Unchecked] = defaultdict(_Unchecked)  # by branch
        self._recorded: Counter[str] = Counter()
        self._fails = failures

    @property
    def pool(self) -> NodePools:
        """The processes, on every node; they start at the first use.

        At ports of their own, which others may call, they are on the driver's.
        """
        if self._pool is None:
            config, settings = self.config, self.config.environment

            def make(share: int) -> Callable[[], EpisodePool]:
                return functools.partial(
                    EpisodePool,
                    replace(settings, num_processes=share),
                    config.data.sources,
                    seed=config.run.seed,
                    jail=config.reward.jail,
                    limits=config.reward.limits,
                    call_form=self._composer.call_form if self._composer else None,
                )

            nodes = [] if settings.port else self._launcher.other_nodes()
            self._pool = NodePools(make, settings.num_processes, nodes, least=1)
            logger.info("environment %s starts", settings.kind.value)
        return self._pool

    def _start(
        self, id: SampleId, conversation: _Conversation, past: Sequence[PastTurn] = (), *rest: Any
    ) -> None:
        """Start an episode on the freest node, or take it up there after its `past`."""
        conversation.home = self.pool.freest()
        task = conversation.item.task
        conversation.start = conversation.home.call("start", id, task, list(past), *rest)

    def start(self, ids: Iterable[SampleId], item: Item, max_new_tokens: int) -> None:
        """Start episodes of a prompt's samples, whose responses have at most so many tokens.

        An episode of such a sample that is there was abandoned with its step: it is given up.
        """
        assert item.task is not None, "a prompt without a task"
        for id in ids:
            self.end([id])
            self._there[id] = _Conversation(item, max_new_tokens)
            self._start(id, self._there[id])

    def state(self, pending: Iterable[PendingSample]) -> list[dict[str, Any]]:
        """The conversations of pending samples that are not finished, in plain JSON types."""
        unfinished = [sample for sample in pending if sample.id in self._there and sample.parked]
        return [self._record(self._there[sample.id], sample) for sample in unfinished]

    def _record(self, conversation: _Conversation, sample: PendingSample) -> dict[str, Any]:
        """`turns` have their answers; `ended` is the last one, where its sample waits."""
        steps = [past.step and past.step.to_json() for past in conversation.past]
        turns = [[*astuple(p.turn), step] for p, step in zip(conversation.past, steps, strict=True)]
        ended = astuple(conversation.ended) if sample.waits and conversation.ended else None
        cut = sorted(conversation.cut)
        return {"id": list(sample.id), "turns": turns, "ended": ended, "cut": cut}

    def take_up(
        self, pending: Iterable[PendingSample], records: Iterable[Mapping[str, Any]]
    ) -> Iterator[TurnEnded]:
        """Replay the episodes of a checkpoint (`state`); gives the turns to be answered once more.

        An episode that answers otherwise than before has failed, at its next turn.
        """
        samples = {sample.id: sample for sample in pending}
        for record in records:
            sample = samples[SampleId.read(record["id"])]
            item, sampling = sample.prompt, sample.sampling
            assert sampling is not None, "a conversation that is finished"
            past = [
                PastTurn(ModelTurn(*turn), step and EpisodeStep.from_json(step))
                for *turn, step in record["turns"]
            ]
            known = past.pop().step if record["ended"] else None
            over = known is not None and known.messages is None
            most = sampling.max_new_tokens
            recurs = record["ended"] is not None
            cut = set(record.get("cut", ()))
            taken = _Conversation(item, most, past=past, known=known, cut=cut, recurs=recurs)
            self._there[sample.id] = taken
            if not over:
                self._start(sample.id, taken, past)
            if record["ended"]:
                _, tokens, *rest = record["ended"]
                yield TurnEnded(sample.id, tuple(tokens), *rest)

    @property
    def ids(self) -> frozenset[SampleId]:
        """The samples whose conversations are there."""
        return frozenset(self._there)

    def answer(self, ended: TurnEnded) -> EventCalls:
        """Hand a turn to its environment; one event when it has answered, or none for a sample
        that has left."""
        start = self.clock.now()
        reply = yield from self._answer(ended)
        if reply is None:
            return []
        seconds = self.clock.now() - start
        self._counts.waits.append(seconds)
        return [Replied((reply,), (seconds,))]

    def _answer(self, ended: TurnEnded) -> Calling[EpisodeReply | None]:
        """What the environment answers; None where the episode was given up meanwhile.

        What it has answered before a resumed run has been counted then. An episode that had ended
        is not run again.
        """
        conversation, tokens = self._there[ended.id], len(ended.tokens)
        before = len(conversation.item.prompt_ids) + ended.response_tokens - tokens
        turn = ModelTurn(ended.text, ended.finish, before, tokens)
        conversation.ended, known = ended, conversation.known
        conversation.past.append(PastTurn(turn, known))
        self._counts.turns += not conversation.recurs
        conversation.recurs = False
        if conversation.start is None:
            assert known is not None, "an episode that was not started"
            return self._reply(ended, conversation, known, is_new=False)
        place, kind = self._fails.get(ended.id, (0, ""))
        if place == len(conversation.past):
            step = failed(cast(FailureKind, kind), "it has failed in the recorded run")
        else:
            answer = yield from self._step(ended.id, conversation, turn)
            if answer is None or not self._is_there(ended.id, conversation):
                return None
            step = as_before(answer, known, len(conversation.past))
        conversation.past[-1] = PastTurn(turn, step)
        conversation.known = None
        is_new = known is None or step.failure is not None
        return self._reply(ended, conversation, step, is_new)

    def _step(
        self, id: SampleId, conversation: _Conversation, turn: ModelTurn
    ) -> Calling[EpisodeStep | None]:
        """What an episode answers; where its node dies, it is replayed on another one."""
        opening = None
        while True:
            assert conversation.start is not None
            assert conversation.home is not None
            started = yield from result_of(conversation.start)
            if not self._is_there(id, conversation):
                return None
            if started is not LOST:
                if started.failure is not None:
                    return EpisodeStep(None, failure=started.failure, error=started.error)
                answer = yield from result_of(conversation.home.call("turn", id, turn))
                if answer is not LOST or not self._is_there(id, conversation):
                    return cast(EpisodeStep | None, answer)
                if not self.config.environment.replay:
                    return failed("crash", "its node has died, and environment.replay=false")
                opening = started.messages
            self._counts.replays += 1
            self._start(id, conversation, conversation.past[:-1], opening)

    def _is_there(self, id: SampleId, conversation: _Conversation) -> bool:
        """Whether it is a sample's present one: a sample that left may have begun anew."""
        return self._there.get(id) is conversation

    def worked(self, work: Work) -> None:
        """An instance has done so much; what counts are the caches of samples that waited."""
        self._counts.kept_tokens += work.kept_tokens
        self._counts.moved_tokens += work.moved_tokens
        self._counts.recomputed_tokens += work.recomputed_tokens

    def _reply(
        self,
        ended: TurnEnded,
        conversation: _Conversation,
        step: EpisodeStep,
        is_new: bool,
    ) -> EpisodeReply:
        """A step of an environment, as the sample's rank is told of it; counted if it `is_new`.

        What is new counts in the step in which the environment has answered.
        """
        if step.failure is not None:
            return self._failed(ended.id, conversation, step, is_new)
        if step.messages is None:
            # The response's limit may have cut this turn off.
            cut = ended.finish == "length" and ended.response_tokens >= conversation.most
            return self._ended(ended.id, conversation, step, step.finish, is_new, cut)
        room = conversation.most - ended.response_tokens - 1  # the next turn has a token
        most = self.config.environment.max_reply_tokens
        assert self._composer is not None
        try:
            tokens, was_cut = self._composer.reply(ended.tokens, step.messages, most)
        except (ValueError, TypeError) as error:  # of its template, or its tokenizer
            reason = f"the chat template refuses the reply: {error}"
            return self._failed(ended.id, conversation, failed("error", reason), is_new)
        if was_cut:
            conversation.cut.add(len(conversation.past))
            self._counts.cut_replies += is_new
        if len(tokens) > room:
            return self._ended(ended.id, conversation, step, "length", is_new, True)
        self._counts.reply_tokens += len(tokens) * is_new
        return EpisodeReply(ended.id, tokens)

    def end(self, ids: Iterable[SampleId]) -> None:
        """Give up episodes whose samples have left; those that have ended are passed over."""
        for id in ids:
            conversation = self._there.pop(id, None)
            if conversation and conversation.home and not conversation.is_over:
                conversation.home.call("end", id)

    def check(self, which: str, graph: Graph) -> None:
        """Raise EnvironmentFailed where too many episodes of a graph have failed since the last.

        `which` says in the error what they are of. Those of other graphs, which are made meanwhile,
        do not count.
        """
        ones = self._take_unchecked(graph)
        ended, num_failed = sum(one.ended for one in ones), sum(one.failed for one in ones)
        first = next((one.first_failure for one in ones if one.failed), "")
        most = self.config.environment.max_failed_share
        if num_failed > most * ended:
            kind = self.config.environment.path or self.config.environment.kind.value
            raise EnvironmentFailed(
                f"environment {kind}: {num_failed} of {ended} episodes of {which} have failed"
                f" (environment.max_failed_share={most:g}); the first: {first}"
            )

    def forget(self, graph: Graph) -> None:
        """Leave what has ended of a graph out of its next `check`: its samples begin again."""
        self._take_unchecked(graph)

    def _take_unchecked(self, graph: Graph) -> list[_Unchecked]:
        makers = [stage for stage in graph.stages.values() if isinstance(stage, SourceStage)]
        return [self._unchecked.pop(stage.branch, _Unchecked()) for stage in makers]

    def spans(self) -> Iterator[BusySpan]:
        """What the processes did since the last call."""
        yield from self._pool.spans() if self._pool is not None else ()

    def metrics(self) -> dict[str, float]:
        """`environment/...` since the last call."""
        counts, self._counts = self._counts, _StepCounts()
        if not counts.ended and not counts.turns:
            return {}
        metrics = {
            "episodes": float(counts.ended),
            "turns": float(counts.turns),
            "reply_tokens": float(counts.reply_tokens),
            "cut_replies": float(counts.cut_replies),
            "kept_kv_tokens": float(counts.kept_tokens),
            "moved_kv_tokens": float(counts.moved_tokens),
            "recomputed_kv_tokens": float(counts.recomputed_tokens),
            "failed": float(counts.failures.total()),
            **{f"failed/{kind}": float(counts.failures[kind]) for kind in get_args(FailureKind)},
        }
        of_pool = Counter(self._pool.counts if self._pool is not None else {})
        for name in ("replays", "replaced_surrogates"):
            metrics[name] = float(of_pool[name] - self._recorded[name])
        metrics["replays"] += counts.replays
        self._recorded = of_pool
        if counts.waits:
            metrics["wait_p50_s"], metrics["wait_p99_s"] = (
                float(value) for value in np.percentile(counts.waits, (50, 99))
            )
        return {f"environment/{name}": value for name, value in metrics.items()}

    def close(self) -> None:
        """Close all environments, and end their processes."""
        if self._pool is not None:
            self._pool.close()

    def _ended(
        self,
        id: SampleId,
        conversation: _Conversation,
        step: EpisodeStep,
        finish: str,
        is_new: bool,
        out_of_tokens: bool = False,
    ) -> EpisodeReply:
        """The episode has ended, or its response is `out_of_tokens`: its sample is finished.

        It is known until that has left.
        """
        conversation.is_over = True
        if conversation.home is not None:
            conversation.home.call("end", id)  # passed over where the program has ended by itself
        if is_new:
            self._counts.ended += 1
            self._unchecked[id.branch].ended += 1
        rewards = _padded(step.rewards, len(conversation.past))
        scalars = {
            **{f"{NOTE}{name}": value for name, value in step.scalars.items()},
            "environment_reward": sum(rewards),
            "cut_replies": len(conversation.cut),
            OUT_OF_TOKENS: int(out_of_tokens),
        }
        if step.failure is not None:
            scalars[ENVIRONMENT_FAILURE] = step.failure
        return EpisodeReply(id, None, finish, rewards, scalars)

    def _failed(
        self, id: SampleId, conversation: _Conversation, step: EpisodeStep, is_new: bool
    ) -> EpisodeReply:
        """The episode has failed: its sample is dropped, or has earned nothing.

        One that was rewritten is dropped in any case.
        """
        assert step.failure is not None
        task = conversation.item.prompt
        failures = self._counts.failures
        if is_new:
            failures[step.failure] += 1
            unchecked = self._unchecked[id.branch]
            unchecked.failed += 1
            if unchecked.failed == 1:
                unchecked.first_failure = f"{step.error} (task {task[:60]!r})"
        # The log has the first of its kind and step: it stays short.
        is_first = is_new and failures[step.failure] == 1
        level = logging.WARNING if is_first else logging.DEBUG
        logger.log(
            level, "the episode of sample %s has failed (%s): %s", id, step.failure, step.error
        )
        nothing = EpisodeStep(None, failure=step.failure)
        # What the model has read is not what a client that rewrites it has seen.
        drops = self.config.environment.on_failure is OnFailure.drop or step.failure == "rewritten"
        finish = "abort" if drops else "stop"
        return self._ended(id, conversation, nothing, finish, is_new)


def _padded(rewards: Sequence[float], turns: int) -> tuple[float, ...]:
    """What each of so many turns has earned; those of which nothing is known, nothing."""
    return (*rewards[:turns], *[0.0] * (turns - len(rewards)))
