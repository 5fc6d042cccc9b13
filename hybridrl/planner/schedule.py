"""Replays the same samples under every schedule, in virtual time."""

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from hybridrl.config import ConfigError, ScheduleConfig
from hybridrl.config.loss import Loss
from hybridrl.config.schedule import SCHEDULES
from hybridrl.flow.costs import Costs
from hybridrl.flow.executor import Sampling, Scope
from hybridrl.flow.graph import (
    ComputeStage,
    GenerateStage,
    Graph,
    PromptsStage,
    Stage,
    StageMethod,
    UpdateStage,
)
from hybridrl.flow.lengths import PromptKey
from hybridrl.flow.schedules import StepResult
from hybridrl.flow.schedules.base import ScheduleParts, StepSettings, schedule_class
from hybridrl.planner.simulate import SimulatedExecutor
from hybridrl.planner.workload import Workload

logger = logging.getLogger(__name__)

_UNBOUNDED = 2**31


def default_schedules() -> tuple[ScheduleConfig, ...]:
    """Every registered schedule, with the settings that it starts with."""
    return tuple(entry.settings(kind=kind) for kind, entry in SCHEDULES.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Machines, limits and samples of a what-if run."""

    costs: Costs
    num_instances: int
    max_held: int = 256
    decode_steps: int = 64
    chunk_tokens: int = 16_384
    verifier_s: float = 0.0
    scopes: Mapping[str, Scope] = field(default_factory=dict)
    """The scope of stages by name; others run on an instance."""
    schedules: tuple[ScheduleConfig, ...] = field(default_factory=default_schedules)
    """The schedules to compare; the first is the baseline of the others."""
    workload: Workload
    group_size: int
    widths: tuple[int, ...] = ()
    """Numbers of instances that may decode the tail as one."""

    @property
    def scope_of(self) -> dict[str, Scope]:
        """The scope of every stage that has costs."""
        return {name: self.scopes.get(name, Scope.INSTANCE) for name in self.costs.token_s}

    @property
    def inference_s_per_token(self) -> float:
        """Seconds of all forward-only stages on an instance together, per token, calls included."""
        return self._s_per_token(Scope.INSTANCE, Scope.WORLD)

    @property
    def pool_s_per_token(self) -> float:
        """Seconds of all stages of the separate pool, per token, calls included."""
        return self._s_per_token(Scope.POOL)

    def _s_per_token(self, *scopes: Scope) -> float:
        chunk = self.chunk_tokens
        stages = [name for name, scope in self.scope_of.items() if scope in scopes]
        return sum(self.costs.compute(name, chunk) / chunk for name in stages)

    @property
    def num_samples(self) -> int:
        """Samples that a step trains on."""
        return self.workload.prompts_per_step * self.group_size


@dataclass(frozen=True, slots=True)
class Outcome:
    """A schedule's mean step, in seconds, without the first step if there are more.

    `front` is generation and inference: from the weights' arrival to the update.
    """

    schedule: str
    threshold: int | None
    """The migration threshold, in unfinished samples; None for schedules without one."""
    step_s: float
    front_s: float
    bubbles: float
    """Share of the instances' time before the update in which they are idle."""
    migrated: float
    """Samples that changed instance, a step."""
    off_policy: float
    """Share of trained tokens that older weights generated."""


def what_if(
    setting: Setting, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Outcome]:
    """Every schedule; one that migrates the tail without, at the modeled and the best threshold.

    The best is searched among powers of two, halves between them, and the modeled threshold.
    `on_progress` gets the replays done and their total.
    """
    # as they are
    alone = [(config, replay(setting, config)) for config in setting.schedules]
    # at every threshold
    searches = {
        outcome.schedule: config.at_thresholds(
            sorted({0, *_thresholds(setting.num_samples), outcome.threshold or 0})
        )
        for config, outcome in alone
        if config.entry.migrates_tail
    }
    total = len(alone) + sum(map(len, searches.values()))
    logger.debug("replaying %d thresholds of %s", total - len(alone), ", ".join(searches))
    done, outcomes = 0, []
    for _, outcome in alone:
        tried = []
        for config in searches.get(outcome.schedule, ()):
            done += 1
            on_progress(done, total)
            tried.append(replay(setting, config))
        outcomes += _summary(outcome, tried) if tried else [outcome]
    return outcomes


def _summary(modeled: Outcome, tried: Sequence[Outcome]) -> list[Outcome]:
    """Without migration (the first that was tried), at the modeled and at the best threshold."""
    name = modeled.schedule
    best = min(tried, key=lambda outcome: outcome.front_s)
    return [
        _named(tried[0], f"{name}, not gathered"),
        _named(modeled, f"{name}, as modeled"),
        _named(best, f"{name}, best of {len(tried)}"),
    ]


def lower_bound(setting: Setting) -> float:
    """Lower bound, in seconds, on the time of any schedule before the update.

    The largest of three: the longest sample alone; the stages of a separate pool; all forward
    passes and all decoding. The last is in the largest batches that fit, spread over the instances
    without a gap. Mean over the steps.
    """
    costs, work, size = setting.costs, setting.workload, setting.group_size
    bounds = []
    for step in range(work.num_steps):
        positions = range(step * work.prompts_per_step, (step + 1) * work.prompts_per_step)
        groups = [work.groups[position % len(work.groups)] for position in positions]
        samples = [
            (group.prompt_tokens, group.lengths[k % len(group.lengths)])
            for group in groups
            for k in range(size)
        ]
        per_token = setting.inference_s_per_token
        inference = sum(per_token * (prompt + length) for prompt, length in samples)
        prefill = sum(costs.prefill_token_s * group.prompt_tokens for group in groups)
        rows = sum(
            length * (costs.row_s + costs.cached_token_s * (prompt + length / 2))
            for prompt, length in samples
        )
        # Each decode step has at most `max_held` rows.
        steps = sum(length for _, length in samples) / setting.max_held * costs.step_s
        spread = (inference + prefill + rows + steps) / setting.num_instances
        prompt, longest = max(samples, key=lambda sample: sample[1])
        alone = costs.decode(1, longest, prompt + longest / 2) + per_token * (prompt + longest)
        pool = setting.pool_s_per_token * sum(prompt + length for prompt, length in samples)
        bounds.append(max(spread, alone, pool))
    return fmean(bounds)


def replay(setting: Setting, config: ScheduleConfig, skip: int = 1) -> Outcome:
    """Run the schedule with the settings `config` over the workload.

    The mean step is that after the first `skip`, if there are more.
    """
    executor = SimulatedExecutor(
        setting.costs,
        setting.num_instances,
        setting.workload.length_of,
        setting.workload.prompt_tokens_of,
        max_running=setting.max_held,
        scopes=setting.scope_of,
        verifier_s=setting.verifier_s,
        widths=setting.widths,
    )
    schedule = schedule_class(config).build(_parts(setting, executor), config)
    steps = []
    for step in range(1, setting.workload.num_steps + 1):
        start = executor.clock.now()
        executor.slices.clear()
        result = schedule.run_step(step)
        steps.append(_measure(setting, executor, result, executor.clock.now() - start))
    steady = steps[skip:] or steps
    chosen = None
    if config.entry.migrates_tail:
        chosen = config.fixed_threshold
        if chosen is None:
            chosen = round(fmean(step["threshold"] for step in steady))
    logger.debug("replayed %d steps of %s", len(steps), config.kind.value)
    means = {key: fmean(step[key] for step in steady) for key in steps[0] if key != "threshold"}
    return Outcome(schedule=config.kind.value, threshold=chosen, **means)


def _measure(
    setting: Setting, executor: SimulatedExecutor, result: StepResult, seconds: float
) -> dict[str, float]:
    begun = next(span.stop for span in result.spans if span.name == "to_generate")
    ended = next(span.start for span in result.spans if span.name == "to_train")
    busy = sum(s.stop - s.start for s in executor.slices if s.start < ended)
    window = setting.num_instances * (ended - begun)
    spans = [span for sample in result.samples for span in sample.spans]
    old = sum(s.stop - s.start for s in spans if s.version < executor.version)
    return {
        "step_s": seconds,
        "front_s": ended - begun,
        "bubbles": 1 - busy / window if window else 0.0,
        "migrated": result.metrics.get("samples/migrated", 0.0),
        "off_policy": old / max(1, sum(s.stop - s.start for s in spans)),
        "threshold": result.metrics.get("samples/migration_threshold", 0.0),
    }


def _parts(setting: Setting, executor: SimulatedExecutor) -> ScheduleParts:
    tokens_of = setting.workload.prompt_tokens_of
    return ScheduleParts(
        graph=simulated_graph(setting.costs, setting.group_size),
        executor=executor,
        prompts=((position, position) for position in itertools.count()),
        settings=StepSettings(
            sampling=Sampling(max_new_tokens=_UNBOUNDED),
            decode_steps=setting.decode_steps,
            prompts_per_step=setting.workload.prompts_per_step,
        ),
        max_held=setting.max_held,
        chunk_tokens=setting.chunk_tokens,
        key_of=lambda prompt: PromptKey(prompt, "", range(tokens_of(prompt))),
        num_steps=setting.workload.num_steps,
    )


def simulated_graph(costs: Costs, group_size: int) -> Graph:
    """Generate, every forward-only stage with costs, a verifier without a reward model; update.

    A stage has the name under which it was measured.
    """
    graph = Graph()
    graph.add(PromptsStage(name="prompts"))
    graph.add(
        GenerateStage(
            name="generate",
            upstream=("prompts",),
            role="actor",
            outputs=("finish", "tokens", "log_probs"),
            scalars=("finish",),
            num_samples=group_size,
        )
    )
    last, fields = "generate", ["tokens"]
    if "reward" not in costs.token_s:
        graph.add(_forward("reward", last, StageMethod.SCORE, ("reward", "reward_status")))
        last = "reward"
        fields.append("reward")
    for name in costs.token_s:
        graph.add(_forward(name, last, StageMethod.LOG_PROBS, ()))
        last = name
        fields.append(name)
    graph.add(
        UpdateStage(
            name="update_actor",
            upstream=(last,),
            role="actor",
            inputs=tuple(fields),
            loss=_Simulated(),
            fields={},
        )
    )
    return graph


class _Simulated(Loss[Any]):
    """Stands for the loss of a simulated update."""

    def __call__(self, *args: object) -> NoReturn:
        raise AssertionError("a simulated update computes nothing")


def _forward(name: str, upstream: str, method: StageMethod, scalars: tuple[str, ...]) -> Stage:
    return ComputeStage(
        name=name,
        upstream=(upstream,),
        role=name,
        method=method,
        inputs=("tokens",),
        outputs=scalars or (name,),
        scalars=scalars,
    )


def _thresholds(num_samples: int) -> list[int]:
    thresholds, step = [], 1
    while step < num_samples:
        thresholds += [step, step * 3 // 2]
        step *= 2
    return [n for n in thresholds if n < num_samples]


def _named(outcome: Outcome, name: str) -> Outcome:
    return Outcome(**{**asdict(outcome), "schedule": name})


def read_costs(path: Path) -> dict[str, Any]:
    """Fields of `Setting` from `RUN/costs.json`, or a file of its form or of costs alone.

    Raises `ConfigError`.
    """
    file = path / "costs.json" if path.is_dir() else path
    checks: Mapping[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("num_instances", "max_held", "decode_steps", "chunk_tokens"), _is_count),
        "verifier_s": lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x >= 0,
    }
    try:
        record = json.loads(file.read_text())
        if not isinstance(record, dict):
            raise ValueError("not an object")
        facts = record if "costs" in record else {"costs": record}
        costs = Costs.from_json(facts["costs"])
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        allowed = f"a run's directory with costs.json, or FILE.json with costs ({reason})"
        raise ConfigError("--costs", str(path), allowed) from None
    for name, fits in checks.items():
        if name in facts and not fits(facts[name]):
            allowed = f"{name} that is a number, not {facts[name]!r}"
            raise ConfigError("--costs", str(path), allowed)
    try:
        scopes = {str(name): Scope(scope) for name, scope in dict(facts.get("scopes", {})).items()}
    except (ValueError, TypeError):
        allowed = f"scopes that map a stage to one of {', '.join(s.value for s in Scope)}"
        raise ConfigError("--costs", str(path), allowed) from None
    known = {name: facts[name] for name in checks if name in facts}
    return {"costs": costs, "scopes": scopes, **known}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
