"""What of a run's settings teaches nothing: said, or refused, before it starts."""

import logging

from hybridrl.config import VALUE_MODELS, Config, ConfigError, RewardCall, TrainerConfig
from hybridrl.flow import Graph
from hybridrl.flow.graph import (
    ByBatchStage,
    ComputeStage,
    GenerateStage,
    SourceStage,
    Stage,
    UpdateStage,
)

log = logging.getLogger(__name__)


def check_groups(graph: Graph) -> None:
    """Raise for a judge of whole groups that would see one response at a time in training."""
    for stage in graph.stages.values():
        if isinstance(stage, ComputeStage) and stage.whole_groups:
            maker = _maker_of(graph, stage)
            if maker.num_samples == 1:
                allowed = f"sample: the recipe has one response a prompt in stage {maker.name!r}"
                raise ConfigError(f"{stage.role}.call", RewardCall.group.value, allowed)


def _maker_of(graph: Graph, stage: Stage) -> SourceStage:
    """The stage that makes the samples of another one."""
    while not isinstance(stage, SourceStage):
        stage = graph.stages[stage.upstream[0]]
    return stage


def warn_of_lone_samples(config: Config, graph: Graph) -> None:
    """Say where a step has one sample and its recipe compares the samples of a step."""
    for stage in graph.stages.values():
        if not isinstance(stage, ByBatchStage) or config.trainer.prompts_per_step > 1:
            continue
        if _maker_of(graph, stage).num_samples == 1:
            log.warning(
                "trainer.prompts_per_step=1: stage %r compares the samples of a step, of which "
                "there is one: it may learn nothing", stage.name,
            )  # fmt: skip


def warn_of_idle_updates(config: Config, graph: Graph) -> None:
    """Say where the run is over before an update begins."""
    steps = config.trainer.steps
    if steps == 0 and config.warm_start_steps:  # it is the warm start that is wanted
        return
    for stage in graph.stages.values():
        if isinstance(stage, UpdateStage) and stage.after >= steps:
            log.warning(
                "trainer.steps=%d: %s is never trained, since stage %r begins after %d steps",
                steps, stage.role, stage.name, stage.after,
            )  # fmt: skip


def warn_of_long_warm_ups(config: Config, graph: Graph) -> None:
    """Say where the learning rate is still rising when the run ends."""
    for role in graph.learned:
        key = VALUE_MODELS.get(role, "trainer")
        optim = config.trainer.optim
        if role in VALUE_MODELS:
            optim = config.value_model_of(role).optim
        updates = total_updates(graph, role, config.trainer.steps, config.trainer)
        if updates and optim.warmup_steps > updates:
            log.warning(
                "%s.optim.warmup_steps=%d: the run has %d updates, and its learning rate gets to "
                "%.2g of lr", key, optim.warmup_steps, updates, updates / optim.warmup_steps,
            )  # fmt: skip


def total_updates(graph: Graph, role: str, steps: int, trainer: TrainerConfig) -> int:
    """Optimizer steps of `role` in so many steps of `graph`."""
    total = 0
    for stage in graph.stages.values():
        if isinstance(stage, UpdateStage) and stage.role == role:
            passes = stage.epochs or trainer.epochs
            per_step = passes * (stage.mini_batches or trainer.mini_batches)
            total += per_step * max(0, steps - stage.after)
    return total


def warn_of_equal_samples(config: Config, graph: Graph) -> None:
    """Say where all samples of a prompt are drawn alike, so that comparing them teaches nothing."""
    for stage in graph.stages.values():
        if not isinstance(stage, GenerateStage) or (stage.num_samples or 0) < 2:
            continue
        for key, greedy in (("temperature", 0), ("top_k", 1), ("min_p", 1)):
            own, run = getattr(stage.sampling, key, None), getattr(config.rollout, key)
            if (run if own is None else own) == greedy:
                log.warning(
                    "rollout.%s=%g: the %d samples of a prompt in stage %r are all the most likely "
                    "one, and where they are compared nothing is learned",
                    key, run, stage.num_samples, stage.name,
                )  # fmt: skip
