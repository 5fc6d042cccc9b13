"""The order of passes in which the engine computes the pipeline of one model."""

from hybridrl.config import PipelineSchedule
from hybridrl.pipelines.problem import (
    PassKind,
    PipelineAction,
    PipelinedModel,
    PipelinePlan,
)
from hybridrl.pipelines.standard import interleaved, one_f_one_b, zero_bubble
from hybridrl.planner.mapping import TrainLayout


def engine_order(model: PipelinedModel, layout: TrainLayout, trains: bool) -> PipelinePlan:
    """The order of passes that the engine takes."""
    if not trains:  # one chunk of a rank after the other
        actions: list[list[PipelineAction]] = [[] for _ in range(layout.pp)]
        for chunk, rank in enumerate(model.ranks):
            for number in range(len(model.costs)):
                actions[rank].append(PipelineAction(0, PassKind.forward, chunk, number))
        return actions
    if layout.pp == 1:
        return one_f_one_b(model)
    match layout.schedule:
        case PipelineSchedule.one_f_one_b:
            return one_f_one_b(model)
        case PipelineSchedule.interleaved:
            return interleaved(model)
        case PipelineSchedule.zero_bubble:
            return zero_bubble(model)
