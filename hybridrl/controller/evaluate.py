"""Held-out evaluation: greedy accuracy and pass@k, through the same schedule as training."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import comb

from hybridrl.config import Config, Schedule
from hybridrl.controller.executor import RayExecutor
from hybridrl.controller.schedules import make_schedule
from hybridrl.data import Item
from hybridrl.flow import Flow, Graph
from hybridrl.flow.executor import Sampling
from hybridrl.flow.sample import Sample


def evaluation_graph(num_samples: int) -> Graph:
    """Greedy answers, and `num_samples` at temperature 1 where that is above 1, all scored."""
    flow = Flow()
    greedy = flow.actor.generate(flow.prompts, num_samples=1, temperature=0.0, name="eval")
    flow.collect(flow.reward.score(greedy))
    if num_samples > 1:
        drawn = flow.actor.generate(
            flow.prompts, num_samples=num_samples, temperature=1.0, name="eval_drawn"
        )
        flow.collect(flow.reward.score(drawn))
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
    """Metrics `eval_accuracy`, `eval_reward`, `eval_pass_at_k`.

    `record` gets the greedy samples, in the items' order, while the ranks still hold them.
    """
    items = items[: config.eval.num_prompts or None]
    sampling = Sampling(max_new_tokens=config.rollout.max_new_tokens)
    name = Schedule.serial if config.schedule is Schedule.serial else Schedule.fused
    schedule = make_schedule(config, name, graph, executor, enumerate(items), sampling, len(items))
    samples = schedule.run_step(step).samples
    greedy = [s for s in samples if s.id.branch == "eval"]
    record(greedy)
    schedule.release()
    metrics = {
        "eval_accuracy": _share(_right(config, s) for s in greedy),
        "eval_reward": _share(float(s.scalars["reward"]) for s in greedy),
        "eval_response_tokens": _share(s.response_tokens for s in greedy),
    }
    k = config.eval.num_samples
    if k > 1:
        by_prompt: dict[int, list[bool]] = defaultdict(list)
        for sample in samples:
            if sample.id.branch == "eval_drawn":
                by_prompt[sample.id.prompt].append(_right(config, sample))
        metrics["eval_pass_at_1"] = _share(pass_at_k(len(r), sum(r), 1) for r in by_prompt.values())
        metrics["eval_pass_at_k"] = _share(pass_at_k(len(r), sum(r), k) for r in by_prompt.values())
    return metrics


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def _right(config: Config, sample: Sample) -> bool:
    return float(sample.scalars["reward"]) >= config.eval.success_threshold


def _share(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
