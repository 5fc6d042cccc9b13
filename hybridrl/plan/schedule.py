"""Replays the same samples under every schedule, in virtual time."""

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NoReturn

from hybridrl.config import EarlyBackward, FusedScheduleConfig, ScheduleConfig
from hybridrl.config.loss import Loss
from hybridrl.config.schedule import SCHEDULES
from hybridrl.costs.instance import LONGEST_DRAFT, UNLIMITED, Costs, Drafting
from hybridrl.costs.push import PushCosts
from hybridrl.flow.conversations import ConversationModel
from hybridrl.flow.early_updates import EarlySettings
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
from hybridrl.flow.mapped_work import MappedWork, step_samples
from hybridrl.flow.workload import Workload
from hybridrl.plan.simulate import EARLY_BACKWARD, LOAD, SimulatedExecutor
from hybridrl.schedule import StepResult
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.build import ScheduleParts, build

logger = logging.getLogger(__name__)

_UNBOUNDED = 2**31
_UPDATE = "update_"


def default_schedules() -> tuple[ScheduleConfig, ...]:
    """Every schedule of ranks that do both, with the settings that it starts with."""
    shared = {kind: entry for kind, entry in SCHEDULES.items() if not entry.separate}
    return tuple(entry.settings(kind=kind) for kind, entry in shared.items())


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
    draft_tokens: int | None = None
    """Tokens that rows guess where speculation is compared; None: as many as pay."""
    pass_tokens: int = UNLIMITED
    """The most tokens of such a pass."""
    conversations: ConversationModel | None = None
    """Turns of the responses, whose lengths are then the model's own tokens; None: of one turn."""
    mapped: MappedWork | None = None
    """The device mapping, whose roles then have stages and updates; see `mapped_setting`."""
    instance_ranks: int = 1
    """Ranks of an instance."""
    splits: Mapping[int, PushCosts] = field(default_factory=dict)
    """Numbers of instances that may have ranks of their own, with what a push then costs."""
    apart: PushCosts | None = None
    """What a push costs where the instances have ranks of their own; see `separate.py`."""
    num_training: int = 1
    """Ranks that train then: each begins on groups when there is a micro-batch for it."""
    early: EarlySettings = field(default_factory=EarlySettings)
    """What keeps updates from beginning before their batch is there."""

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
    def drafting(self) -> Drafting | None:
        """Guessing ahead; None where it is not known how many guesses are right."""
        accept = self.workload.accept
        if accept is None and self.costs.drafting is not None:
            accept = self.costs.drafting.accept
        if accept is None:
            return None
        return Drafting(tokens=self.draft_tokens, accept=accept, pass_tokens=self.pass_tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A schedule's mean step, in seconds, without the first step if there are more.

    `front` is generation and inference, and what is trained early: from the weights' arrival to the
    barrier.
    """

    schedule: str
    mechanisms: str
    """What it does besides; empty for the schedule as it comes."""
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
    decode_s: float
    """Seconds a step in which an instance decodes, on average."""
    hidden: float
    """Share of the instances' forward passes that ran while others decoded, or all waited."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage, and of the changes of phase, `to_generate` and `to_train`, by name.

    Stages may overlap: under schedules that stream samples, and in different pools.
    """


@dataclass(frozen=True, slots=True)
class Variant:
    """A line of the comparison: a schedule with mechanisms, and the setting that has them."""

    mechanisms: str
    setting: Setting
    config: ScheduleConfig


def variants(setting: Setting) -> list[Variant]:
    """Each schedule as it comes, then with each mechanism that it allows, and with all of them.

    The baseline comes first. Early backward and a wide tail are for schedules that migrate it, the
    latter where it is known how long its steps take (`Setting.widths`). Every schedule may guess
    ahead, where it is known how many guesses are right.
    """
    plain = replace(setting, costs=replace(setting.costs, drafting=None), widths=())
    guesses = replace(plain, costs=replace(plain.costs, drafting=setting.drafting))
    lines: list[Variant] = []
    for config in setting.schedules:
        fused = config if isinstance(config, FusedScheduleConfig) else None
        if fused and fused.migration_threshold is None:
            never = replace(fused, migration_threshold=0)
            lines.append(Variant("no migration", plain, never))
        lines.append(Variant("", plain, config))
        early = replace(fused, early_backward=EarlyBackward.auto) if fused else config
        widths = setting.widths if fused else ()
        mechanisms = []
        if fused:
            mechanisms.append(Variant("early backward", plain, early))
        if widths:
            mechanisms.append(Variant("wide tail", replace(plain, widths=widths), config))
        if setting.drafting is not None:
            mechanisms.append(Variant("speculation", guesses, config))
        lines += mechanisms
        if len(mechanisms) > 1:
            lines.append(Variant("all", replace(guesses, widths=widths), early))
    return lines


def mapped_setting(
    mapped: MappedWork,
    workload: Workload,
    group_size: int,
    *,
    max_held: int,
    decode_steps: int = 64,
) -> Setting:
    """The setting of a device mapping, for `replay`.

    The scheduler's own costs are those of samples of the first step's lengths.
    """
    mapping = mapped.mapping
    return Setting(
        costs=mapped.flow_costs(step_samples(workload, group_size)),
        num_instances=mapping.instances,
        max_held=max_held,
        decode_steps=decode_steps,
        chunk_tokens=next(iter(mapping.train.values())).micro_batch_tokens,
        scopes=mapped.scopes,
        schedules=(mapping.schedule,),
        workload=workload,
        group_size=group_size,
        mapped=mapped,
    )


def what_if(
    setting: Setting, on_progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Outcome]:
    """Every schedule alone and with its mechanisms.

    `on_progress` gets the replays done and their total.
    """
    lines, outcomes = variants(setting), []
    for done, line in enumerate(lines, 1):
        outcome = replay(line.setting, line.config)
        outcomes.append(replace(outcome, mechanisms=line.mechanisms))
        on_progress(done, len(lines))
    return outcomes


def lower_bound(setting: Setting, skip: int = 1) -> float:
    """Lower bound, in seconds, on the time before the update of a step on the prompts of serial.

    The largest of three: the longest sample alone; the stages of a separate pool; all forward
    passes and all decoding. The last is in the largest batches that fit, spread over the instances
    without a gap. Mean over the steps after the first `skip`, as of `replay`. Waits for replies and
    their prefill are left out.
    """
    costs, work, size = setting.costs, setting.workload, setting.group_size
    drafting = costs.drafting
    # tokens of a row and pass, at most
    most = 1.0 if drafting is None else float(drafting.expected(drafting.tokens or LONGEST_DRAFT))
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
        rows = sum(costs.rows_s(prompt, length, most) for prompt, length in samples)
        # Each decode step has at most `max_held` rows.
        steps = sum(length for _, length in samples) / setting.max_held * costs.step_s / most
        spread = (inference + prefill + rows + steps) / setting.num_instances
        prompt, longest = max(samples, key=lambda sample: sample[1])
        # A pace is concave in the tokens held: no less than the mean of its ends.
        pace = float(costs.pace(1, prompt) + costs.pace(1, prompt + longest)) / 2
        alone = longest * pace + per_token * (prompt + longest)
        pool = setting.pool_s_per_token * sum(prompt + length for prompt, length in samples)
        bounds.append(max(spread, alone, pool))
    return fmean(bounds[skip:] or bounds)


def replay(setting: Setting, config: ScheduleConfig, skip: int = 1) -> Outcome:
    """Run the schedule with the settings `config` over the workload.

    The mean step is that after the first `skip`, if there are more.
    """
    replayed = replay_steps(setting, config)
    steady = replayed[skip:] or replayed
    chosen = None
    if config.entry.migrates_tail:
        chosen = config.fixed_threshold
        if chosen is None:
            chosen = round(fmean(step["threshold"] for step, _ in steady))
    means = {key: fmean(step[key] for step, _ in steady) for key in steady[0][0]}
    del means["threshold"]
    names = dict.fromkeys(name for _, stages in steady for name in stages)  # some in some steps
    stages = {name: fmean(stages.get(name, 0.0) for _, stages in steady) for name in names}
    return Outcome(
        schedule=config.kind.value, mechanisms="", threshold=chosen, stages=stages, **means
    )


def replay_steps(
    setting: Setting, config: ScheduleConfig
) -> list[tuple[dict[str, float], Mapping[str, float]]]:
    """Return the values of each step that an `Outcome` averages, and the seconds of its stages."""
    executor = SimulatedExecutor(
        setting.costs,
        setting.num_instances,
        setting.workload.length_of,
        setting.workload.prompt_tokens_of,
        max_running=setting.max_held,
        scopes=setting.scope_of,
        verifier_s=setting.verifier_s,
        widths=setting.widths,
        counts_tokens=config.entry.counts_tokens,
        mapped=setting.mapped,
        conversations=setting.conversations,
        apart=setting.apart,
    )
    schedule = build(_parts(setting, executor), config)
    steps = list[tuple[dict[str, float], Mapping[str, float]]]()
    for step in range(1, setting.workload.num_steps + 1):
        start = executor.clock.now()
        executor.slices.clear()
        result = schedule.run_step(step)
        measure = _measure if setting.apart is None else _measure_apart
        measured = measure(setting, executor, result, executor.clock.now() - start)
        steps.append((measured, result.seconds_by_stage))
    logger.debug("replayed %d steps of %s", len(steps), config.kind.value)
    return steps


def _measure(
    setting: Setting, executor: SimulatedExecutor, result: StepResult, seconds: float
) -> dict[str, float]:
    begun = next(span.stop for span in result.spans if span.name == "to_generate")
    ended = next(span.start for span in result.spans if span.name == "to_train")
    busy = sum(s.stop - s.start for s in executor.slices if s.start < ended)
    window = setting.num_instances * (ended - begun)
    spans = [span for sample in result.samples for span in sample.spans if span.trained]
    old = sum(s.stop - s.start for s in spans if s.version < executor.version)
    before = [s for s in executor.slices if s.start < ended]
    passes = [s for s in before if s.name in setting.scope_of]
    others = [s for s in before if s.name not in {*setting.scope_of, EARLY_BACKWARD}]
    decoded = max((s.stop for s in others), default=begun)
    hidden = sum(max(0.0, min(s.stop, decoded) - s.start) for s in passes)
    return {
        "step_s": seconds,
        "front_s": ended - begun,
        "bubbles": 1 - busy / window if window else 0.0,
        "migrated": result.metrics.get("samples/migrated", 0.0),
        "off_policy": old / max(1, sum(s.stop - s.start for s in spans)),
        "decode_s": sum(s.stop - s.start for s in others) / setting.num_instances,
        "hidden": hidden / (sum(s.stop - s.start for s in passes) or 1.0),
        "threshold": result.metrics.get("samples/migration_threshold", 0.0),
    }


def _measure_apart(
    setting: Setting, executor: SimulatedExecutor, result: StepResult, seconds: float
) -> dict[str, float]:
    """As `_measure`; instances work through the step, so they are idle in a share of all of it.

    Calls count in the step that they begin in.
    """
    ended = next(span.start for span in result.spans if span.name == "to_train")
    busy = sum(s.stop - s.start for s in executor.slices)
    decoding = sum(s.stop - s.start for s in executor.slices if s.name != LOAD)
    zeros = ("migrated", "hidden", "threshold")
    trained = max(1.0, result.metrics["samples/trained_tokens"])
    return dict.fromkeys(zeros, 0.0) | {
        "step_s": seconds,
        "front_s": ended - (executor.clock.now() - seconds),
        "bubbles": max(0.0, 1 - busy / (setting.num_instances * seconds)) if seconds else 0.0,
        "off_policy": result.metrics["samples/off_policy_tokens"] / trained,
        "decode_s": decoding / setting.num_instances,
    }


def _parts(setting: Setting, executor: SimulatedExecutor) -> ScheduleParts:
    tokens_of, drafting = setting.workload.prompt_tokens_of, setting.costs.drafting
    return ScheduleParts(
        graph=simulated_graph(setting.costs, setting.group_size, setting.mapped),
        executor=executor,
        prompts=((position, position) for position in itertools.count()),
        settings=StepSettings(
            sampling=Sampling(
                max_new_tokens=_UNBOUNDED,
                max_turn_tokens=0 if setting.conversations is None else _UNBOUNDED,
            ),
            decode_steps=setting.decode_steps,
            prompts_per_step=setting.workload.prompts_per_step,
            draft_tokens=0 if drafting is None else drafting.tokens,
            pass_tokens=UNLIMITED if drafting is None else drafting.pass_tokens,
            counted=setting.costs,
        ),
        max_held=setting.max_held,
        chunk_tokens=setting.chunk_tokens,
        key_of=lambda prompt: PromptKey(prompt, "", range(tokens_of(prompt))),
        # Beyond the last step measured, separate ranks go on: the mean is that of a longer run.
        num_steps=setting.workload.num_steps if setting.apart is None else None,
        num_training=setting.num_training,
        early=setting.early,
    )


def simulated_graph(costs: Costs, group_size: int, mapped: MappedWork | None = None) -> Graph:
    """Generate, every forward-only stage with costs, a verifier without a reward model; update.

    A stage has the name under which it was measured. Under a mapping each trained role has an
    update, and passes are those of the roles.
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
    passes = {name: name for name in costs.token_s}
    trained = ["actor"]
    if mapped is not None:
        passes = {stage: role.name for role in mapped.roles for stage in role.passes}
        trained = [role.name for role in mapped.trained]
    for name, role in passes.items():
        graph.add(_forward(name, last, StageMethod.LOG_PROBS, (), role))
        last = name
        fields.append(name)
    for role in trained:
        graph.add(
            UpdateStage(
                name=f"{_UPDATE}{role}",
                upstream=(last,),
                role=role,
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


def _forward(
    name: str, upstream: str, method: StageMethod, scalars: tuple[str, ...], role: str = ""
) -> Stage:
    return ComputeStage(
        name=name,
        upstream=(upstream,),
        role=role or name,
        method=method,
        inputs=("tokens",),
        outputs=scalars or (name,),
        scalars=scalars,
    )
