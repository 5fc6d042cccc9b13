"""Placement: PPO with the critic on separate ranks against all on all ranks, in turns.

`make bench-placement`. The same model for actor, reference and critic, random weights, so that
every response is as long as it may be. Two ranks of one thread in both placements, 1 + 1 under
split. "Placement" in docs/driver.md has the placements.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lines import line, show
from tasks import make_config

from hybridrl.config import Config, FusedScheduleConfig, ScheduleConfig, SerialScheduleConfig
from hybridrl.data import PromptStream
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.schedule_factory import make_schedule
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import Sampling
from hybridrl.flow.graph import Stage
from hybridrl.preflight.placement import graphs_of
from hybridrl.preflight.prepare import PreparedRun, prepare
from hybridrl.runtime.launchers import launched
from hybridrl.schedule import StageSpan
from hybridrl.workers.training import Training

# By name: placement, schedule, and whether updates of different pools run at once.
SIDES = {
    "colocate": ("colocate", SerialScheduleConfig(), True),
    "split": ("split", SerialScheduleConfig(), True),
    "split, one update after the other": ("split", SerialScheduleConfig(), False),
    "colocate, fused": ("colocate", FusedScheduleConfig(), True),
    "split, fused": ("split", FusedScheduleConfig(), True),
}


class OneUpdate(RayExecutor):
    """Tells the schedule that all ranks are one pool, so that no two updates overlap."""

    def pool(self, stage: Stage) -> str:
        """One name for all."""
        return "all"


class Side:
    """One way to run the same steps; `updates` and `steps` are the seconds of each."""

    def __init__(
        self,
        config: Config,
        group: WorkerGroup,
        prepared: PreparedRun,
        schedule: ScheduleConfig,
        at_once: bool,
    ) -> None:
        kind = RayExecutor if at_once else OneUpdate
        executor = kind(group, config, lambda reports: None)
        data = prepared.data
        prompts = PromptStream(data.train, config.run.seed, data.weights)
        self.schedule = make_schedule(
            config, schedule, prepared.graph, executor, prompts,
            Sampling(config.rollout.max_new_tokens), config.trainer.prompts_per_step,
        )  # fmt: skip
        self.steps: list[float] = []
        self.updates: list[float] = []

    def step(self, number: int) -> None:
        """Run one and measure it."""
        clock = self.schedule.executor.clock
        start = clock.now()
        spans = self.schedule.run_step(number).spans
        self.steps.append(clock.now() - start)
        self.updates.append(_wall([s for s in spans if s.name.startswith("update_")]))
        self.schedule.release()  # the next side makes samples of the same names


def _wall(spans: list[StageSpan]) -> float:
    return max(span.stop for span in spans) - min(span.start for span in spans)


@contextmanager
def groups(configs: Mapping[str, Config], prepared: Mapping[str, PreparedRun]) -> Iterator[Any]:
    """The ranks of both placements, in one Ray; on the way out no process is left."""
    config = configs["split"]
    group_by_name: dict[str, WorkerGroup] = {}
    with launched(config.cluster, Path(config.run.dir) / "logs") as launcher:
        try:
            for name, its in configs.items():
                group = WorkerGroup(
                    launcher, its, prepared[name].model_path, lambda *_: None, lambda *_: None
                )
                group_by_name[name] = group
                group.setup()
                optims = {"actor": its.trainer.optim, "critic": its.roles.critic.optim}
                training = {role: Training(optim, 10**6) for role, optim in optims.items()}
                group.begin(graphs_of(prepared[name].graph, its), training, publishes=True)
            yield group_by_name
        finally:
            for group in group_by_name.values():
                group.kill()


def configuration(placement: str, run_dir: Path, args: argparse.Namespace) -> Config:
    """PPO of one placement, with weights that stay as they are to the last bits."""
    return make_config(
        "recipe=ppo", "recipe.num_samples=4", f"cluster.placement={placement}", "cluster.ranks=2",
        f"model.tiny.hidden_size={args.width}", f"model.tiny.intermediate_size={3 * args.width}",
        "model.tiny.num_layers=4", "warm_start.steps=0", f"trainer.prompts_per_step={args.prompts}",
        f"rollout.max_new_tokens={args.tokens}", "trainer.optim.lr=1e-9",
        "roles.critic.optim.lr=1e-9",
        "trainer.steps=1000000", "data.eval_size=8", f"run.dir={run_dir}",
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16, help="of a step; 4 samples each")
    parser.add_argument("--tokens", type=int, default=48, help="of a response")
    parser.add_argument("--width", type=int, default=256, help="of the model's hidden state")
    args = parser.parse_args(argv)
    run_dir = Path(tempfile.mkdtemp(prefix="bench"))
    try:
        configs = {
            name: configuration(name, run_dir / name, args) for name in ("colocate", "split")
        }
        prepared = {name: prepare(config) for name, config in configs.items()}
        with groups(configs, prepared) as group_by_name:
            sides = {
                name: Side(
                    configs[placement],
                    group_by_name[placement],
                    prepared[placement],
                    schedule,
                    at_once,
                )
                for name, (placement, schedule, at_once) in SIDES.items()
            }
            for number in range(args.rounds + 1):
                for side in sides.values() if number % 2 else reversed(sides.values()):
                    side.step(number)
            show_comparisons(sides)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def show_comparisons(sides: Mapping[str, Side]) -> None:
    """The comparisons, without the first round."""
    for ours, theirs, quantity in (
        ("split", "split, one update after the other", "updates"),
        ("split", "colocate", "updates"),
        ("split", "colocate", "steps"),
        ("split, fused", "colocate, fused", "steps"),
    ):
        timings = (getattr(sides[name], quantity)[1:] for name in (ours, theirs))
        show(line(f"{ours} over {theirs}: {quantity}", "s", "lower", *timings))


if __name__ == "__main__":
    main()
