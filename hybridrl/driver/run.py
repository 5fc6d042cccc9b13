"""A run whose ranks are up: warm start, the recipe, its steps, stopping and resuming.

From a config to such a run and its result: `train.py`. Its phases: `run_phases.py`. Its evaluation:
`evaluate.py`. Its records: `run_records.py`.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hybridrl.checkpoint.folder import Point, read, search
from hybridrl.config import Config, Device, EmulatedClusterConfig, KeptSamples
from hybridrl.costs.meter import CostMeter
from hybridrl.data import CurriculumStream, mixture_parts, prompt_stream, task_of
from hybridrl.driver.checkpoints import Checkpoints, DriverState
from hybridrl.driver.emulated_executor import EmulatedExecutor
from hybridrl.driver.episodes import EnvironmentFailed, Episodes
from hybridrl.driver.evaluate import HeldOutEvaluation, evaluation_graphs, failed_shares
from hybridrl.driver.followed_run import followed_run, recorded_run
from hybridrl.driver.inputs_record import InputsRecord
from hybridrl.driver.judges import JudgeFailures
from hybridrl.driver.load_balance import work_of_roles
from hybridrl.driver.origin import Origin
from hybridrl.driver.ray_executor import Abandoned, OnSwitch, RayExecutor
from hybridrl.driver.run_phases import RunPhase, recipe_phase, training_of, warm_start_phase
from hybridrl.driver.run_records import RunRecords, sample_facts
from hybridrl.driver.saved_samples import SavedSteps
from hybridrl.driver.schedule_factory import make_schedule, replay_setting, sampling_of
from hybridrl.driver.step_digests import read_step_digests
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.graph import GenerateStage, Graph
from hybridrl.flow.judgements import JudgeFailed, check_failed_share
from hybridrl.flow.sample import Sample
from hybridrl.models.load import load_config
from hybridrl.preflight.memory_plan import sizes_of_run
from hybridrl.preflight.placement import graphs_of
from hybridrl.preflight.prepare import PreparedRun
from hybridrl.preflight.roles_together import roles_together
from hybridrl.preflight.schedule_choice import early_settings
from hybridrl.rewards.results import BudgetSpent
from hybridrl.runtime.launcher import Launcher
from hybridrl.schedule import StepResult
from hybridrl.schedule.base import Schedule
from hybridrl.system import signals
from hybridrl.telemetry.run import Telemetry
from hybridrl.telemetry.trace import rank_lane

logger = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """A signal has ended the run at a point that it can resume from; the message names the step."""


class TrainingDiverged(RuntimeError):
    """The run cannot usefully continue; the message says why."""


CUT_SHORT = (BudgetSpent, EnvironmentFailed, JudgeFailed)
"""Errors that judges and environments end a run with, after which it can go on."""


class Run:
    """The parts of a run. `step` counts optimizer iterations over warm start and recipe.

    A resumed run, too, makes each phase's roles at the phase's beginning: copies and value models
    are of that moment. Then the checkpoint's state of the roles replaces theirs.
    """

    def __init__(
        self,
        config: Config,
        prepared: PreparedRun,
        telemetry: Telemetry,
        launcher: Launcher,
        origin: Origin,
    ) -> None:
        self.config, self.prepared, self.telemetry = config, prepared, telemetry
        self.step = self.bad_steps = 0
        self._noted_no_snapshot = False
        data, shown = prepared.data, config.telemetry.samples_per_step
        self.prompts = prompt_stream(config, data)
        self.records = RunRecords(
            telemetry,
            shown,
            current_step=lambda: self.step,
            kinds_of=lambda position: mixture_parts(config.data, self.prompts.at(position)),
            origin_of=self._origin_of,
            observe=self.prompts.observe,
            driver_metrics=self._driver_metrics,
        )
        inputs = InputsRecord(config, prepared, telemetry)
        # ranks
        self.group = WorkerGroup(
            launcher,
            config,
            prepared.model_path,
            self.records.on_span,
            self.records.on_memory,
            lambda: self.step,
        )
        self.group.failures.on_death = self._note_death
        if len(self.group.pools) > 1:
            telemetry.pools = config.cluster.pool_ranks
        sizes = sizes_of_run(config, prepared.graph, prepared.model_path, prepared.image_pads)
        decided = {"activations": config.trainer.activations.value}
        telemetry.event("ranks", **self.group.setup(sizes), **decided)
        self._nodes = self.group.nodes()
        telemetry.nodes([asdict(info) for info in self._nodes])
        inputs.write()
        self.executor = _executor(config, prepared, self.group, self.records.on_switch)
        self.executor.pushes.record = self.records.on_push
        self.saved = self.executor.saved = SavedSteps(config, origin, telemetry)
        self.episodes = self.executor.episodes
        self.failures = self.executor.failures = _judge_failures(config, origin)
        # held-out evaluation
        self.evaluation = HeldOutEvaluation(
            config,
            evaluation_graphs(config, prepared.graph),
            prepared.eval_items,
            self.executor,
            telemetry,
            self._record_evaluated,
        )
        self.evaluation.ended = self._evaluated
        self.after_checkpoint: Callable[[], None] = lambda: None
        self._before: DriverState | None = None  # the state before the step that runs
        self.schedule: Schedule | None = None  # of the recipe's steps, where they are replayed
        # checkpoints
        self.origin, self.run_dir = origin, Path(config.run.dir)
        self.checkpoints = Checkpoints(config, origin, self.group, telemetry, self.executor)
        if origin.point is not None:
            self._resume_driver(origin.point, origin.damaged)

    def _note_death(self, instance: int, line: str) -> None:
        self.telemetry.note(line, step=self.step)
        self.telemetry.event("death", step=self.step, instance=instance)

    def _record_evaluated(self, name: str, step: int, samples: Sequence[Sample]) -> None:
        """Begin to record samples of the evaluation set `name`."""
        self.records.record_evaluated(name, step, samples, self.executor.read_texts)

    def _evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """A set is evaluated on the weights after `step`; training may be in the next one."""
        if "eval_accuracy" in metrics:
            self.checkpoints.score(step, metrics["eval_accuracy"])
        if self._before is not None:  # a signal may have it saved: it has been evaluated
            self._before.record["evaluated"] = self.evaluation.state()
            lines = "metrics.jsonl"
            self._before.record["records"][lines] = self.telemetry.sizes()[lines]

    def end_processes(self) -> None:
        """End those of judges and environments that the driver calls. May be called twice."""
        try:
            self.executor.judges.close()
        finally:
            if self.episodes is not None:
                self.episodes.close()

    def _driver_metrics(self) -> dict[str, float]:
        """Return metrics of judges and environments that the driver calls, since the last call."""
        self._trace_environments()
        of_episodes = self.episodes.metrics() if self.episodes is not None else {}
        return self.executor.judges.metrics() | of_episodes

    def _trace_environments(self) -> None:
        """Record what the environments' processes did, as of the present step."""
        for span in self.episodes.spans() if self.episodes is not None else ():
            lane, counts = f"environment {span.place}", {"answers": span.answers}
            self.telemetry.span(lane, "answer", span.start, span.end, self.step, **counts)

    # -- phases --------------------------------------------------------------------------------

    def warm_start(self) -> None:
        """The supervised phase, where the config asks for one."""
        phase = warm_start_phase(self.config, self.prepared)
        if phase is None:
            return
        folder, point = self.run_dir / "warm_start", self.origin.point
        self._begin_roles(phase)
        if point is not None and self._resumes_in("rl"):
            ended = read(point.run_dir / "warm_start")  # the recipe's roles are copies of it
            self.checkpoints.load(ended)
            if self.config.trainer.saves and not self.origin.continues(self.run_dir):
                self.checkpoints.write(folder, phase.num_steps, DriverState(ended.state))
            return
        self._restore_roles(phase)
        schedule = self._make_schedule(phase)
        with self._stop_deferred():
            self._run_steps(phase, schedule)
            self._close(schedule)
            there = point is not None and point.folder.resolve() == folder.resolve()
            if self.config.trainer.saves and not there:
                self.checkpoints.write(folder, self.step, self._state(phase, schedule))

    def begin_recipe(self) -> None:
        """Make the recipe's roles; a frozen copy is of this moment."""
        phase = recipe_phase(self.config, self.prepared)
        self._begin_roles(phase)
        self._restore_roles(phase)

    def warn_off_policy(self) -> None:
        """Say once if training's responses are drawn from another distribution than the model's."""
        stages = self.prepared.graph.stages.values()
        settings = [f"rollout.{setting}" for setting in self.config.rollout.off_policy]
        if settings and any(isinstance(stage, GenerateStage) for stage in stages):
            logger.warning(
                "sampling is off-policy with %s: recorded log-probabilities are of the "
                "distribution without that",
                ", ".join(settings),
            )

    def warn_unprofiled(self) -> None:
        """Say which steps of `telemetry.profile.steps` the run does not reach."""
        last = self.config.warm_start_steps + self.config.trainer.steps
        if beyond := [step for step in self.config.telemetry.profile.steps if step > last]:
            self.telemetry.note(f"telemetry.profile.steps={beyond}: the last step is {last}")

    def evaluate_before(self) -> dict[str, float]:
        """Held-out metrics before the recipe's first step; a resumed run has them."""
        if not self._resumes_in("rl"):
            try:
                self.evaluation.before = self.evaluation.at(self.step)
            except CUT_SHORT as error:  # the step is the last of a warm start, which is saved
                raise self._spent(error) from None
        return self.evaluation.before

    def run_recipe(self) -> dict[str, float]:
        """The recipe's own steps, and the final model; answers with the last evaluation."""
        phase = recipe_phase(self.config, self.prepared)
        schedule = self._make_schedule(phase)
        with self._stop_deferred():
            self._run_steps(phase, schedule)
            after, spent = dict[str, float](), None
            try:
                after = self.evaluation.at(self.step)
            except CUT_SHORT as error:  # the trained model is written nonetheless
                spent = error
            if self.config.cluster.holds_models:
                final = self.run_dir / "final"
                self.checkpoints.write(final, self.step, self._state(phase, schedule))
        if self.evaluation.under_way is None:  # else a judgement of it will never come
            self._close(schedule)
        if spent is not None:
            raise self._spent(spent)
        return after

    def run_recipe_to(self, last_step: int) -> None:
        """The recipe's steps up to `last_step` of the run, without a final model.

        The ranks keep the samples of the last one. May be called again with a later step.
        """
        phase = recipe_phase(self.config, self.prepared)
        if self.schedule is None:
            self.schedule = self._make_schedule(phase)
        self._run_steps(replace(phase, num_steps=last_step - phase.first_step), self.schedule)

    def write_final(self) -> None:
        """Write the model and, where the run saves, the state to resume from."""
        phase = recipe_phase(self.config, self.prepared)
        assert self.schedule is not None, "no step has been made"
        self.checkpoints.write(self.run_dir / "final", self.step, self._state(phase, self.schedule))

    def _begin_roles(self, phase: RunPhase) -> None:
        """Make the roles of a phase, with fresh optimizers."""
        graph = phase.graph
        passes = self.executor.has_passes(graph) or phase.schedule.trains_early
        moves = phase.schedule.entry.moves_samples and passes
        publishes = moves or self.executor.copies_to_other_pool(graph) or self.executor.separate
        logger.info("making the roles of phase %s", phase.name)
        graphs, training = graphs_of(graph, self.config), training_of(phase, self.config)
        for role, description in self.group.begin(graphs, training, publishes).items():
            self.telemetry.event("role", role=role, **asdict(description))

    def _make_schedule(self, phase: RunPhase) -> Schedule:
        """The schedule of a phase whose roles are there; where it was, if the run resumes in it."""
        rollout, graph = self.config.rollout, phase.graph
        sampling = sampling_of(self.config, rollout, rollout.max_new_tokens, rollout.temperature)
        sampling = replace(sampling, keeps_ids=rollout.replays_sampling)
        schedule = make_schedule(
            self.config,
            phase.schedule,
            graph,
            self.executor,
            self.prompts,
            sampling,
            phase.prompts_per_step,
            phase.num_steps,
            early_settings(
                self.config,
                self.group.instances,
                load_config(self.prepared.model_path, vision=self.config.model.vision),
            ),
            self.executor.counted_costs(graph, self.prepared.model_path, self._nodes),
        )
        if point := self._resumes_in(phase.name):
            graph.load_state_dict(point.state["recipe"])
            schedule.load_state_dict(
                point.state["schedule"],
                prompt_at=self.prompts.at,
                ranks=self.group.home.ranks,
            )
            self.checkpoints.load_samples(point, schedule)
            if self.episodes is not None:
                self.executor.take_up(schedule.pending(), point.state.get("episodes", []))
        self.evaluation.schedule = schedule
        return schedule

    # -- steps ---------------------------------------------------------------------------------

    def _run_steps(self, phase: RunPhase, schedule: Schedule) -> None:
        """Run the steps of a phase that are left: each is run, recorded, evaluated and saved."""
        self.telemetry.phase(phase.name, phase.num_steps, phase.first_step)
        logger.info("phase %s begins, to step %d", phase.name, phase.last_step)
        if phase.first_step < self.step < phase.last_step:  # a signal may have ended the run before
            self._evaluate_due(phase, schedule)
        while self.step < phase.last_step:
            self._stop_if_requested(phase, schedule)
            resumes = self.config.trainer.resumes
            self._before = self._state(phase, schedule, copies=False) if resumes else None
            start = time.time()
            result = self._run_step(schedule, self._before)
            self._before = None
            seconds = time.time() - start
            logger.info("step %d ended after %.3f s", self.step, seconds)
            if self.config.telemetry.samples is KeptSamples.all:
                # Before the step's record, with which a curriculum forgets its prompts.
                facts = sample_facts(result, self._origin_of)
                self.executor.record_samples(self.step, phase.name, facts)
            metrics = self.records.record_step(result, seconds, self.executor.read_texts)
            self.failures.record(self.step, result.dispatched)
            if self.config.records_digests:
                self.read_digests(phase.graph, result)
            self._check_finite(metrics)
            if costs := schedule.meter.costs():
                setting = replay_setting(self.config, self.executor, phase.graph)
                self.telemetry.costs(
                    {"costs": costs.to_json(), **self._scales(schedule.meter), **setting}
                )
            self._stop_if_requested(phase, schedule)
            if self.step < phase.last_step:
                self._evaluate_and_save(phase, schedule)
        self.executor.drain()  # the records of the phase are whole before the next one begins

    def read_digests(self, graph: Graph, result: StepResult) -> None:
        """Begin to read the digests of the present step, whose samples the ranks still hold."""
        record = partial(self.telemetry.digests, self.step)
        read_step_digests(graph, result, self.group, self.executor.read, record)

    def _scales(self, meter: CostMeter) -> dict[str, Any]:
        """What another mapping may take of the run's costs, and for which device and engine."""
        if not meter.counts:
            return {}
        return {
            "device": self.executor.device_name(self._nodes),
            "engine": self.config.rollout.engine.value,
            "scales": meter.scales().to_json(),
            "kinds": meter.table(),
        }

    def _run_step(self, schedule: Schedule, before: DriverState | None) -> StepResult:
        """One step; `before` is the driver's state, which a signal may want to go back to."""
        self._trace_environments()  # of evaluations, which belong to the step before
        self.step += 1
        logger.info("step %d begins", self.step)
        self.executor.may_abandon = before is not None
        try:
            with self._profiled(), self.saved.step(self.step):
                try:
                    result = schedule.run_step(self.step)
                except ValueError:  # too few samples, say, since their episodes have failed
                    self._check_failures(schedule.graph, schedule.samples)
                    raise
                self._check_failures(schedule.graph, result.dispatched)
                return result
        except Abandoned:
            assert before is not None
            self.step -= 1
            self._stop(before)
        except CUT_SHORT as error:
            self.step -= 1
            if before is not None and self.executor.may_abandon:
                self._save_stopped(before)
            raise self._spent(error) from None
        finally:
            self.executor.may_abandon = False

    def _check_failures(self, graph: Graph, samples: Sequence[Sample]) -> None:
        """Raise where too many of the step's episodes, or of its judgements, have failed."""
        if self.episodes is not None:
            self.episodes.check("the step", graph)
        check_failed_share(graph, samples, failed_shares(self.config), "the step")

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """Record torch's operations where `telemetry.profile` asks for them in this step."""
        profile = self.config.telemetry.profile
        if self.step not in profile.steps:
            yield
            return
        if self.config.cluster.device is not Device.cuda and not self._noted_no_snapshot:
            self._noted_no_snapshot = True
            self.telemetry.note("no snapshot of memory: the ranks are on CPUs", step=self.step)
        ranks = sorted(set(profile.ranks))
        self.group.start_profile(ranks)
        yield
        folder = self.run_dir.absolute() / "profile" / f"step-{self.step}"
        for rank, slices in self.group.end_profile(ranks, folder).items():
            self.telemetry.profile(rank_lane(rank), slices, self.step)

    def _origin_of(self, position: int) -> tuple[str, str]:
        """Source and task of a prompt."""
        item = self.prompts.at(position)
        return item.source, task_of(self.config.data, item)

    def _check_finite(self, metrics: dict[str, float]) -> None:
        """Report a step whose loss was not finite; stop after too many in a row."""
        counts = [n for name, n in metrics.items() if name.rpartition("/")[2] == "bad_steps"]
        if not any(counts):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        self.telemetry.event("bad_step", step=self.step, in_a_row=self.bad_steps)
        if self.bad_steps >= self.config.trainer.max_bad_steps:
            with contextlib.suppress(OSError):  # a full disk, say: the run ends for another reason
                self.executor.drain()
                self.group.finish_records()
                self.checkpoints.finish()
            raise TrainingDiverged(
                f"the loss or its gradient was not finite in {self.bad_steps} steps in a row"
                f" (trainer.max_bad_steps={self.config.trainer.max_bad_steps}), the last at step"
                f" {self.step}; the parameters are those before them"
            )

    def _evaluate_and_save(self, phase: RunPhase, schedule: Schedule) -> None:
        """After a step of a phase that continues."""
        self.checkpoints.poll()
        save_every = self.config.trainer.save_every
        # A warm start is short, and made again unless the run is a resumed one.
        keeps = phase.name == "rl" or self.config.trainer.resumes
        saves = keeps and save_every > 0 and (self.step - phase.first_step) % save_every == 0
        self._evaluate_due(phase, schedule, waits=saves)
        if saves:
            state = self._state(phase, schedule)  # an evaluation may end meanwhile
            self.checkpoints.save(self.step, self.evaluation.accuracy_at(self.step), state)
            self.after_checkpoint()

    def _evaluate_due(self, phase: RunPhase, schedule: Schedule, waits: bool = False) -> None:
        """Evaluate after a step of a phase that continues, where that is wanted, or begin to.

        With `waits` evaluations of earlier steps end before, so that a checkpoint has them. If one
        fails, or a budget is spent in it, the step's checkpoint is written.
        """
        if phase.name != "rl":
            return
        try:
            if waits:
                self.evaluation.wait()
            self.evaluation.begin(self.step, self.step - phase.first_step)
        except CUT_SHORT as error:
            if self.config.trainer.saves:
                self._save_stopped(self._state(phase, schedule))
            raise self._spent(error) from None

    def _close(self, schedule: Schedule) -> None:
        left = schedule.close()
        if left:
            self.telemetry.event(
                "unfinished", samples=len(left), reason=next(iter(left.values())).text
            )

    # -- stopping and resuming -----------------------------------------------------------------

    def _stop_deferred(self) -> contextlib.AbstractContextManager[None]:
        """Within, the first signal waits for the end of a step, which is saved before the run ends.

        A run that does not resume is interrupted at once.
        """
        return signals.graceful_stop() if self.config.trainer.resumes else contextlib.nullcontext()

    def _stop_if_requested(self, phase: RunPhase, schedule: Schedule) -> None:
        if signals.stop_requested():
            self._stop(self._state(phase, schedule))

    def _stop(self, state: DriverState) -> NoReturn:
        """Write the checkpoint of the last whole step, if there is none, and end the run."""
        logger.info("stopping after step %d, as a signal asks", self.step)
        self._save_stopped(state)
        self.executor.drain()
        signals.begin_stop()
        raise Interrupted(
            f"stopped after step {self.step}; trainer.resume=auto continues from there"
        )

    def _save_stopped(self, state: DriverState) -> None:
        """Write the checkpoint of the last whole step, if there is none.

        An evaluation of earlier weights that is still under way is given up: the run is to end.
        """
        late = self.evaluation.under_way
        if late is not None and late < self.step:
            self.telemetry.note(f"the evaluation after step {late} is given up: the run ends")
        begun = self.origin.point.state["step"] if self.origin.point else 0
        if self.step > begun and self.step not in self.checkpoints.scores:
            self.checkpoints.save(self.step, None, state)
        self.checkpoints.finish()

    def _spent(self, error: Exception) -> Exception:
        """The error of a run that ends after the present step; it says whether that is saved."""
        points, _ = search(self.run_dir)
        saved = any(point.state["step"] == self.step for point in points)
        how = "with a higher one" if isinstance(error, BudgetSpent) else "from there"
        resumes = f"; trainer.resume=auto continues {how}" if saved else ""
        return type(error)(f"{error}; stopped after step {self.step}{resumes}")

    def _state(self, phase: RunPhase, schedule: Schedule, *, copies: bool = True) -> DriverState:
        """The driver's part of a checkpoint; without `copies` what instances have begins anew."""
        if copies:
            schedule.copy_open()
        record = {
            "phase": phase.name,
            "prompts": self.prompts.position,
            "rows": self.prompts.sizes,
            "bad_steps": self.bad_steps,
            "evaluated": self.evaluation.state(),
            "records": self.telemetry.sizes(),
            "before": self.evaluation.before,
            "recipe": schedule.graph.state_dict(),
            "schedule": schedule.state_dict(),
        }
        pending = schedule.pending()
        if isinstance(self.prompts, CurriculumStream):
            record["curriculum"] = self.prompts.state_dict()
        if self.episodes is not None:
            record["episodes"] = self.episodes.state(pending)
        return DriverState(record, pending, schedule.needs_versions(), schedule.group_fields)

    def _resume_driver(self, point: Point, damaged: Sequence[str]) -> None:
        """Be where the driver was at `point`; ranks and schedule follow with their phase."""
        state = point.state
        for wrong in damaged:
            self.telemetry.note(f"damaged, passed over: {wrong}")
        self.telemetry.note(f"continuing after step {state['step']}, from {point.folder}")
        self.step, self.bad_steps = state["step"], state["bad_steps"]
        self.evaluation.load_state(state["evaluated"])
        self.evaluation.before = state["before"]
        self.prompts.resume(state["prompts"], state.get("rows", {}))
        if isinstance(self.prompts, CurriculumStream) and "curriculum" in state:
            self.prompts.load_state_dict(state["curriculum"])

    def _resumes_in(self, phase: str) -> Point | None:
        """The checkpoint that this run resumes from, if that is of `phase`."""
        point = self.origin.point
        return point if point is not None and point.state["phase"] == phase else None

    def _restore_roles(self, phase: RunPhase) -> None:
        """Have the ranks' roles load the checkpoint, if it is of `phase`."""
        if point := self._resumes_in(phase.name):
            self.checkpoints.load(point)


