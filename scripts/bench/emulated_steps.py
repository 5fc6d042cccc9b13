"""Steps of a run on an emulated device, and their prediction in virtual time; for other benches."""

import contextlib
import cProfile
import io
import pstats
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from hybridrl.config import Config, compose
from hybridrl.driver.origin import Origin
from hybridrl.driver.run import Run
from hybridrl.driver.train import running
from hybridrl.flow.executor import Scope
from hybridrl.plan.schedule import Setting, replay
from hybridrl.plan.separate import split_setting
from hybridrl.preflight.prepare import prepare
from hybridrl.workers.emulation import (
    emulated_conversations,
    emulated_push,
    emulated_widths,
    emulated_workload,
    scaled_costs,
)

QUIET = ("telemetry.progress=false", "telemetry.report=false", "telemetry.loggers=[]")


@dataclass(frozen=True, slots=True)
class Steps:
    """Means of a run's steps but the first ones, before which a schedule has learned nothing."""

    seconds: float
    """Wall time of a step, with its records."""
    cpu_s: float
    """CPU time of the driver's process in a step, all its threads, with Ray's."""
    samples: float
    """Samples that a step has trained on."""


def config_of(settings: Sequence[str], run_dir: Path) -> Config:
    """The run's config; the recipe's groups without spread are trained on, as in virtual time."""
    compose.register()
    overrides = ["cluster=emulated", *QUIET, *settings, f"run.dir={run_dir}"]
    return compose.check(overrides)


def measure(
    config: Config, profile: cProfile.Profile | None = None, skip: int = 1, rest: int = 0
) -> Steps:
    """Run all steps of `trainer.steps` and time each; `profile` sees all but the first `skip`.

    Neither these nor the last `rest` steps count.
    """
    prepared, seconds, cpu, samples = prepare(config), [], [], []
    with running(config, prepared, Origin()) as run:
        run.begin_recipe()
        for step in range(1, config.trainer.steps + 1):
            start, start_cpu = time.perf_counter(), time.process_time()
            with _profiled(profile if step > skip else None):
                run.run_recipe_to(step)
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
            samples.append(_trained(run))
    counted = slice(skip, len(seconds) - rest)
    return Steps(fmean(seconds[counted]), fmean(cpu[counted]), fmean(samples[counted]))


def setting_of(config: Config, stages: Sequence[str], round_trip_s: float | None = None) -> Setting:
    """The what-if run of `hybridrl plan schedule` for costs, lengths and limits of `config`.

    `stages` are the recipe's forward passes, by the names of their costs. `round_trip_s` replaces
    that of the costs.
    """
    costs = scaled_costs(config)
    kept = {name: costs.token_s[name] for name in stages}
    calls = {name: costs.stage_call_s[name] for name in stages if name in costs.stage_call_s}
    costs = replace(costs, token_s=kept, stage_call_s=calls)
    if round_trip_s is not None:
        costs = replace(costs, round_trip_s=round_trip_s)
    group_size = int(config.recipe.get("group_size") or config.recipe["num_samples"])
    size, apart = config.rollout.layout.ranks, config.cluster.pools.rollout
    setting = Setting(
        costs=costs,
        num_instances=config.cluster.ranks // size,
        instance_ranks=size,
        max_held=config.samples_held,
        decode_steps=config.rollout.decode_steps,
        chunk_tokens=config.trainer.max_tokens_per_micro_batch,
        workload=emulated_workload(config, group_size).cut_at(config.rollout.max_new_tokens),
        group_size=group_size,
        widths=emulated_widths(config),
        conversations=emulated_conversations(config),
        scopes={"critic": Scope.WORLD},  # values need the critic's training shards
    )
    return split_setting(setting, apart // size, emulated_push(config)) if apart else setting


def predict(
    config: Config, stages: Sequence[str], round_trip_s: float | None = None, skip: int = 1
) -> float:
    """Mean step of `hybridrl plan schedule`, in virtual time; parameters as in `setting_of`."""
    setting = setting_of(config, stages, round_trip_s)
    return replay(setting, config.schedule, skip).step_s


def hottest(profile: cProfile.Profile, num: int) -> str:
    """The functions with most time of their own, and those with most in all."""
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    for order in ("tottime", "cumtime"):
        stats.sort_stats(order).print_stats(num)
    return text.getvalue()


@contextlib.contextmanager
def _profiled(profile: cProfile.Profile | None) -> Iterator[None]:
    if profile is None:
        yield
        return
    profile.enable()
    try:
        yield
    finally:
        profile.disable()


def _trained(run: Run) -> float:
    assert run.schedule is not None
    return float(len([s for s in run.schedule.samples if "advantage" in s.scalars]))
