"""Held-out evaluation of any number of sets, through the same schedule as training."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from hybridrl.config import (
    Config,
    EvalSetConfig,
    FusedScheduleConfig,
    RewardKind,
    ScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.config.evaluation import MAIN
from hybridrl.data import Item
from hybridrl.driver.accuracy import JudgedPrompt, accuracy_metrics
from hybridrl.driver.episodes import EnvironmentFailed
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.schedule_factory import make_guest, make_schedule, sampling_of
from hybridrl.flow import Flow, Graph
from hybridrl.flow.executor import Sampling
from hybridrl.flow.judgements import JudgeFailed, check_failed_share, with_parts
from hybridrl.flow.ledger import DropReason
from hybridrl.flow.roles import Judge
from hybridrl.flow.sample import Sample
from hybridrl.schedule import StepResult
from hybridrl.schedule.base import Schedule
from hybridrl.schedule.guest import GuestSteps, GuestWork, may_be_guest
from hybridrl.schedule.lost_samples import InstanceDied
from hybridrl.telemetry.run import Telemetry

logger = logging.getLogger(__name__)

Record = Callable[[str, int, Sequence[Sample]], None]
"""Called with a set's name, the step, and its samples in the items' order, which ranks hold yet."""

ANSWER = "answer"
"""The scalar with the judged text of an evaluated response."""


class HeldOutEvaluation:
    """The held-out evaluation of a run: each set at most once a step, each recorded.

    `last` has the step and the metrics of each set's latest, `before` all metrics before the
    recipe's first step. Both are part of a checkpoint. `graphs` has a graph for each set that the
    recipe's model can be evaluated on, `items` the prompts.

    Where the schedule that trains takes guests, sets that need its instances alone are evaluated
    while training goes on (`begin`); `ended` is called with the step and the metrics of each set.
    """

    def __init__(
        self,
        config: Config,
        graphs: Mapping[str, Graph],
        items: Mapping[str, Sequence[Item]],
        executor: RayExecutor,
        telemetry: Telemetry,
        record: Record,
    ) -> None:
        self.config, self.graphs, self.items = config, graphs, items
        self.executor, self.telemetry, self.record = executor, telemetry, record
        self.last: dict[str, tuple[int, dict[str, float]]] = {}
        self.before: dict[str, float] = {}
        self.schedule: Schedule | None = None
        """The schedule that trains."""
        self.under_way: int | None = None
        """The step after which sets are evaluated that training has not waited for."""
        self.ended: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
        self._failure: EnvironmentFailed | JudgeFailed | None = None
        """What has ended an evaluation under which training went on; a step's end raises it."""

    def at(self, step: int, steps_trained: int | None = None) -> dict[str, float]:
        """Metrics of the sets that are due at the run's present `step`, once they are there.

        Those are the ones whose `every` divides the recipe's `steps_trained`; without it, all.
        """
        self.wait()
        metrics: dict[str, float] = {}
        for name in self._due(steps_trained):
            metrics |= self._of_set(name, step)
        return metrics

    def begin(self, step: int, steps_trained: int) -> dict[str, float]:
        """Begin what is due, as `at` says; gives the metrics of sets that training waits for."""
        due, schedule = self._due(steps_trained), self.schedule
        self._check()
        if not due:
            return {}
        self.wait()
        guests = list[str]()
        if schedule is not None and schedule.takes_guests:
            guests = [name for name in due if may_be_guest(self.graphs[name], self.executor)]
        metrics: dict[str, float] = {}
        for name in due:
            if name not in guests:
                metrics |= self._of_set(name, step)
        left = [name for name in guests if not self._is_known(name, step)]
        if left:
            assert schedule is not None
            self.under_way = step
            schedule.admit(lambda version: GuestWork(version, self._as_guest(left, step, version)))
        return metrics

    def wait(self) -> None:
        """Wait until no evaluation is under way; raises what has ended it early."""
        if self.under_way is not None:
            assert self.schedule is not None
            self.schedule.wait_for_guest()
        self._check()

    def accuracy_at(self, step: int) -> float | None:
        """`eval_accuracy` after `step`; None where it is not known, perhaps not yet."""
        of_step, metrics = self.last.get(MAIN, (None, {}))
        return metrics.get("eval_accuracy") if of_step == step else None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _due(self, steps_trained: int | None) -> list[str]:
        every = {name: self.config.eval.sets[name].every for name in self.graphs}
        if steps_trained is None:
            return [*every]
        return [name for name, number in every.items() if number and steps_trained % number == 0]

    def _is_known(self, name: str, step: int) -> bool:
        return name in self.last and self.last[name][0] == step

    def _of_set(self, name: str, step: int) -> dict[str, float]:
        if self._is_known(name, step):
            return self.last[name][1]
        start = self._note_begin(name, step)
        if self.schedule is not None:
            self.schedule.pause()
        graph, items = self.graphs[name], self.items[name]
        metrics = evaluate(self.config, name, graph, self.executor, items, step, self.record)
        self._note_end(name, step, start, metrics)
        return metrics

    def _as_guest(self, names: Sequence[str], step: int, version: int) -> GuestSteps:
        """Evaluate sets one after the other on instances whose schedule trains meanwhile."""
        for name in names:
            start = self._note_begin(name, step)
            graph, items = self.graphs[name], self.items[name]
            how, prompts = _sampling(self.config, name), enumerate(items)
            parts = self.config, graph, self.executor, prompts, how, len(items)
            guest = make_guest(*parts, version)
            guest.start(step)
            result = yield guest
            try:
                metrics = _metrics(
                    self.config, name, graph, self.executor, result, step, self.record
                )
            except (EnvironmentFailed, JudgeFailed) as error:  # amid a step of training
                self._failure = error
            guest.release()
            if name == names[-1] or self._failure is not None:
                self.under_way = None
            if self._failure is not None:
                return
            self._note_end(name, step, start, metrics)

    def _note_begin(self, name: str, step: int) -> float:
        """Say that a set is evaluated; gives the time."""
        self.telemetry.stage(f"evaluating {name}")
        logger.info("evaluation of %s begins at step %d", name, step)
        return time.time()

    def _note_end(self, name: str, step: int, start: float, metrics: dict[str, float]) -> None:
        self.telemetry.log(step, metrics)
        seconds = time.time() - start
        self.telemetry.event("evaluation", set=name, step=step, seconds=seconds, **metrics)
        logger.info("evaluation of %s ended", name)
        self.last[name] = (step, metrics)
        self.ended(step, metrics)

    def state(self) -> list[Any]:
        """The driver's state for a checkpoint."""
        return [[name, *latest] for name, latest in self.last.items()]

    def load_state(self, state: Sequence[Any]) -> None:
        """Take a `state` back; an old one is the step and the metrics of `main`."""
        if len(state) == 2 and isinstance(state[0], int):
            state = [[MAIN, *state]]
        self.last = {name: (step, metrics) for name, step, metrics in state}


