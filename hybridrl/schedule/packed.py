"""The packed schedule: the prompts of several steps by length, so that long ones share a step.

Tail batching (RollPacker, arXiv 2509.21009, section 3), made deterministic.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from hybridrl.flow.graph import AnswersStage, GenerateStage, Graph, TakeStage
from hybridrl.flow.ledger import Drop, DropReason, new_samples, wanted
from hybridrl.flow.packing import Choice, choose, limit_of
from hybridrl.flow.sample import OUT_OF_TOKENS, Sample, SampleId
from hybridrl.schedule.base import Prompt
from hybridrl.schedule.groups import BegunPrompts, GenerationTask
from hybridrl.schedule.loop_schedule import SchedulePolicy, check_generates_once
from hybridrl.schedule.tail import NoTail

ENDED = Drop(DropReason.RUN_ENDED, "its prompt waited for a later step when the run ended")


@dataclass(slots=True)
class _WaitingPrompt:
    """A prompt of the present cycle that is not trained on yet.

    A response of it was longer than `seen` tokens (0: none is known).
    """

    prompt: Any
    seen: int = 0


@dataclass(slots=True)
class _Packing:
    """The choice of a step while its samples are made.

    `order` are the prompts that wait. `fits` says of those that are known whether they keep to
    `limit`. Those in `sure` are taken, and all their samples are finished: stages may start.
    """

    order: list[int]
    limit: int | None
    fits: dict[int, bool]
    choice: Choice
    begun: BegunPrompts
    sure: set[int] = field(default_factory=set)

    @property
    def missing(self) -> list[int]:
        """Prompts that are taken, as far as is known, and have not begun."""
        begun = self.begun.open
        return [p for p in self.choice.taken if p not in begun and p not in self.fits]

    @property
    def too_long(self) -> list[int]:
        """Prompts that are taken although they do not fit."""
        return [p for p in self.choice.taken if not self.fits[p]]

    def tasks(self, taken: bool) -> list[GenerationTask]:
        """The samples of the prompts that have begun: those that are taken and fit, or the rest."""
        return [
            task
            for position, group in sorted(self.begun.open.items())
            if (position in self.sure) == taken
            for task in group.tasks.values()
        ]


@dataclass(kw_only=True, eq=False)
class Packed(SchedulePolicy):
    """Trains on the prompts of each cycle of `max_wait_steps` + 1 steps, the short ones first.

    A cycle pulls the prompts of all its steps. A step orders those that wait by their expected
    length, and takes the first that keep to the limit (`choose`). A prompt that has a longer
    response is put off. Its samples' tokens are discarded, and it begins again in a later step of
    the cycle. The last step takes all that are left, without a limit. A run's last cycle is cut, so
    that it ends with the run. One that has begun stays as it is, where a resumed run is to have
    fewer steps. `close` then gives the samples of the prompts that were still to come.

    So after a cycle the run has trained on the prompts of `serial`, each once, and none has waited
    more than `max_wait_steps` steps. All tokens of a step are of its weights. The prompts that it
    takes follow from seed and lengths, not from time or the instances.

    A prompt that was put off has its own random numbers again.

    `limit_tokens` None is `limit_of` the prompts trained in as many steps as a cycle has. The run's
    first step has no limit.

    `check_graph` refuses a recipe that generates in several stages of a step. Likewise where it
    asks for prompts as it needs them (`take`), or trains on the dataset's own responses.
    """

    max_wait_steps: int
    limit_tokens: int | None = None
    num_steps: int | None = None

    def __post_init__(self) -> None:
        assert self.max_wait_steps >= 1
        self.cycle_steps = self.max_wait_steps + 1
        self._wanted = 0  # prompts of the present step
        self._waiting: dict[int, _WaitingPrompt] = {}  # by position
        # the longest response of each prompt trained, by step
        self._longest: deque[list[int]] = deque(maxlen=self.cycle_steps)

    @classmethod
    def check_graph(cls, graph: Graph) -> None:
        """Raise `ValueError`, with what is allowed, for a recipe whose prompts cannot wait."""
        check_packed(graph)

    # -- between steps -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The prompts that wait, and the lengths that the limit follows from."""
        waiting = [[position, x.seen] for position, x in self._waiting.items()]
        return {"waiting": waiting, "longest": list(self._longest)}

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue from a `state_dict`; another schedule has no prompts that wait."""
        for position, seen, *_ in state.get("waiting", ()):  # old ones have a third number
            self._waiting[position] = _WaitingPrompt(prompt_at(position), seen)
        self._longest.extend(state.get("longest", ()))

    def close(self) -> dict[SampleId, Drop]:
        """The samples of prompts that wait for a later step of the cycle are dropped.

        A run has some that resumed within a cycle, with fewer steps than it was to have before.
        """
        dropped: dict[SampleId, Drop] = {}
        for stage in self.schedule.graph.stages.values():
            if isinstance(stage, GenerateStage):
                numbers = wanted(stage, self._waiting, ())
                for group in new_samples(stage, numbers):
                    dropped |= {sample.id: ENDED for sample in group}
        self._waiting.clear()
        return dropped

    # -- a step --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """No count yet."""
        for name in ("put_off", "discarded_tokens", "limit_tokens"):
            self.schedule.metrics[f"samples/{name}"] = 0.0

    def pull(self, num: int) -> list[Prompt]:
        """Pull a new cycle's prompts, where the last has ended; `num` are wanted in this step."""
        if not self._waiting:
            num_steps = self.cycle_steps
            if self.num_steps is not None:
                num_steps = max(1, min(num_steps, self.num_steps - self.schedule.steps_done))
            pulled = self.schedule.next_prompts(num * num_steps)
            self._waiting = {position: _WaitingPrompt(prompt) for position, prompt in pulled}
        self._wanted = num
        return []

    def begin(self) -> list[GenerationTask]:
        """More prompts than are wanted begin at once: as many as are expected not to fit."""
        packing = self._packing = self._new_packing()
        unknown = [position for position in packing.order if position not in packing.fits]
        ahead = -(-self._wanted // (self.cycle_steps - 1)) if packing.limit is not None else 0
        return self._begin(unknown[: self._wanted + ahead])

    def may_start(self, position: int) -> bool:
        """Whether a prompt is taken for sure."""
        return position in self._packing.sure

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Decode until it is known which prompts the step takes; the others begin again."""
        loop, packing = self.schedule.loop, self._packing
        while True:
            loop.make(tasks)
            # With turns calls may end at any time: the choice does not depend on the order.
            equal = not any(task.converses for task in tasks)
            loop.run(lambda: self._decided() or bool(packing.missing), equal)
            loop.end_calls()
            if self._decided():
                break
            tasks = self._begin(packing.missing)
        stopped = {task.sample.id: task for task in loop.park(with_kv=False)}
        loop.finish()
        self._withdraw([stopped.get(t.sample.id, t) for t in packing.tasks(taken=False)])
        if packing.too_long:  # they begin again, without the limit
            self.schedule.record_round()
            self._put_off(packing.too_long)
            self.schedule.begin_loop(loop.stages, NoTail())
            packing.sure.update(packing.too_long)
            loop.make(self._begin(packing.too_long, limited=False))
            loop.finish()

    def take(self) -> list[int]:
        """The prompts of the choice are trained on, in the stream's order."""
        schedule, packing = self.schedule, self._packing
        self._put_off(packing.choice.put_off)
        schedule.metrics["samples/put_off"] = float(len(packing.choice.put_off))
        schedule.metrics["samples/limit_tokens"] = float(packing.limit or 0)
        positions = sorted(packing.choice.taken)
        for position in positions:
            del self._waiting[position]
        self._longest.append(_longest([task.sample for task in packing.tasks(taken=True)]))
        return positions

    def _begin(self, positions: Sequence[int], limited: bool = True) -> list[GenerationTask]:
        """Begin all samples of these prompts; with `limited` none grows longer than the limit."""
        tasks = self.schedule.begin([(p, self._waiting[p].prompt) for p in positions])
        limit = self._packing.limit
        if limited and limit is not None:
            tasks = [_limited(task, limit) for task in tasks]
            self.schedule.groups.update(tasks)
        return tasks

    def _withdraw(self, tasks: Sequence[GenerationTask]) -> None:
        """Discard the tokens of samples that this step does not train on."""
        for task in tasks:
            id = task.sample.id
            num = 0
            if self.schedule.groups.ledger.is_finished(id):
                num = task.sample.response_tokens
            elif task.parked is not None:
                num = task.parked.tokens[task.parked.ids.index(id)]
                num -= self.schedule.length_model.prompt_tokens(task.prompt)
            self.schedule.metrics["samples/discarded_tokens"] += num
        ids = [task.sample.id for task in tasks]
        self.schedule.groups.ledger.withdraw(ids)
        self.schedule.groups.withdraw({id.prompt for id in ids})
        if ids:
            self.schedule.groups.turns.forget(ids)
            self.schedule.executor.release(ids)

    # -- the choice ----------------------------------------------------------------------------

    def _new_packing(self) -> _Packing:
        """The prompts that wait, those expected to be short first, and what is known of them."""
        predicted = self.schedule.length_model.predict(x.prompt for x in self._waiting.values())
        expected = {
            position: max(tokens, float(x.seen))
            for (position, x), tokens in zip(self._waiting.items(), predicted, strict=True)
        }
        order = sorted(expected, key=lambda position: (expected[position], position))
        seen, cycle = [*chain(*self._longest)], self.cycle_steps * self._wanted
        limit = self.limit_tokens or limit_of(seen, self.cycle_steps, cycle)
        if len(order) == self._wanted:  # the last step of the cycle takes all of them
            limit = None
        fits: dict[int, bool] = {}
        if limit is not None:
            fits = {p: False for p in order if self._waiting[p].seen >= limit}
        return _Packing(order, limit, fits, choose(order, self._wanted, fits), self.schedule.groups)

    def _decided(self) -> bool:
        """Choose by what has finished, let stages start on prompts that are taken for sure."""
        self._learn_fits()
        packing = self._packing
        sure = [p for p in packing.choice.taken if self._is_sure(packing, p)]
        self.schedule.loop.stages.start(p for p in sure if p not in packing.sure)
        packing.sure.update(sure)
        choice = packing.choice
        return choice.is_final and all(p in sure or not packing.fits[p] for p in choice.taken)

    def _learn_fits(self) -> None:
        """Choose by the samples that have finished."""
        packing, finished = self._packing, self.schedule.groups.ledger.is_finished
        for position, group in self.schedule.groups.open.items():
            if position in packing.fits:
                continue
            ended = [task for id, task in group.tasks.items() if finished(id)]
            if any(map(self._is_cut, ended)):
                packing.fits[position] = False
            elif len(ended) == len(group.tasks):
                packing.fits[position] = True
        packing.choice = choose(packing.order, self._wanted, packing.fits)

    def _is_cut(self, task: GenerationTask) -> bool:
        """Whether a finished sample has reached the limit without an end of its own.

        A conversation may also have reached its number of turns, which is an end of its own.
        """
        scalars = task.sample.scalars
        cut = scalars.get(OUT_OF_TOKENS) if task.converses else scalars["finish"] == "length"
        if not cut:
            return False
        own = self.schedule.sampling(task.stage)
        assert own is not None
        assert task.sampling is not None
        return task.sampling.max_new_tokens < own.max_new_tokens

    def _is_sure(self, packing: _Packing, position: int) -> bool:
        """Whether a taken prompt fits, and all its samples are there: a death may have some."""
        fits = packing.fits.get(position, False)
        return fits and self.schedule.groups.is_complete(position)

    def _put_off(self, positions: Sequence[int]) -> None:
        """A response of each of these prompts was longer than the limit."""
        limit = self._packing.limit
        assert limit is not None or not positions
        for position in positions:
            waiting = self._waiting[position]
            waiting.seen = max(waiting.seen, limit or 0)


def _limited(task: GenerationTask, limit: int) -> GenerationTask:
    """The task with at most `limit` response tokens."""
    assert task.sampling is not None
    sampling = replace(task.sampling, max_new_tokens=min(limit, task.sampling.max_new_tokens))
    expected = min(float(limit), task.total)
    return replace(task, sampling=sampling, total=expected, tokens=expected)


def _longest(samples: Sequence[Sample]) -> list[int]:
    """The most response tokens of each prompt."""
    longest: dict[int, int] = {}
    for sample in samples:
        most = longest.get(sample.id.prompt, 0)
        longest[sample.id.prompt] = max(most, sample.response_tokens)
    return list(longest.values())


def check_packed(graph: Graph) -> None:
    """Raise `ValueError`, with what is allowed, for a recipe whose prompts cannot wait."""
    check_generates_once(graph)
    stages = graph.stages.values()
    for stage in stages:
        if isinstance(stage, TakeStage):
            raise ValueError(
                f"a recipe without take (stage {stage.name!r} asks for prompts as it needs them, "
                "and packed orders those of several steps beforehand)"
            )
        if isinstance(stage, AnswersStage):
            raise ValueError(
                f"a recipe whose responses are all generated (stage {stage.name!r} has the "
                "dataset's own, whose lengths do not make a step long)"
            )
    if not any(isinstance(stage, GenerateStage) for stage in stages):
        raise ValueError("a recipe that generates")
