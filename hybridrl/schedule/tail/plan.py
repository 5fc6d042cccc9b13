"""The plan that the tail of a step follows: that with the least seconds, by what is known."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from hybridrl.costs.instance import Costs
from hybridrl.costs.meter import CostMeter
from hybridrl.costs.tail import StepModel, training_arrivals
from hybridrl.flow.executor import Executor, Scope
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.lengths import LengthModel
from hybridrl.flow.migration import NO_MIGRATION, MigrationPlan, TailPlan, best_plan, tail_plans
from hybridrl.flow.plan_errors import PlanErrors
from hybridrl.schedule.base import Prompt
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.readiness import ReadyTracker
from hybridrl.schedule.tail import NoTail

logger = logging.getLogger(__name__)


class TailRound(NamedTuple):
    """A round that is planned: its prompts, its stages, the update that may begin in it."""

    prompts: Sequence[Prompt]
    tracker: ReadyTracker
    early: UpdateStage | None


class TailPlanner:
    """Chooses the plan of each round's tail, and learns what it took.

    `threshold` is the user's own: at so few unfinished samples they migrate, at 0 none does. With
    None that is the best plan by a model of the step, which reads the lengths of earlier steps and
    the measured costs (`tail_plans`). It allows for what steps with each plan took beyond the model
    so far (`PlanErrors`). Where the executor can form wide instances, that model chooses their
    width too, or none. With `must_widen` there is no tail on narrow ones.
    """

    def __init__(
        self,
        executor: Executor,
        meter: CostMeter,
        length_model: LengthModel,
        limits: RoundLimits,
        decode_steps: int,
        threshold: int | None,
        must_widen: bool,
    ) -> None:
        self.executor, self.meter, self.length_model = executor, meter, length_model
        self.limits, self.decode_steps, self.threshold = limits, decode_steps, threshold
        wide = sorted({len(members) for members in executor.wide.values()})
        self.widths = tuple(wide) if must_widen and wide else (1, *wide)
        self.errors = PlanErrors()

    def choose(self, of: TailRound, num_samples: int, metrics: dict[str, float]) -> TailPlan:
        """The plan with the least seconds for the lengths and costs of earlier steps.

        While these are not known, only the user's own threshold moves samples, and an update that
        may begin early is tried. A width that was not measured is tried by the last few samples.
        """
        costs, threshold, forecast = self.meter.costs(), self.threshold, self.length_model.forecast
        steps = [*zip(forecast.steps(num_samples), forecast.waits(num_samples), strict=True)]
        own = NO_MIGRATION
        if threshold:
            own = MigrationPlan(threshold, self.limits.max_held, self.widths[0])
        if costs is None or not steps:
            return TailPlan("not known yet", 0.0, own, of.early is not None)
        plans = self.errors.corrected(self._plans(of, steps, costs, threshold, self.widths))
        plan = best_plan(plans)
        if of.early is not None and not costs.train_token_s:  # it was not measured: it is tried
            plan = plan._replace(trains_early=True, overlaps=True)
        if plan.migration.width == 1 and threshold:
            plan = plan._replace(migration=own)
        if threshold is None and plan.migration.width not in (1, *costs.wide_step_s):
            plan = plan._replace(migration=_trial(plan.migration))
        chosen = _name_of(plan)
        logger.debug("the tail: %s, of %s", chosen, [f"{p.name} {p.seconds:.4g}" for p in plans])
        for one in plans:
            metrics[f"{_key(one.name)}_s"] = one.seconds
            for what in ("chosen", "happened"):
                metrics.setdefault(f"{_key(one.name)}_{what}", 0.0)
        metrics[f"{_key(chosen)}_chosen"] = 1.0
        if threshold is None or self.widths != (1,):
            metrics["samples/migration_threshold"] = float(plan.migration.threshold)
        return plan

    def record(
        self, plan: TailPlan, tail: NoTail, overlapped: bool, metrics: dict[str, float]
    ) -> None:
        """Record which choice the round came to: its tail may end before it is known to be one."""
        if f"{_key(_name_of(plan))}_chosen" not in metrics:  # nothing to choose by yet
            return
        happened = _what_happened(
            widened_to=plan.migration.width if tail.num_widened else 1,
            migrated=tail.num_migrated > 0,
            trained_early=tail.num_trained > 0,
            overlapped=overlapped,
        )
        if happened != _name_of(plan):
            logger.debug("the tail: %s was chosen, %s happened", _name_of(plan), happened)
        metrics[f"{_key(happened)}_happened"] = 1.0

    def judge(self, of: TailRound, plan: TailPlan, measured_s: float) -> None:
        """Learn what a round, or a round and its update, took beyond what the plan says."""
        costs = self.meter.costs()
        if costs is None or not plan.seconds:
            return
        if of.early is not None:
            measured_s -= costs.train_switch_s  # of every plan, so that none has it
        last, (threshold, _, width) = [self.length_model.forecast.last], plan.migration
        plans = self._plans(of, last, costs, 0, (1,))
        if threshold:
            plans += self._plans(of, last, costs, threshold, (width,))
        self.errors.saw(plans, plan.name, measured_s)

    def _plans(
        self,
        of: TailRound,
        steps: Sequence[tuple[Sequence[int], Sequence[float]]],
        costs: Costs,
        threshold: int | None,
        widths: Sequence[int],
    ) -> list[TailPlan]:
        """The candidates, for the lengths and waits of these steps; see `tail_plans`."""
        scopes = {stage.name: self.executor.scope(stage) for stage in of.tracker.computes}
        passes = [name for name, scope in scopes.items() if scope is Scope.INSTANCE]
        prompts = [self.length_model.prompt_tokens(prompt) for _, prompt in of.prompts]
        prompt_tokens = sum(prompts) / max(1, len(prompts))
        num_instances = len(self.executor.instances)
        # Tokens of a pass: of an instance that is free by chance, or of its share of all.
        tokens = fmean(sum(lengths) + len(lengths) * prompt_tokens for lengths, _ in steps)
        chunks = max(1, self.limits.chunk_tokens // 8), max(1.0, tokens / num_instances)
        inference, late_inference = (
            sum(costs.compute(name, chunk) for name in passes) / chunk for chunk in chunks
        )
        call_steps = self.limits.steps(costs, 1, self.decode_steps)
        awaited = not {*scopes.values()} <= {Scope.RANK, Scope.INSTANCE}
        models = [
            StepModel(
                lengths=lengths,
                num_instances=num_instances,
                costs=costs,
                inference_s_per_token=inference,
                prompt_tokens=prompt_tokens,
                call_steps=call_steps,
                call_s=call_steps * float(costs.pass_s(1)),
                switch_s=costs.train_switch_s,
                waits=waits if any(waits) else (),
            )
            for lengths, waits in steps
        ]
        if of.early is not None:
            token_s = costs.train_token_s * num_instances
            models = self._with_training(models, token_s, len(of.prompts))
        return tail_plans(
            models,
            self.limits.max_held,
            stay_call_steps=call_steps if awaited else self.decode_steps,
            threshold=threshold,
            widths=widths,
            late_inference_s_per_token=late_inference,
        )

    def _with_training(
        self, models: Sequence[StepModel], token_s: float, num: int
    ) -> list[StepModel]:
        """The models with the training that may be early, where it is known of which prompts.

        A token of it takes `token_s` on one instance, and there are `num` prompts.
        """
        known = self.length_model.longest_of_prompt
        prompts = [*zip(known.steps(num), known.waits(num), strict=True)][-len(models) :]
        if not prompts:
            return [*models]
        trained = []
        # An older checkpoint has lengths alone.
        for model, prompt in zip(models[-len(prompts) :], prompts, strict=True):
            train_s = token_s * sum(n + model.prompt_tokens for n in model.lengths)
            every = model.ends(model.lengths, model.waits or [0.0] * len(model.lengths))
            arrivals = training_arrivals(every, model.ends(*prompt), train_s)
            trained.append(replace(model, training=arrivals))
        return trained


def _name_of(plan: TailPlan) -> str:
    """The name of what a plan does: it may also train early because that was not measured yet."""
    if not plan.trains_early or plan.name.endswith("train early"):
        return plan.name
    return f"{plan.name}, train early" if plan.migration.moves else "train early"


def _what_happened(
    *, widened_to: int, migrated: bool, trained_early: bool, overlapped: bool
) -> str:
    """The choice that a round came to, under the names of `tail_plans`."""
    moved = f"widen to {widened_to}" if widened_to > 1 else "migrate" if migrated else ""
    if trained_early:
        return f"{moved}, train early" if moved else "train early"
    return moved or ("overlap" if overlapped else "stay")


def _key(name: str) -> str:
    """The metrics of a plan begin with this."""
    return f"plan/{name.replace(', ', '_').replace(' ', '_')}"


def _trial(migration: MigrationPlan) -> MigrationPlan:
    """A plan whose width nobody has measured, for as many samples as the wide instance has members.

    The whole tail would pay for it where wide steps turn out to be slow.
    """
    return migration._replace(threshold=min(migration.threshold, migration.width))
