"""The partial schedule: more prompts than a step needs; unfinished ones resume in the next.

APRIL, active partial rollouts ("APRIL: Active Partial Rollouts in Reinforcement Learning to Tame
Long-tail Generation").
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, repeat
from typing import Any, Self

from hybridrl.config import ParkedKV, PartialScheduleConfig, ScheduleConfig
from hybridrl.flow.executor import Executor
from hybridrl.flow.graph import Graph, SourceStage, StageMethod, UpdateStage
from hybridrl.flow.ledger import Drop, DropReason
from hybridrl.flow.lengths import RANKERS, LengthModel
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.turns import RecordDiffers, RoundOrder
from hybridrl.schedule.base import Batch, PendingSample, Prompt, ScheduleParts, StepSettings
from hybridrl.schedule.generation_task import GenerationTask, RoundLimits
from hybridrl.schedule.groups import tasks_of
from hybridrl.schedule.record import run_order, run_timed, run_windows
from hybridrl.schedule.streaming import StreamingSchedule, check_generates_once
from hybridrl.schedule.tail import NoTail

_WINDOW_TURNS = 2  # of conversations, before it is looked whether enough has finished
ENDED = Drop(DropReason.RUN_ENDED, "unfinished when the run ended")


class PartialSchedule(StreamingSchedule):
    """Trains on the groups that are complete first, and leaves the long ones for later steps.

    A step begins with `over_provision` times the prompts that it wants, those of earlier steps
    among them. It stops when as many groups are complete as are wanted, and parks the rest with
    their tokens. They continue in the next step under the new weights. So a response may have spans
    of several versions, each with the log-probabilities of the version that made it.

    `max_staleness` bounds the steps between a sample's first token and its training. A step stops
    only when all pending groups can still be trained in time, at so many groups a step. So
    `over_provision` is at most 1 + `max_staleness`. So no token is thrown away.

    Which groups a step trains on follows from decode steps, not from time: instances decode in
    equal rounds, and the oldest complete groups are taken. Conversations go on in windows of a few
    turns each, so that it follows from turns, and not from the times of replies. Rewards start as
    samples finish, forward passes when generation has stopped.

    With `timed` they go on until enough is complete, and a step waits for no other reply. Then it
    does follow from times, and `StepResult.turn_orders` has what replies came into its rounds. With
    the `turn_orders` of such a run, by step, conversations make the same turns in each round.

    Example, 2 wanted, over-provision 2, one sample a prompt: prompts 0 to 3 begin. 1 and 3 are done
    first and trained on. 0 and 2 continue with 4 and 5.

    Raises `ValueError` for a recipe that generates in several stages of a step. Also where the
    ratio is taken against a single version's log-probabilities, without weights from the sampling
    policy to it (`rollout_weights`: decoupled PPO).
    """

    def __init__(
        self,
        graph: Graph,
        executor: Executor,
        prompts: Iterator[Prompt],
        settings: StepSettings,
        *,
        limits: RoundLimits,
        length_model: LengthModel,
        over_provision: float,
        max_staleness: int,
        timed: bool = False,
        turn_orders: Mapping[int, Sequence[RoundOrder]] | None = None,
    ) -> None:
        check_partial(graph)
        assert 1 <= over_provision <= 1 + max_staleness
        step = (graph, executor, prompts, settings)
        super().__init__(*step, limits=limits, length_model=length_model)
        self.over_provision, self.max_staleness = over_provision, max_staleness
        self.timed, self.turn_orders = timed, turn_orders
        self._wanted = self._version = 0

    # -- between steps -------------------------------------------------------------------------

    @classmethod
    def build(cls, parts: ScheduleParts, config: ScheduleConfig) -> Self:
        """The schedule with its settings, a `PartialScheduleConfig`."""
        assert isinstance(config, PartialScheduleConfig)
        return cls(
            *parts.step,
            limits=RoundLimits(
                max_held=parts.max_held,
                chunk_tokens=parts.chunk_tokens,
                stale_kv=config.parked_kv is ParkedKV.keep,
            ),
            length_model=LengthModel(key_of=parts.key_of, ranker=RANKERS[config.length_ranker]()),
            over_provision=config.over_provision,
            max_staleness=config.max_staleness,
            timed=parts.timed,
            turn_orders=parts.turn_orders,
        )

    @classmethod
    def check_graph(cls, graph: Graph) -> None:
        """Raise `ValueError`, with what is allowed, for a recipe whose samples cannot be parked."""
        check_partial(graph)

    def state_dict(self) -> dict[str, Any]:
        """With the pending prompts and their samples."""
        return super().state_dict() | {"open": self._groups.to_json()}

    def load_state_dict(
        self, state: Mapping[str, Any], *, prompt_at: Callable[[int], Any], num_ranks: int
    ) -> None:
        """Continue from a `state_dict`, with the pending prompts' samples."""
        super().load_state_dict(state, prompt_at=prompt_at, num_ranks=num_ranks)
        self._groups.load(state["open"], prompt_at, num_ranks, self._sampling)
        for position, group in self._groups.open.items():
            for stage in dict.fromkeys(task.stage for task in group.tasks.values()):
                self._stages_of(stage).tracker.choose(position)

    def pending(self) -> tuple[PendingSample, ...]:
        """Return the samples of pending prompts that are parked or finished."""
        return self._groups.pending()

    def restore_parked(self, state: Any) -> None:
        """Set the reference to the parked tokens."""
        self._groups.restore_parked(state)

    def close(self) -> dict[SampleId, Drop]:
        """End the run: unfinished samples are dropped."""
        dropped = dict.fromkeys(self._pending_ids(), ENDED)
        self._ledger.drop(dropped, ENDED)
        self._groups.clear()
        self.release()
        return dropped

    def _pending_ids(self) -> Collection[SampleId]:
        return {task.sample.id for task in tasks_of(self._groups.open)}

    # -- a step --------------------------------------------------------------------------------

    def _begin_step(self, step: int) -> None:
        super()._begin_step(step)
        for name in ("resumed", "parked", "off_policy_tokens", "trained_tokens", "staleness"):
            self._metrics[f"samples/{name}"] = 0.0
        self._groups.end_step()

    def _pull(self, num: int) -> Batch:
        """Prompts are pulled as they are needed; `num` groups are wanted."""
        self._wanted, self._pulled = num, []
        return {"prompts": []}

    def _run_round(self, makers: Sequence[SourceStage], batch: Batch) -> Batch:
        """Generate until enough groups are complete, park the rest, run the early stages."""
        # Pending samples continue, and new prompts join them.
        stages, loop = self._stages_of(makers[0]), self._loop
        self._top_up(makers, batch)
        pending = tasks_of(self._groups.open)
        tasks = [task for task in pending if not self._ledger.is_finished(task.sample.id)]
        converse = any(task.converses for task in tasks)
        order = self._recorded_order() if converse else None  # others have none
        if order is not None:
            tasks = [task for task in tasks if not task.converses or task.sample.id in order]
        self._metrics["samples/resumed"] += self._num_parked(tasks)
        self._enter_for([*makers, *stages.tracker.computes])
        self._version = self.executor.version
        self._begin_round(stages, NoTail())
        loop.make(tasks)
        # Decode until enough is complete, then stop; forward passes run with all ranks free.
        if not converse:
            loop.run(self._enough, equal=True)
        elif order is not None:
            run_order(loop, order)
        elif self.timed:
            order = run_timed(loop, self._enough)
        else:
            run_windows(loop, self._enough, self._windows())
        if order is not None:
            self._turn_orders.append(order)
        stopped = loop.park(with_kv=self.limits.stale_kv)
        self._metrics["samples/parked"] += self._num_parked(stopped)
        loop.finish()
        self._groups.update(map(self._expected, stopped))
        # The oldest complete groups are trained on.
        positions, begun = self._groups.complete()[: self._wanted], self._groups.open
        groups = {position: begun[position] for position in positions}
        self._pulled = [(position, group.prompt) for position, group in groups.items()]
        return self._end_round(tasks_of(groups), positions)

    def _recorded_order(self) -> RoundOrder | None:
        """Return the order of the step's next round, where a record is followed."""
        if self.turn_orders is None:
            return None
        orders, done = self.turn_orders.get(self._step, ()), len(self._turn_orders)
        if done >= len(orders):
            raise RecordDiffers(f"round {done + 1} of step {self._step} is not in the record")
        return orders[done]

    def _windows(self) -> Iterator[int]:
        """Turns of the windows: first as many as those need that are likely trained, then few.

        They follow from turns of earlier steps, and so do not depend on time.
        """
        num = math.ceil(self._wanted * self.over_provision)
        turns = self.length_model.turns_of_prompt.sample(num)
        yield max(_WINDOW_TURNS, turns[self._wanted - 1] if turns else 0)
        yield from repeat(_WINDOW_TURNS)

    def _num_parked(self, tasks: Sequence[GenerationTask]) -> int:
        return sum(self._groups.parked(task) is not None for task in tasks)

    def _expected(self, task: GenerationTask) -> GenerationTask:
        """A stopped task with the tokens that are still expected."""
        parked = self._groups.parked(task)
        if parked is None:
            return task
        done = parked.tokens[parked.ids.index(task.sample.id)]
        done -= len(self.length_model.key_of(task.prompt).prompt_ids)
        return replace(task, tokens=max(1.0, task.total - done))

    def _top_up(self, makers: Sequence[SourceStage], batch: Batch) -> None:
        """Begin as many prompts as are missing; those that are pending are the oldest."""
        num = math.ceil(self._wanted * self.over_provision) - len(self._groups.open)
        pulled = list(islice(self.prompts, max(0, num)))
        if len(self._groups.open) + len(pulled) < self._wanted:
            raise ValueError(
                f"the prompts have ended: got {len(self._groups.open) + len(pulled)}, "
                f"wanted {self._wanted}"
            )
        for stage in makers:
            self._new_tasks(stage, pulled, batch)

    def _enough(self) -> bool:
        """Enough groups are complete, and those that stay can be trained before they are too old.

        The oldest complete ones are trained now, `wanted` in every later step. So h steps from now
        at most h times as many may have reached their last step.
        """
        complete = self._groups.complete()
        # A death may have taken samples of an earlier round of this step.
        whole = all(map(self._groups.is_complete, self._groups.taken))
        if not whole or len(complete) < self._wanted:
            return False
        chosen = {*complete[: self._wanted]}
        open_ones = self._groups.open.items()
        last = [group.step + self.max_staleness for p, group in open_ones if p not in chosen]
        return all(
            sum(step <= self._step + later for step in last) <= self._wanted * later
            for later in range(self.max_staleness + 1)
        )

    def _summary(self, used: Sequence[Sample], num_dropped: int) -> dict[str, float]:
        """With the tokens of older weights among those trained, and the oldest sample's age."""
        spans = [span for sample in used for span in sample.spans if span.trained]
        generated = [span for span in spans if span.version >= 0]  # not the dataset's own
        old = sum(s.stop - s.start for s in generated if s.version < self._version)
        self._metrics["samples/off_policy_tokens"] = float(old)
        self._metrics["samples/trained_tokens"] = float(sum(s.stop - s.start for s in spans))
        taken = self._groups.taken
        ages = [self._step - taken[sample.id.prompt].step for sample in used]
        self._metrics["samples/staleness"] = float(max(ages, default=0))
        return super()._summary(used, num_dropped)


def check_partial(graph: Graph) -> None:
    """Raise `ValueError`, with what is allowed, for a recipe whose samples cannot be parked."""
    check_generates_once(graph)
    updates = [stage for stage in graph.stages.values() if isinstance(stage, UpdateStage)]
    single = {
        field: stage.name
        for stage in graph.stages.values()
        if stage.role == "actor" and stage.method is StageMethod.LOG_PROBS
        for field in stage.outputs
    }
    for update in updates:
        if update.loss.on_policy:
            raise ValueError(
                f"serial or fused: the loss of stage {update.name!r} has no ratio, so samples must "
                "be the present policy's"
            )
        field = update.fields.get("old_log_probs")
        if field in single and "rollout_weights" not in update.inputs:
            raise ValueError(
                "a recipe that takes old_log_probs as the rollout made them, or has a correction "
                "(recipe.correction.old_log_probs=rollout, recipe.correction.weights=truncate): "
                "tokens are of several "
                f"versions, and stage {single[field]!r} gives those of the present weights"
            )