def _judge_failures(config: Config, origin: Origin) -> JudgeFailures:
    """Judgements that have failed in steps that the run makes again; none where it begins anew."""
    run_dir = Path(config.run.dir)
    failures = JudgeFailures(run_dir)
    if (followed := followed_run(config)) is not None:
        failures.follow(followed)
    if origin.point is not None and origin.continues(run_dir):
        failures.resume(origin.point.state["step"] if origin.goes_back else None)
    elif config.trainer.resumes:
        failures.resume(0)
    return failures


def _executor(
    config: Config, prepared: PreparedRun, group: WorkerGroup, on_switch: OnSwitch
) -> RayExecutor:
    """The executor of the run, which knows what training costs and who answers conversations."""
    graph, model_path = prepared.graph, prepared.model_path
    works = work_of_roles(config, graph, model_path)
    if isinstance(config.cluster, EmulatedClusterConfig):
        return EmulatedExecutor(group, config, on_switch, works, graph)
    turns, launcher = prepared.turns, group.launcher
    record = recorded_run(config)
    failures = {} if record is None else record.failures
    episodes = Episodes(config, turns, launcher, failures) if turns is not None else None
    together = roles_together(config, graph, "actor") if config.trainer.fuses else ()
    return RayExecutor(group, config, on_switch, works, episodes, together)
