"""Stage fusion: fused and partial against serial, in turns, on the same ranks and prompts.

`make bench-fusion`. GRPO with a reward model and a reference model of the actor's size, on a task
whose responses have a long tail. Two ranks of one thread. "Stage fusion" in docs/benchmarks.md
explains the figures.
"""

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, pstdev, quantiles

from fusion_steps import Measured, Recorder, of_block, record_step
from lines import line, show
from tasks import TASKS, THREADS, make_config
from widen import widen

from hybridrl.config import (
    Config,
    FusedScheduleConfig,
    PartialScheduleConfig,
    ScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.costs.instance import Costs
from hybridrl.costs.meter import CostMeter
from hybridrl.data import Item, PromptStream
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.schedule_factory import make_schedule
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import Sampling
from hybridrl.flow.workload import Group, Workload
from hybridrl.plan.schedule import Setting, replay
from hybridrl.preflight.placement import graphs_of
from hybridrl.preflight.prepare import PreparedRun, prepare
from hybridrl.rewards.model import make_reward_model
from hybridrl.runtime.launcher import Launcher
from hybridrl.runtime.launchers import launched
from hybridrl.schedule.base import Prompt, Schedule
from hybridrl.workers.training import Training

TASK = TASKS["longtail"]
GROUP_SIZE = 8
WIDER = 3  # times the width of the trained weights: 10.7 M parameters, of which a step is work
# Weights stay as they are to the last bits, so that serial and fused make the same responses.
LEARNING_RATE = 1e-9
WARM_UP = 2  # rounds: `fused` learns costs and lengths, `partial` gets into its stride
SCHEDULES: dict[str, ScheduleConfig] = {
    config.kind.value: config
    for config in (SerialScheduleConfig(), FusedScheduleConfig(), PartialScheduleConfig())
}
_PARTIAL_FIRST = 1_000_000  # positions of a separate stream of the same prompts
_TAIL = 8.0  # p99 over p50 that the task is to have


class Prompts(Iterator[Prompt]):
    """A stream of prompts that can go back; `first` is added to the positions."""

    def __init__(self, stream: PromptStream, first: int = 0) -> None:
        self.stream, self.first = stream, first
        self.taken: dict[int, Item] = {}

    def __next__(self) -> Prompt:
        position, item = next(self.stream)
        self.taken[self.first + position] = item
        return self.first + position, item


class Bench:
    """Three schedules over one group of ranks, and what each of their steps took."""

    def __init__(
        self, config: Config, prepared: PreparedRun, launcher: Launcher, recorder: Recorder
    ) -> None:
        self.config, self.recorder = config, recorder
        self.group = WorkerGroup(
            launcher, config, prepared.model_path, recorder.on_span, lambda rank, memory: None
        )
        self.group.setup()
        executor = RayExecutor(self.group, config, lambda reports: None)
        # Ranks publish what they make, of which serial has no use: a millisecond of its calls.
        training = {"actor": Training(config.trainer.optim, config.trainer.steps)}
        self.group.begin(graphs_of(prepared.graph, config), training, publishes=True)
        rollout = config.rollout
        sampling = Sampling.of(rollout, rollout.max_new_tokens, rollout.temperature)
        data = prepared.data
        self.meter = CostMeter()
        self.prompts: dict[str, Prompts] = {}
        self.schedules: dict[str, Schedule] = {}
        for name in SCHEDULES:
            stream = PromptStream(data.train, config.run.seed, data.weights)
            prompts = Prompts(stream, _PARTIAL_FIRST if name == "partial" else 0)
            self.prompts[name] = prompts
            self.schedules[name] = schedule = make_schedule(
                config, SCHEDULES[name], prepared.graph, executor, prompts, sampling,
                config.trainer.prompts_per_step,
            )  # fmt: skip
            schedule.meter = self.meter  # what one learns of the machine holds for all

    def block(self, name: str, first_step: int, steps: int) -> list[Measured]:
        """Run `steps` steps; `serial` and `fused` both from the prompts of `first_step` on."""
        schedule = self.schedules[name]
        if name != "partial":
            self.prompts[name].stream.seek(first_step * self.config.trainer.prompts_per_step)
        measured = []
        for step in range(first_step, first_step + steps):
            measured.append(record_step(name, step, schedule, self.recorder))
            schedule.release()  # the next schedule may make samples of the same names
        return measured

    def rounds(self, num: int, steps: int) -> dict[str, list[list[Measured]]]:
        """By schedule and round, the steps of a block; the order is drawn anew for every round."""
        draw = random.Random(0)
        by_name: dict[str, list[list[Measured]]] = {name: [] for name in SCHEDULES}
        for i in range(num + WARM_UP):
            for name in draw.sample(list(SCHEDULES), len(SCHEDULES)):
                block = self.block(name, i * steps, steps)
                if i >= WARM_UP:
                    by_name[name].append(block)
            check_same_work(by_name)
        return by_name


def check_same_work(by_name: Mapping[str, list[list[Measured]]]) -> None:
    """Raise unless `serial` and `fused` made responses of the same lengths.

    Batches of other shapes differ in the last bits, so one token in a million may differ.
    """
    for ours, theirs in zip(by_name["fused"], by_name["serial"], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.lengths.keys() == b.lengths.keys()
            other = sum(a.lengths[id] != b.lengths[id] for id in a.lengths)
            if other > max(1, len(a.lengths) // 50):
                raise RuntimeError(f"{other} of {len(a.lengths)} responses of fused differ")


# -- figures -----------------------------------------------------------------------------------


def longest_alone(step: Measured, costs: Costs) -> float:
    """Seconds of the longest sample alone: decoding one row, then inference."""
    prompt, response = max(step.sizes.values(), key=lambda size: size[1])
    decode = costs.decode(1, response, prompt + response / 2)
    passes = sum(costs.compute(stage, prompt + response) for stage in costs.token_s)
    return costs.call_s + decode + passes


def bound(step: Measured, costs: Costs, ranks: int) -> float:
    """Seconds that generation and inference take at least, by what serial's ranks did.

    All they were at work over the ranks, or the longest sample alone.
    """
    return max(step.busy_s / ranks, longest_alone(step, costs))


def show_steps(by_name: Mapping[str, list[list[Measured]]], bounds: Sequence[float]) -> None:
    """Step times, and what fusion recovers of what there is to recover."""
    per_sample = {
        name: [of_block(block, "seconds") / of_block(block, "trained") for block in blocks]
        for name, blocks in by_name.items()
    }
    for name in ("fused", "partial"):
        ours, theirs = per_sample[name], per_sample["serial"]
        show(
            line(
                f"{name}_step_vs_serial", "s per trained sample", "lower", ours, theirs,
                of_totals=round(sum(ours) / sum(theirs), 3),
                front_ratio=round(_total(by_name[name], "front_s") / _total(by_name["serial"],
                                                                          "front_s"), 3),
                **_facts(by_name[name]),
                **{f"baseline_{key}": value for key, value in _facts(by_name["serial"]).items()},
            )
        )  # fmt: skip
    serial = [of_block(block, "front_s") for block in by_name["serial"]]
    fused = [of_block(block, "front_s") for block in by_name["fused"]]
    steps = [
        (of_block(a, "seconds") - of_block(b, "seconds")) / (front - least)
        for a, b, front, least in zip(
            by_name["serial"], by_name["fused"], serial, bounds, strict=True
        )
    ]
    shares = [(s - f) / (s - b) for s, f, b in zip(serial, fused, bounds, strict=True)]
    show(
        line(
            "fused_recovered_share", "of serial less bound", "higher", shares, [1.0] * len(shares),
            of_totals=round((sum(serial) - sum(fused)) / (sum(serial) - sum(bounds)), 3),
            whole_step_share=round(fmean(steps), 3),
            serial_s=round(fmean(serial), 3), fused_s=round(fmean(fused), 3),
            bound_s=round(fmean(bounds), 3),
        )
    )  # fmt: skip
    show(line("fused_step_over_bound", "s", "lower", fused, bounds))


def _total(blocks: list[list[Measured]], name: str) -> float:
    return sum(of_block(block, name) for block in blocks)


def _facts(blocks: list[list[Measured]]) -> dict[str, float]:
    """What a schedule did in a step, on average."""
    steps = [step for block in blocks for step in block]
    names = dict.fromkeys(name for step in steps for name in step.metrics)
    return {
        "step_s": round(fmean(step.seconds for step in steps), 3),
        "front_s": round(fmean(step.front_s for step in steps), 3),
        "bubble_share": round(fmean(step.bubble_share for step in steps), 3),
        **{name: round(fmean(step.metrics[name] for step in steps), 3) for name in names},
    }


def show_lengths(steps: Sequence[Measured]) -> None:
    """The tail of what the model really produced; warns where it is shorter than wanted."""
    lengths = sorted(n for step in steps for n in step.lengths.values())
    cuts = quantiles(lengths, n=100, method="inclusive")
    show(
        line(
            "response_tokens_p99_over_p50", "tokens", "higher", [cuts[98]], [cuts[49]],
            max=lengths[-1], mean=round(fmean(lengths), 1), samples=len(lengths),
            wanted=_TAIL,
        )
    )  # fmt: skip


def show_simulated(
    bench: Bench, by_name: Mapping[str, list[list[Measured]]], costs: Costs, samples: int
) -> None:
    """The planner's replay of the measured lengths with the costs learned here, by schedule.

    Generation and inference together, a step; the first step is left out on both sides, since a
    replay begins without knowledge.
    """
    config = bench.config
    for name in SCHEDULES:
        steps = [step for block in by_name[name] for step in block]
        workload = _workload(steps, bench.prompts[name].taken)
        setting = Setting(
            costs=costs,
            num_instances=len(bench.group.instances),
            max_held=config.samples_held,
            decode_steps=config.rollout.decode_steps,
            chunk_tokens=config.trainer.max_tokens_per_micro_batch,
            workload=workload,
            group_size=samples,
        )
        outcome = replay(setting, SCHEDULES[name])
        measured = [step.front_s for step in steps[1:] or steps]
        show(
            line(
                f"simulated_over_measured_{name}", "s", "level",
                [outcome.front_s], [fmean(measured)],
                spread=round(pstdev(measured) / fmean(measured), 3),
                steps=len(measured), bubbles=round(outcome.bubbles, 3),
                migrated=round(outcome.migrated, 1), threshold=outcome.threshold,
            )
        )  # fmt: skip


def _workload(steps: Sequence[Measured], taken: Mapping[int, Item]) -> Workload:
    """The samples of these steps as groups in the order of the prompt stream."""
    groups: dict[int, list[int]] = {}
    for id, length in sorted((id, n) for step in steps for id, n in step.lengths.items()):
        groups.setdefault(id.prompt, []).append(length)
    workload_groups = tuple(Group(len(taken[p].prompt_ids), tuple(n)) for p, n in groups.items())
    return Workload(workload_groups, len(workload_groups) // len(steps), len(steps))


# -- the run -----------------------------------------------------------------------------------


def weights(cache: Path, wider: int) -> tuple[Path, Path]:
    """The directories of actor and reward model, made now where they are not in `cache`."""
    trained = TASK.model(cache)
    actor, judge = (trained.with_name(f"{trained.name}-x{wider}{s}") for s in ("", "-reward"))
    for path, make in (
        (actor, lambda to: widen(trained, to, wider)),
        (judge, lambda to: make_reward_model(to, str(actor), seed=0)),
    ):
        if not path.is_dir():
            unfinished = path.with_name(f"{path.name}.part")  # a run that was cut short leaves this
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(path)
    return actor, judge


def configuration(
    actor: Path, judge: Path | None, run_dir: Path, prompts: int, settings: Sequence[str] = ()
) -> Config:
    """GRPO on two ranks of one thread, every group trained on, with both forward-only roles.

    Without a `judge` a verifier judges, and there is no reference. `settings` are further ones.
    """
    roles = ["reward=exact", 'reward.extract="#([a-z]*)"']
    if judge is not None:
        roles = ["recipe.kl_coef=0.001", "reward=model", f"reward.model={judge}"]
    return make_config(
        *TASK.data,
        f"model.path={actor}",
        f"run.dir={run_dir}",
        "recipe=grpo",
        f"recipe.group_size={GROUP_SIZE}",
        "recipe.skip_equal_groups=false",
        *roles,
        f"rollout.max_new_tokens={TASK.max_new_tokens}",
        f"trainer.prompts_per_step={prompts}",
        "trainer.steps=1000000",
        f"trainer.optim.lr={LEARNING_RATE}",
        "eval.sets.main.every=null",
        f"cluster.ranks={THREADS}",
        "cluster.threads_per_rank=1",
        "telemetry.progress=false",
        "telemetry.report=false",
        *settings,
    )


@contextmanager
def bench(config: Config, recorder: Recorder) -> Iterator[Bench]:
    """A bench with its ranks up; on the way out no process is left."""
    prepared = prepare(config)
    run_dir = Path(config.run.dir)
    with launched(config.cluster, run_dir / "logs") as launcher:
        running = Bench(config, prepared, launcher, recorder)
        try:
            yield running
        finally:
            running.group.kill()


def main(argv: list[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--prompts", type=int, default=16, help=f"of a step; {GROUP_SIZE} samples")
    parser.add_argument("--wider", type=int, default=WIDER, help="than the trained weights")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--trace", type=Path, help="write the ranks' timeline, for Perfetto")
    args = parser.parse_args(argv)
    run_dir = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        config = configuration(*weights(args.cache, args.wider), run_dir, args.prompts)
        with bench(config, Recorder(args.trace)) as running:
            by_name = running.rounds(args.rounds, args.steps)
            costs = running.meter.costs()
            assert costs is not None
            ranks = config.cluster.ranks
            bounds = [sum(bound(step, costs, ranks) for step in b) for b in by_name["serial"]]
            show_lengths([step for block in by_name["serial"] for step in block])
            show_steps(by_name, bounds)
            show_simulated(running, by_name, costs, GROUP_SIZE)
    finally:
        shutil.rmtree(run_dir)


if __name__ == "__main__":
    main()
