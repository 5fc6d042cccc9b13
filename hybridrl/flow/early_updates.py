"""Which update may train on groups before the whole batch is there: derived from the graph.

A gradient is a sum over samples. So an update may begin with samples that are certain to be in its
batch. What it reads of them must not depend on the others.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hybridrl.flow.executor import Scope, StagePlaces
from hybridrl.flow.graph import (
    ByBatchStage,
    ComputeStage,
    GenerateStage,
    Graph,
    PromptsStage,
    SourceStage,
    Stage,
    TakeStage,
    UpdateStage,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlySettings:
    """What a run's settings say of early backward, whatever the recipe.

    `obstacle` says what keeps an instance from training alone, and which setting would not; None is
    nothing. `epochs` and `mini_batches` are those of updates that name none.
    """

    obstacle: str | None = None
    epochs: int = 1
    mini_batches: int = 1


@dataclass(frozen=True, slots=True)
class EarlyUpdate:
    """The update of a section that may begin early; or None, and why all of it is trained late."""

    stage: UpdateStage | None
    reason: str = ""


def early_update(
    graph: Graph,
    section: Sequence[Stage],
    streamed: Collection[str],
    places: StagePlaces,
    settings: EarlySettings,
) -> EarlyUpdate:
    """The update of `section` that may begin while its samples are generated.

    `streamed` names the stages that run prompt by prompt by then (`early_stages` with `by_group`).

    The update is alone on its ranks, trains the actor, and makes one optimizer step. All that comes
    before it in the section is streamed. So a `by_batch`, a stage that needs the training shards,
    or samples of an earlier round make it late, and a `take` anywhere. Its loss compares no
    samples, and weights tokens by totals that are a factor. A recipe with state
    (`flow.state`) is late: its functions may read what others wrote before them.

    Example: generate, score, filter, by_group, update is early. With `take` behind the filter it is
    late: another round may be asked for, and ranks that train early generate no more. So is PPO:
    its advantages are whitened over the batch.
    """

    def late(reason: str) -> EarlyUpdate:
        return EarlyUpdate(None, reason)

    updates = [stage for stage in section if isinstance(stage, UpdateStage)]
    actors = [stage for stage in updates if stage.role == "actor"]
    if not any(isinstance(stage, GenerateStage) for stage in section) or not actors:
        return late("no update of the actor follows a generation")
    (stage, *more) = actors
    pool = places.pool(stage)
    others = [s.name for s in updates if s is not stage and places.pool(s) == pool]
    if more or others:
        return late(f"{stage.name} shares its ranks with the update {others[0]}")
    if reason := _obstacle(graph, stage, settings):
        return late(reason)
    before = graph.ancestors(stage.name)
    for name, ancestor in graph.stages.items():
        if name in before and name not in streamed and not isinstance(ancestor, PromptsStage):
            if isinstance(ancestor, SourceStage) and ancestor in section:
                continue
            return late(_why_late(ancestor, places))
    return EarlyUpdate(stage)


def _obstacle(graph: Graph, stage: UpdateStage, settings: EarlySettings) -> str | None:
    """Why an update that is alone on its ranks is late, whatever comes before it; else None."""
    if settings.obstacle is not None:
        return settings.obstacle
    num_steps = (stage.epochs or settings.epochs) * (stage.mini_batches or settings.mini_batches)
    if num_steps > 1:
        return f"{stage.name} has {num_steps} optimizer steps (epochs x mini-batches)"
    if stage.samples_per_row > 1:
        return f"the loss of {stage.name} compares {stage.samples_per_row} samples"
    if not stage.loss.totals_are_factor:
        return f"the normalization {stage.loss.normalize} of {stage.name} is the user's own"
    if takes := [s.name for s in graph.stages.values() if isinstance(s, TakeStage)]:
        return f"{takes[0]} may ask for another round, which every rank generates"
    if graph.states:
        return f"the recipe's numbers {sorted(graph.states)} change within a step"
    return None


def _why_late(stage: Stage, places: StagePlaces) -> str:
    """Why a stage before an update does not run while samples are generated."""
    match stage:
        case ByBatchStage():
            return f"{stage.name} reads the whole batch"
        case SourceStage():
            return f"the samples of {stage.name} are of an earlier round of the step"
        case ComputeStage() if places.scope(stage) is Scope.WORLD:
            return f"{stage.name} needs the training shards of all ranks"
    return f"{stage.name} waits for the whole batch"
