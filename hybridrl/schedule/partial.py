"""The partial schedule: more prompts than a step needs; unfinished ones resume in the next.

APRIL, active partial rollouts ("APRIL: Active Partial Rollouts in Reinforcement Learning to Tame
Long-tail Generation").
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any

from hybridrl.flow.graph import Graph, StageMethod, UpdateStage
from hybridrl.flow.ledger import Drop, DropReason
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule.base import Prompt
from hybridrl.schedule.groups import GenerationTask, tasks_of
from hybridrl.schedule.loop import Loop
from hybridrl.schedule.loop_schedule import SchedulePolicy, check_generates_once

_WINDOW_TURNS = 2  # of conversations, before it is looked whether enough has finished
ENDED = Drop(DropReason.RUN_ENDED, "unfinished when the run ended")
_METRICS = ("resumed", "parked", "off_policy_tokens", "trained_tokens", "staleness")


@dataclass(kw_only=True, eq=False)
class Partial(SchedulePolicy):
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

    Example, 2 wanted, over-provision 2, one sample a prompt: prompts 0 to 3 begin. 1 and 3 are done
    first and trained on. 0 and 2 continue with 4 and 5.

    `check_graph` refuses a recipe that generates in several stages of a step. Also where the
    ratio is taken against a single version's log-probabilities, without weights from the sampling
    policy to it (`rollout_weights`: decoupled PPO).
    """

    over_provision: float
    max_staleness: int
    keeps = True

    def __post_init__(self) -> None:
        assert 1 <= self.over_provision <= 1 + self.max_staleness
        self._wanted = self._version = 0
        self._converse = False  # some samples of the round have turns

    @classmethod
    def check_graph(cls, graph: Graph) -> None:
        """Raise `ValueError`, with what is allowed, for a recipe whose samples cannot be parked."""
        check_stale(graph, "serial or fused")

    # -- between steps -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The open prompts and their samples."""
        return {"open": self.schedule.groups.to_json()}

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue with the open prompts' samples."""
        self.schedule.load_open(state["open"], prompt_at, ranks)

    def close(self) -> dict[SampleId, Drop]:
        """The open prompts' samples are dropped."""
        return self.schedule.groups.drop_open(ENDED)

    # -- a step --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """No count yet."""
        self.schedule.metrics |= {f"samples/{name}": 0.0 for name in _METRICS}

    def pull(self, num: int) -> list[Prompt]:
        """Prompts are pulled as they are needed; `num` groups are wanted."""
        self._wanted = num
        return []

    def begin(self) -> list[GenerationTask]:
        """Open samples continue, and as many prompts as are missing join them."""
        schedule, groups = self.schedule, self.schedule.groups
        num = math.ceil(self._wanted * self.over_provision) - len(groups.open)
        pulled = list(islice(schedule.prompts, max(0, num)))
        if (got := len(groups.open) + len(pulled)) < self._wanted:
            raise ValueError(f"the prompts have ended: got {got}, wanted {self._wanted}")
        schedule.begin(pulled)
        open_ones = tasks_of(groups.open)
        tasks = [task for task in open_ones if not groups.ledger.is_finished(task.sample.id)]
        self._converse = any(task.converses for task in tasks)
        self._count("resumed", tasks)
        return tasks

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Let samples be made until enough groups are complete; then park the rest.

        Forward passes run afterwards, with all ranks free.
        """
        schedule, loop = self.schedule, self.schedule.loop
        self._version = schedule.executor.version
        loop.make(tasks)
        if self._converse:
            self._run_windows(loop)
        else:
            loop.run(self._enough, equal=True)
        stopped = loop.park(with_kv=schedule.limits.parks_kv)
        self._count("parked", stopped)
        loop.finish()
        schedule.groups.update(map(self._expected, stopped))

    def take(self) -> list[int]:
        """The oldest complete groups are trained on."""
        return self.schedule.groups.complete()[: self._wanted]

    def metrics(self, used: Sequence[Sample]) -> dict[str, float]:
        """Count the tokens of older weights among those trained, and the oldest sample's age."""
        spans = [span for sample in used for span in sample.spans if span.trained]
        generated = [span for span in spans if span.version >= 0]  # not the dataset's own
        old = sum(s.stop - s.start for s in generated if s.version < self._version)
        taken = self.schedule.groups.taken
        ages = [self.schedule.step - taken[sample.id.prompt].step for sample in used]
        return {
            "samples/off_policy_tokens": float(old),
            "samples/trained_tokens": float(sum(s.stop - s.start for s in spans)),
            "samples/staleness": float(max(ages, default=0)),
        }

    def _run_windows(self, loop: Loop) -> None:
        """Let conversations run in windows of a few turns until enough is complete after one.

        So what is made by then depends on turns alone, never on the times of replies. Within a
        window no sample waits for another. A queued one begins with a window.
        """
        turns, windows = loop.turns, self._windows()

        def rest() -> bool:
            return not loop.instances.in_flight and all(map(turns.rests, loop.held))

        while loop.unfinished and not self._enough():
            turns.close_window()
            loop.deal()
            turns.open_window(dict.fromkeys(loop.held, next(windows)))
            loop.run_held(rest)
        turns.close_window()

    def _windows(self) -> Iterator[int]:
        """Turns of the windows: first as many as those need that are likely trained, then few.

        They follow from turns of earlier steps, and so do not depend on time.
        """
        num = math.ceil(self._wanted * self.over_provision)
        turns = self.schedule.length_model.turns_of_prompt.sample(num)
        yield max(_WINDOW_TURNS, turns[self._wanted - 1] if turns else 0)
        yield from repeat(_WINDOW_TURNS)

    def _count(self, name: str, tasks: Sequence[GenerationTask]) -> None:
        """Count the parked ones of these."""
        parked = sum(self.schedule.groups.parked(task) is not None for task in tasks)
        self.schedule.metrics[f"samples/{name}"] += parked

    def _expected(self, task: GenerationTask) -> GenerationTask:
        """A stopped task with the tokens that are still expected."""
        done = self.schedule.response_tokens(task)
        return replace(task, tokens=max(1.0, task.total - done)) if done else task

    def _enough(self) -> bool:
        """Enough groups are complete, and those that stay can be trained before they are too old.

        The oldest complete ones are trained now, `wanted` in every later step. So h steps from now
        at most h times as many may have reached their last step.
        """
        groups, now = self.schedule.groups, self.schedule.step
        complete = groups.complete()
        # A death may have taken samples of an earlier round of this step.
        whole = all(map(groups.is_complete, groups.taken))
        if not whole or len(complete) < self._wanted:
            return False
        chosen = {*complete[: self._wanted]}
        open_ones = groups.open.items()
        last = [group.step + self.max_staleness for p, group in open_ones if p not in chosen]
        return all(
            sum(step <= now + later for step in last) <= self._wanted * later
            for later in range(self.max_staleness + 1)
        )


def check_stale(graph: Graph, on_policy: str) -> None:
    """Raise `ValueError`, with what is allowed, for a recipe whose tokens cannot be stale.

    `on_policy` names the schedules under which they are not.
    """
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
                f"{on_policy}: the loss of stage {update.name!r} has no ratio, so samples must be "
                "the present policy's"
            )
        field = update.fields.get("old_log_probs")
        if field in single and "rollout_weights" not in update.inputs:
            raise ValueError(
                "a recipe that takes old_log_probs as the rollout made them, or has a correction "
                "(recipe.correction.old_log_probs=rollout, recipe.correction.weights=truncate): "
                "tokens may be of "
                f"older weights, and stage {single[field]!r} gives those of the present ones"
            )