def failed_shares(config: Config) -> dict[str, float]:
    """The largest share of responses, by judge, on which it may fail."""
    return {role: judge.max_failed_share for role, judge in config.whole_judges.items()}


def evaluation_graphs(config: Config, recipe: Graph) -> dict[str, Graph]:
    """The evaluation of a recipe by set; none where nothing can be evaluated.

    A recipe that trains the actor is evaluated on every set: responses, judged. One that trains a
    reward model on two columns of responses is on `main` alone: scores of the held-out pairs.
    """
    if "actor" in recipe.learned:
        return {name: with_parts(_responses(config, name), config) for name in config.eval.sets}
    if "reward" in recipe.learned and len(recipe.columns) == 2:
        return {MAIN: _pairs(recipe.columns)} if MAIN in config.eval.sets else {}
    return {}


def _responses(config: Config, name: str) -> Graph:
    flow, settings = Flow(), config.eval.sets[name]
    samples = flow.actor.generate(
        flow.prompts,
        num_samples=settings.num_samples,
        name=f"eval_{name}",
    )
    role = config.judge_of_set(name)
    reads_text = config.judge_of(role).kind not in (RewardKind.sum, RewardKind.model)
    votes = settings.num_samples > 1 and reads_text
    flow.collect(Judge(role).score(samples, name="reward", text=ANSWER if votes else None))
    flow.graph.check()
    return flow.graph


def _pairs(columns: Sequence[str]) -> Graph:
    flow = Flow()
    for column in columns:
        flow.collect(flow.reward.learned_score(flow.targets(column, name=f"eval_{column}")))
    flow.graph.check()
    return flow.graph


