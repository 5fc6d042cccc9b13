"""A run from its config to its last line: bring-up, warm start, the recipe, evaluation, records."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NoReturn

from hybridrl.checkpoint.folder import Point, forget_later, read
from hybridrl.config import Config, OptimConfig, ScheduleKind, TrainerConfig
from hybridrl.controller.checkpoints import Checkpoints, DriverState, Origin, find_origin
from hybridrl.controller.composite_reward import with_parts
from hybridrl.controller.evaluate import evaluate, evaluation_graph
from hybridrl.controller.placement import graphs_of
from hybridrl.controller.preflight import PreparedRun, prepare
from hybridrl.controller.ray_executor import Abandoned, RayExecutor
from hybridrl.controller.schedule_registry import make_schedule, samples_held
from hybridrl.controller.worker_group import WorkerError, WorkerGroup
from hybridrl.data import PromptStream
from hybridrl.flow import Graph, Kind
from hybridrl.flow.executor import Sampling
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.schedules import StepResult
from hybridrl.flow.schedules.base import Schedule
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.launcher import Launcher
from hybridrl.runtime.launchers import launched
from hybridrl.system import signals
from hybridrl.system.memory import MemoryReading
from hybridrl.telemetry.run import Telemetry
from hybridrl.workers.base_worker import TimeSpan
from hybridrl.workers.training import Training

__all__ = ["RayStartError", "TrainingDiverged", "WorkerError", "evaluate_only", "train"]


class Interrupted(KeyboardInterrupt):
    """A signal has ended the run where it can go on; the message says from which step."""


class TrainingDiverged(RuntimeError):
    """The run cannot usefully go on; the message says why."""


def train(config: Config) -> dict[str, Any]:
    """Run warm start and recipe; returns what the command line prints."""
    origin = find_origin(config, reads=True)
    prepared = prepare(config)
    try:
        with _job(config, prepared, origin) as job:
            job.warm_start()
            job.begin_recipe()
            before = job.evaluate_before()
            after = job.run_recipe()
    except BaseException:  # interrupted runs too
        with contextlib.suppress(OSError):  # a full disk is the error that is on its way
            _render(config)
        raise
    _render(config)
    accuracies = {"accuracy_before": before, "accuracy_after": after}
    found = {k: m["eval_accuracy"] for k, m in accuracies.items() if "eval_accuracy" in m}
    return {**found, "run": config.run.dir}


def evaluate_only(config: Config) -> dict[str, Any]:
    """Evaluate what the recipe trains on the held-out items; returns the metrics."""
    prepared = prepare(config)
    with _job(config, prepared, Origin()) as job:
        if "actor" not in prepared.graph.learned:
            job.begin_recipe()  # for the model that it trains
        metrics = job.evaluate()
    return {**metrics, "run": config.run.dir}


def _render(config: Config) -> None:
    if config.telemetry.report:
        from hybridrl.telemetry.report import render

        render(Path(config.run.dir))


@contextmanager
def _job(config: Config, prepared: PreparedRun, origin: Origin) -> Iterator["Run"]:
    """A job with its ranks up; on the way out, whatever happened, no process is left."""
    total = config.warm_start_steps + config.trainer.steps
    run_dir = Path(config.run.dir)
    if origin.goes_back and origin.point is not None:
        forget_later(origin.point)  # before its records are cut off: those are of what is there
    with (
        Telemetry(run_dir, config.telemetry, total, origin.records(config)) as telemetry,
        launched(config.cluster, run_dir / "logs") as launcher,
    ):
        ranks, engine = config.cluster.ranks, config.rollout.engine.value
        telemetry.stage(f"starting {ranks} ranks, rollout engine {engine}")
        job = Run(config, prepared, telemetry, launcher, origin)
        try:
            yield job
            job.group.close()
        finally:
            job.group.kill()


class Run:
    """The parts of a run. `step` counts optimizer iterations over warm start and recipe.

    A run that goes on from a checkpoint does as one that starts: it makes each phase's roles at
    the phase's beginning, since copies and value models are of that moment; then what the
    checkpoint has of them replaces what they are.
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
        self.step = 0
        self.bad_steps, self._idle = 0, False
        on = (self._on_span, self._on_memory)
        self.group = WorkerGroup(launcher, config, prepared.model_path, *on)
        described = self.group.setup()[0]
        telemetry.event("ranks", **described)
        telemetry.nodes([asdict(machine) for machine in self.group.machines()])
        self.executor = RayExecutor(self.group, config, self._on_switch)
        self.prompts = PromptStream(prepared.data.train, config.run.seed, prepared.data.weights)
        evaluation = evaluation_graph(prepared.graph, config.eval.num_samples)
        self.evaluation = evaluation and with_parts(evaluation, config)
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})  # the last time: step, metrics
        self._before: dict[str, float] = {}  # of the evaluation before the recipe
        self.origin, self.run_dir = origin, Path(config.run.dir)
        self.checkpoints = Checkpoints(config, origin, self.group, telemetry)
        if origin.point is not None:
            self._go_on(origin.point, origin.damaged)

    def _go_on(self, point: Point, damaged: Sequence[str]) -> None:
        """Be where the driver was at `point`; ranks and schedule follow with their phase."""
        state = point.state
        for wrong in damaged:
            self.telemetry.note(f"damaged, passed over: {wrong}")
        self.telemetry.note(f"going on after step {state['step']}, from {point.folder}")
        self.step, self.bad_steps = state["step"], state["bad_steps"]
        self._evaluated, self._before = tuple(state["evaluated"]), state["before"]
        self.prompts.seek(state["prompts"])

    # -- phases --------------------------------------------------------------------------------

    def warm_start(self) -> None:
        """The supervised phase, where the config asks for one."""
        warm, graph = self.config.warm_start, self.prepared.warm_start
        if graph is None:
            return
        folder, point = self.run_dir / "warm_start", self.origin.point
        self._begin(ScheduleKind.serial, graph, self.config.warm_start_steps, warm.optim)
        if point is not None and self._point("rl"):
            ended = read(point.run_dir / "warm_start")  # what the recipe's roles are copies of
            self.checkpoints.load(ended)
            if not self.origin.continues(self.run_dir):
                self.checkpoints.write(
                    folder, self.config.warm_start_steps, DriverState(ended.state)
                )
            return
        self._restore("warm_start")
        schedule = self._schedule("warm_start", ScheduleKind.serial, graph, warm.prompts_per_step)
        with self._asking():
            self._fit("warm_start", schedule)
            self._close(schedule)
            there = point is not None and point.folder.resolve() == folder.resolve()
            if self.config.trainer.saves and not there:
                self.checkpoints.write(folder, self.step, self._state("warm_start", schedule))

    def begin_recipe(self) -> None:
        """Make the recipe's roles; a frozen copy is of this moment."""
        trainer = self.config.trainer
        self._begin(self.config.schedule, self.prepared.graph, trainer.steps, trainer.optim)
        self._restore("rl")

    def run_recipe(self) -> dict[str, float]:
        """The recipe's own steps, and the final model; answers with the last evaluation."""
        trainer, graph = self.config.trainer, self.prepared.graph
        schedule = self._schedule("rl", self.config.schedule, graph, trainer.prompts_per_step)
        with self._asking():
            self._fit("rl", schedule)
            after = self.evaluate()
            final = self.run_dir / "final"
            self.checkpoints.write(final, self.step, self._state("rl", schedule))
        self._close(schedule)
        return after

    def _asking(self) -> contextlib.AbstractContextManager[None]:
        """Within, there may be steps to save, and a run that can go on ends when that is done.

        Any other, and this one where it has none of its own, is interrupted.
        """
        return signals.asking() if self.config.trainer.resumes else contextlib.nullcontext()

    def _point(self, phase: str) -> Point | None:
        """What this run goes on from, if that is of `phase`."""
        point = self.origin.point
        return point if point is not None and point.state["phase"] == phase else None

    def _restore(self, phase: str) -> None:
        """Have the ranks, whose roles are there, go on from the checkpoint, if it is of `phase`."""
        if point := self._point(phase):
            self.checkpoints.load(point)

    def _state(self, phase: str, schedule: Schedule) -> DriverState:
        """The driver's part of a checkpoint."""
        record = {
            "phase": phase,
            "prompts": self.prompts.position,
            "bad_steps": self.bad_steps,
            "evaluated": self._evaluated,
            "records": self.telemetry.sizes(),
            "before": self._before,
            "recipe": schedule.graph.state_dict(),
            "schedule": schedule.state_dict(),
        }
        return DriverState(record, schedule.carried())

    def _begin(self, kind: ScheduleKind, graph: Graph, steps: int, optim: OptimConfig) -> None:
        """Make the roles of `graph` for so many steps; `optim` is the actor's optimizer."""
        moves = kind is not ScheduleKind.serial and self.executor.has_passes(graph)
        publishes = moves or self.executor.lends(graph)
        training = {
            role: Training(
                optim if role == "actor" else self.config.value_model_of(role).optim,
                total_updates(graph, role, steps, self.config.trainer),
            )
            for role in dict.fromkeys(["actor", *graph.learned])
        }
        graphs = graphs_of(graph, self.config)
        for role, described in self.group.begin(graphs, training, publishes).items():
            self.telemetry.event("role", role=role, **described)

    def _schedule(
        self, name: str, kind: ScheduleKind, graph: Graph, prompts_per_step: int
    ) -> Schedule:
        """That of a phase with `graph`, whose roles are there; where it was, if it goes on."""
        rollout = self.config.rollout
        sampling = Sampling(
            rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k
        )
        schedule = make_schedule(
            self.config, kind, graph, self.executor, self.prompts, sampling, prompts_per_step
        )
        if point := self._point(name):
            graph.load_state_dict(point.state["recipe"])
            schedule.load_state_dict(
                point.state["schedule"],
                prompt_at=self.prompts.at,
                num_ranks=len(self.group.home.ranks),
            )
            self.checkpoints.load_samples(point, schedule)
        return schedule

    def _fit(self, name: str, schedule: Schedule) -> None:
        """Run the steps of a phase that are left."""
        first = self.config.warm_start_steps if name == "rl" else 0
        last = self.config.trainer.steps if name == "rl" else self.config.warm_start_steps
        last += first
        self.telemetry.phase(name, last - first, first)
        if first < self.step < last:  # a signal may have ended the run before
            self._evaluate_due(name, self.step - first)
        while self.step < last:
            self._stop_if_asked(name, schedule)
            before = self._state(name, schedule) if self.config.trainer.resumes else None
            start = time.time()
            result = self._run_step(schedule, before)
            self._record(result, time.time() - start)
            if costs := schedule.meter.costs():
                self.telemetry.costs({"costs": costs.to_json(), **self._machine(schedule.graph)})
            self._stop_if_asked(name, schedule)
            if self.step < last:
                self._evaluate_and_save(name, self.step - first, schedule)

    def _stop_if_asked(self, phase: str, schedule: Schedule) -> None:
        if signals.asked():
            self._stop(self._state(phase, schedule))

    def _run_step(self, schedule: Schedule, before: DriverState | None) -> StepResult:
        """One step; `before` is the driver's state, which a signal may want to go back to."""
        self.step += 1
        self.executor.may_abandon = before is not None
        try:
            return schedule.run_step(self.step)
        except Abandoned:
            assert before is not None
            self.step -= 1
            self._stop(before)
        finally:
            self.executor.may_abandon = False

    def _stop(self, state: DriverState) -> NoReturn:
        """Write the checkpoint of the last whole step, if there is none, and end the run."""
        begun = self.origin.point.state["step"] if self.origin.point else 0
        if self.step > begun and self.step not in self.checkpoints.scores:
            self.checkpoints.save(self.step, None, state)
        signals.answered()
        raise Interrupted(f"stopped after step {self.step}; trainer.resume=auto goes on from there")

    def _close(self, schedule: Schedule) -> None:
        left = schedule.close()
        if left:
            self.telemetry.event("unfinished", samples=len(left), reason=next(iter(left.values())))

    def _machine(self, graph: Graph) -> dict[str, Any]:
        """What the planner must know besides costs to replay the run."""
        computes = [stage for stage in graph.stages.values() if stage.kind is Kind.COMPUTE]
        return {
            "scopes": {stage.name: self.executor.scope(stage).value for stage in computes},
            "num_instances": len(self.executor.instances),
            "max_held": samples_held(self.config),
            "decode_steps": self.config.rollout.decode_steps,
            "chunk_tokens": self.config.trainer.max_tokens_per_micro_batch,
        }

    def _evaluate_and_save(self, phase: str, done: int, schedule: Schedule) -> None:
        """After `done` steps of a phase that goes on."""
        accuracy, save_every = self._evaluate_due(phase, done), self.config.trainer.save_every
        # A warm start is short, and made again unless the run is one that goes on.
        keeps = phase == "rl" or self.config.trainer.resumes
        if keeps and save_every and done % save_every == 0:
            self.checkpoints.save(self.step, accuracy, self._state(phase, schedule))

    def _evaluate_due(self, phase: str, done: int) -> float | None:
        """Accuracy after `done` steps of a phase that goes on, where that is wanted."""
        every = self.config.eval.every
        if phase == "rl" and every and done % every == 0:
            return self.evaluate().get("eval_accuracy")
        return None

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate_before(self) -> dict[str, float]:
        """Held-out metrics before the recipe's first step; a run that goes on has them."""
        if not self._point("rl"):
            self._before = self.evaluate()
        return self._before

    def evaluate(self) -> dict[str, float]:
        """Held-out metrics, recorded at the present step; none where nothing can be evaluated."""
        if self.evaluation is None:
            return {}
        if self._evaluated[0] == self.step:
            return self._evaluated[1]
        self.telemetry.stage("evaluating")
        start = time.time()
        metrics = evaluate(
            self.config,
            self.evaluation,
            self.executor,
            self.prepared.data.eval,
            self.step,
            lambda samples: self.telemetry.samples(
                self.step, self._texts(samples), phase="evaluation"
            ),
        )
        self.telemetry.log(self.step, metrics)
        self.telemetry.event("evaluation", step=self.step, seconds=time.time() - start, **metrics)
        self._evaluated = (self.step, metrics)
        return metrics

    # -- records -------------------------------------------------------------------------------

    def _on_span(self, rank: int, span: TimeSpan) -> None:
        lane = f"rank {rank}/beside" if span.concurrent else f"rank {rank}"
        self.telemetry.span(lane, span.name, span.start, span.stop, self.step)

    def _on_memory(self, rank: int, memory: MemoryReading) -> None:
        self.telemetry.memory(f"rank {rank}", memory.when, memory.held)

    def _on_switch(self, reports: list[dict[str, Any]]) -> None:
        """Bytes are summed over the ranks; of times and of extra memory the worst rank counts."""
        received = [int(report["bytes_received"]) for report in reports]
        worst = {
            key: max(report[name] for report in reports)
            for key, name in (
                ("pack_s", "seconds_pack"),
                ("wait_s", "seconds_wait"),
                ("copy_s", "seconds_copy"),
                ("scratch_bytes", "scratch_bytes"),
                ("held_bytes", "bytes_held"),
            )
        }
        self.telemetry.event(
            "switch",
            step=self.step,
            bytes=sum(received),
            bytes_theory=sum(int(report["bytes_theory"]) for report in reports),
            bytes_most=max(received),
            seconds=max(report["seconds"] for report in reports),
            **worst,
            path=reports[0]["path"],
        )

    def _record(self, result: StepResult, seconds: float) -> None:
        metrics = step_metrics(result, seconds)
        self._check_trained(result, metrics)
        end = 0.0
        for span in sorted(result.spans, key=lambda span: span.start):
            # A lane's slices must not overlap, and a schedule's stages may.
            lane = "driver" if span.start >= end else f"driver/{span.name}"
            self.telemetry.span(lane, span.name, span.start, span.stop, self.step)
            end = max(end, span.stop)
        self.telemetry.log(self.step, metrics)
        self.telemetry.lengths(
            self.step,
            [sample.response_tokens for sample in result.dispatched],
            prompts=[sample.id.prompt for sample in result.dispatched],
            prompt_tokens=[sample.prompt_tokens for sample in result.dispatched],
        )
        self.telemetry.samples(self.step, self._texts(result.dispatched))
        self._check_finite(metrics)

    def _texts(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        shown = samples[: self.config.telemetry.samples_per_step]
        by_rank: dict[int, list[SampleId]] = defaultdict(list)
        for sample in shown:
            by_rank[sample.rank].append(sample.id)
        texts = self.group.texts(by_rank)
        others = [name for name in judged(shown) if name != "reward"]
        return [
            {
                "id": str(sample.id),
                "prompt": texts[sample.id][0],
                "response": texts[sample.id][1],
                "reward": sample.scalars.get("reward"),
                "status": sample.scalars.get("reward_status"),
                "tokens": sample.response_tokens,
                "finish": sample.scalars.get("finish"),
                "advantage": sample.scalars.get("advantage"),
                **{name: sample.scalars.get(name) for name in others},
            }
            for sample in shown
        ]

    def _check_trained(self, result: StepResult, metrics: dict[str, float]) -> None:
        """Say it, the first time, where a step had nothing to train on."""
        if self._idle or any(name.rpartition("/")[2] == "loss" for name in result.metrics):
            return
        self._idle = True
        self.telemetry.note(
            f"step {self.step}: nothing to train on, {metrics['filtered']:g} samples left out;"
            " where the rewards of a prompt's samples are all alike, there is nothing to learn",
            step=self.step,
        )

    def _check_finite(self, metrics: dict[str, float]) -> None:
        """Report a step whose loss was not finite; stop after too many in a row."""
        counts = [n for name, n in metrics.items() if name.rpartition("/")[2] == "bad_steps"]
        if not any(counts):
            self.bad_steps = 0
            return
        self.bad_steps += 1
        self.telemetry.event("bad_step", step=self.step, in_a_row=self.bad_steps)
        if self.bad_steps >= self.config.trainer.max_bad_steps:
            raise TrainingDiverged(
                f"the loss or its gradient was not finite in {self.bad_steps} steps in a row"
                f" (trainer.max_bad_steps={self.config.trainer.max_bad_steps}), the last at step"
                f" {self.step}; the parameters are those before them"
            )


def judged(samples: Sequence[Sample]) -> list[str]:
    """Fields with a score of these samples, of whatever judged them: each has a status."""
    names = {name: None for sample in samples for name in sample.scalars}
    return [name for name in names if f"{name}_status" in names]


def total_updates(graph: Graph, role: str, steps: int, trainer: TrainerConfig) -> int:
    """Optimizer steps of `role` in so many steps of `graph`."""
    total = 0
    for stage in graph.stages.values():
        if stage.kind is Kind.UPDATE and stage.role == role:
            options = stage.options
            passes = options["epochs"] or trainer.epochs
            per_step = passes * (options["mini_batches"] or trainer.mini_batches)
            total += per_step * max(0, steps - options["after"])
    return total


def step_metrics(result: StepResult, seconds: float) -> dict[str, float]:
    """What is recorded of a step: the actor's metrics, rewards, lengths, rates, stage seconds."""
    samples = result.dispatched
    metrics = {name.removeprefix("actor/"): value for name, value in result.metrics.items()}
    chosen = [reason.startswith(("filter", "take", "unused")) for reason in result.dropped.values()]
    metrics |= {
        "step_s": seconds,
        "filtered": float(sum(chosen)),
        "dropped": float(len(chosen) - sum(chosen)),
        "migrated": result.metrics.get("samples/migrated", 0.0),
    }
    for name in ("migration_threshold", "parked", "resumed", "staleness"):
        if f"samples/{name}" in result.metrics:
            metrics[name] = result.metrics[f"samples/{name}"]
    if trained := result.metrics.get("samples/trained_tokens"):
        metrics["off_policy_share"] = result.metrics["samples/off_policy_tokens"] / trained
    for span in result.spans:
        key = f"{span.name}_s"
        metrics[key] = metrics.get(key, 0.0) + span.stop - span.start
    for name in ("kl", *judged(samples)):
        if values := [float(s.scalars[name]) for s in samples if name in s.scalars]:
            metrics |= {f"{name}_mean": fmean(values), f"{name}_std": pstdev(values)}
    for status in ("error", "timeout"):
        found = sum(str(s.scalars.get("reward_status")).startswith(status) for s in samples)
        if "reward_mean" in metrics:
            metrics[f"reward_{status}"] = float(found)
    lengths = sorted(sample.response_tokens for sample in samples)
    if lengths:
        metrics |= {
            "response_tokens_mean": fmean(lengths),
            "response_tokens_p10": float(lengths[len(lengths) // 10]),
            "response_tokens_p90": float(lengths[len(lengths) * 9 // 10]),
            "response_tokens_max": float(lengths[-1]),
            "tokens_per_s": sum(sample.tokens for sample in samples) / seconds,
            "samples_per_s": len(samples) / seconds,
        }
    return metrics
