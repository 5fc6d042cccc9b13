"""The phases of a run, the warm start and the recipe, and how much each trains."""

from dataclasses import dataclass

from hybridrl.config import Config, OptimConfig, ScheduleConfig, SerialScheduleConfig
from hybridrl.flow import Graph
from hybridrl.preflight.nothing_to_learn import total_updates
from hybridrl.preflight.prepare import PreparedRun
from hybridrl.workers.training import Training


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPhase:
    """The warm start or the recipe, and its steps. Steps count over the whole run.

    `name` is that of the records and of the checkpoints: `warm_start` or `rl`. `optim` is the
    actor's optimizer, `first_step` the number of steps before the phase.
    """

    name: str
    schedule: ScheduleConfig
    graph: Graph
    first_step: int
    num_steps: int
    prompts_per_step: int
    optim: OptimConfig

    @property
    def last_step(self) -> int:
        """The number of steps when the phase has ended."""
        return self.first_step + self.num_steps


def warm_start_phase(config: Config, prepared: PreparedRun) -> RunPhase | None:
    """The supervised phase, where the config asks for one."""
    if prepared.warm_start is None:
        return None
    return RunPhase(
        name="warm_start",
        schedule=SerialScheduleConfig(),
        graph=prepared.warm_start,
        first_step=0,
        num_steps=config.warm_start_steps,
        prompts_per_step=config.warm_start.prompts_per_step,
        optim=config.warm_start.optim,
    )


def recipe_phase(config: Config, prepared: PreparedRun) -> RunPhase:
    """The recipe's own phase."""
    return RunPhase(
        name="rl",
        schedule=config.schedule,
        graph=prepared.graph,
        first_step=config.warm_start_steps,
        num_steps=config.trainer.steps,
        prompts_per_step=config.trainer.prompts_per_step,
        optim=config.trainer.optim,
    )


def training_of(phase: RunPhase, config: Config) -> dict[str, Training]:
    """How a phase trains each of its roles, from a fresh optimizer on."""
    return {
        role: Training(
            phase.optim if role == "actor" else config.value_model_of(role).optim,
            total_updates(phase.graph, role, phase.num_steps, config.trainer),
        )
        for role in dict.fromkeys(["actor", *phase.graph.learned])
    }
