"""Held-out evaluation: greedy accuracy and pass@k, through the same schedule as training."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import comb

from hybridrl.config import Config, FusedScheduleConfig
from hybridrl.controller.ray_executor import RayExecutor
from hybridrl.controller.schedule_factory import make_schedule
from hybridrl.data import Item
from hybridrl.flow import Flow, Graph
from hybridrl.flow.executor import Sampling
from hybridrl.flow.sample import Sample
from hybridrl.telemetry.run import Telemetry

logger = logging.getLogger(__name__)


class HeldOutEvaluation:
    """The held-out evaluation of a run: at most one a step, each recorded.

    `last` has the step and the metrics of the latest, `before` the metrics before the recipe's
    first step. Both are part of a checkpoint. `graph` is None where nothing can be evaluated.
    """

    def __init__(
        self,
        config: Config,
        graph: Graph | None,
        items: Sequence[Item],
        executor: RayExecutor,
        telemetry: Telemetry,
        record: Callable[[Sequence[Sample]], None],
    ) -> None:
        """`record` gets the samples to show, as in `evaluate`."""
        self.config, self.graph, self.items = config, graph, items
        self.executor, self.telemetry, self.record = executor, telemetry, record
        self.last: tuple[int, dict[str, float]] = (-1, {})
        self.before: dict[str, float] = {}

    def at(self, step: int) -> dict[str, float]:
        """Metrics at the run's present `step`; none where nothing can be evaluated."""
        if self.graph is None:
            return {}
        if self.last[0] == step:
            return self.last[1]
        self.telemetry.stage("evaluating")
        logger.info("evaluation begins at step %d", step)
        start = time.time()
        metrics = evaluate(self.config, self.graph, self.executor, self.items, step, self.record)
        self.telemetry.log(step, metrics)
        self.telemetry.event("evaluation", step=step, seconds=time.time() - start, **metrics)
        logger.info("evaluation ended")
        self.last = (step, metrics)
        return metrics


def evaluation_graph(recipe: Graph, num_samples: int) -> Graph | None:
    """The evaluation of a recipe, if it has one.

    A recipe that trains the actor: greedy answers, and `num_samples` at temperature 1 where that is
    above 1, all judged. One that trains a reward model on two columns of responses: their scores.
    """
    flow = Flow()
    if "actor" in recipe.learned:
        greedy = flow.actor.generate(flow.prompts, num_samples=1, temperature=0.0, name="eval")
        flow.collect(flow.reward.score(greedy))
        if num_samples > 1:
            drawn = flow.actor.generate(
                flow.prompts, num_samples=num_samples, temperature=1.0, name="eval_drawn"
            )
            flow.collect(flow.reward.score(drawn))
    elif "reward" in recipe.learned and len(recipe.columns) == 2:
        for column in recipe.columns:
            flow.collect(flow.reward.learned_score(flow.targets(column, name=f"eval_{column}")))
    else:
        return None
    flow.graph.check()
    return flow.graph


def evaluate(
    config: Config,
    graph: Graph,
    executor: RayExecutor,
    items: Sequence[Item],
    step: int,
    record: Callable[[Sequence[Sample]], None],
) -> dict[str, float]:
    """Metrics of an `evaluation_graph`; see `of_answers` and `of_pairs`.

    `record` gets the greedy samples, or those of both columns, in the items' order, while the ranks
    still hold them.
    """
    items = items[: config.eval.num_prompts or None]
    sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens)
    kind = FusedScheduleConfig() if config.schedule.entry.may_be_stale else config.schedule
    schedule = make_schedule(config, kind, graph, executor, enumerate(items), sampling, len(items))
    samples = schedule.run_step(step).samples
    by_branch: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_branch[sample.id.branch].append(sample)
    record(by_branch["eval"] if not graph.columns else samples)
    schedule.release()
    if graph.columns:
        return of_pairs(*(by_branch[f"eval_{column}"] for column in graph.columns))
    return of_answers(config, by_branch["eval"], by_branch["eval_drawn"])


def of_pairs(chosen: Sequence[Sample], rejected: Sequence[Sample]) -> dict[str, float]:
    """`eval_accuracy`: pairs whose chosen response scores higher, ties by half; `eval_margin`."""
    other = {s.id.prompt: float(s.scalars["learned_reward"]) for s in rejected}
    margins = [float(s.scalars["learned_reward"]) - other[s.id.prompt] for s in chosen]
    return {
        "eval_accuracy": _mean((margin > 0) + (margin == 0) / 2 for margin in margins),
        "eval_margin": _mean(margins),
    }


def of_answers(
    config: Config, greedy: Sequence[Sample], drawn: Sequence[Sample]
) -> dict[str, float]:
    """`eval_accuracy`, `eval_reward`, `eval_response_tokens`, and of the drawn `eval_pass_at_k`."""
    metrics = {
        "eval_accuracy": _mean(_right(config, s) for s in greedy),
        "eval_reward": _mean(float(s.scalars["reward"]) for s in greedy),
        "eval_response_tokens": _mean(s.response_tokens for s in greedy),
    }
    k = config.eval.num_samples
    if k > 1:
        by_prompt: dict[int, list[bool]] = defaultdict(list)
        for sample in drawn:
            by_prompt[sample.id.prompt].append(_right(config, sample))
        metrics["eval_pass_at_1"] = _mean(pass_at_k(len(r), sum(r), 1) for r in by_prompt.values())
        metrics["eval_pass_at_k"] = _mean(pass_at_k(len(r), sum(r), k) for r in by_prompt.values())
    return metrics


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def _right(config: Config, sample: Sample) -> bool:
    return float(sample.scalars["reward"]) >= config.eval.success_threshold


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