def evaluate(
    config: Config,
    name: str,
    graph: Graph,
    executor: RayExecutor,
    items: Sequence[Item],
    step: int,
    record: Record,
) -> dict[str, float]:
    """Metrics of one set's graph; see `of_answers` and `of_pairs`.

    Of several samples a prompt `record` gets the first, also where its judge has failed. Raises
    EnvironmentFailed or JudgeFailed where too many have failed.
    """
    sampling = _sampling(config, name)
    kind: ScheduleConfig = FusedScheduleConfig()
    if config.cluster.home != "actor":  # the ranks that train have nothing to do
        kind = SerialScheduleConfig()
    elif config.schedule.serial_batches and not config.schedule.follows:  # a record of training
        kind = config.schedule
    while True:
        parts = config, kind, graph, executor, enumerate(items), sampling, len(items)
        schedule = make_schedule(*parts)
        with executor.apart():
            try:
                result = schedule.run_step(step)
                break
            except InstanceDied as died:
                logger.warning("the evaluation of %s begins again: %s", name, died)
                executor.discard()
                schedule.release()
                if executor.episodes is not None:
                    executor.episodes.forget(graph)
    metrics = _metrics(config, name, graph, executor, result, step, record)
    schedule.release()
    return metrics


def _sampling(config: Config, name: str) -> Sampling:
    """How the responses of a set are drawn."""
    settings = config.eval.sets[name]
    longest = settings.max_new_tokens or config.rollout.max_new_tokens
    return sampling_of(config, settings, longest, settings.drawn_at)


def _metrics(
    config: Config,
    name: str,
    graph: Graph,
    executor: RayExecutor,
    result: StepResult,
    step: int,
    record: Record,
) -> dict[str, float]:
    """Metrics of the samples of a set, which the ranks still hold, and their record.

    Raises EnvironmentFailed, or else JudgeFailed, where too many have failed, once all is recorded.
    """
    samples = result.samples
    judged_in_vain = {id for id, drop in result.dropped.items() if drop.reason is DropReason.JUDGE}
    shown = {sample.id for sample in samples} | judged_in_vain
    record(name, step, [s for s in result.dispatched if s.id.k == 0 and s.id in shown])
    which = f"the evaluation of {name}"
    if executor.episodes is not None:
        executor.episodes.check(which, graph)
    check_failed_share(graph, result.dispatched, failed_shares(config), which)
    if not graph.columns:
        return of_answers(name, config.eval.sets[name], samples)
    by_branch: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_branch[sample.id.branch].append(sample)
    return of_pairs(*(by_branch[f"eval_{column}"] for column in graph.columns))


def of_pairs(chosen: Sequence[Sample], rejected: Sequence[Sample]) -> dict[str, float]:
    """`eval_accuracy`: pairs whose chosen response scores higher, ties by half; `eval_margin`."""
    other = {s.id.prompt: s.number("learned_reward") for s in rejected}
    margins = [s.number("learned_reward") - other[s.id.prompt] for s in chosen]
    return {
        "eval_accuracy": _mean((margin > 0) + (margin == 0) / 2 for margin in margins),
        "eval_margin": _mean(margins),
    }


def of_answers(name: str, settings: EvalSetConfig, samples: Sequence[Sample]) -> dict[str, float]:
    """`eval/NAME/...`: `accuracy_metrics`, `reward`, `response_tokens`; of main `eval_accuracy`.

    A sample that was dropped has no reward and is left out, with its prompt's others. So has one
    whose judge has failed, unless that counts as 0 (`on_failure=zero`).
    """
    by_prompt: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample.id.prompt].append(sample)
    whole = [group for group in by_prompt.values() if len(group) == settings.num_samples]
    prompts = [
        JudgedPrompt(
            right=tuple(s.number("reward") >= settings.success_threshold for s in group),
            answers=tuple(str(s.scalars[ANSWER]) for s in group if ANSWER in s.scalars),
        )
        for group in whole
    ]
    metrics = {
        **accuracy_metrics(prompts, settings.sizes),
        "reward": _mean(s.number("reward") for s in samples),
        "response_tokens": _mean(s.model_tokens for s in samples),
    }
    metrics = {f"eval/{name}/{key}": value for key, value in metrics.items()}
    if name == MAIN and prompts:
        metrics["eval_accuracy"] = metrics[f"eval/{name}/avg@{settings.num_samples}"]
    return metrics


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return fmean(numbers) if numbers else 0.0
