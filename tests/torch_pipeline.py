"""The oracle of our lists: the same chunks trained by torch's own pipeline schedules."""

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from hybridrl.config import PipelineSchedule


def reversed_ranks(schedule):
    """A schedule of torch whose chunks run from the last rank to the first.

    Each rank has the passes of the rank opposite. torch reads from these lists which rank holds a
    chunk (`_validate_and_set_stage_mapping`).
    """

    class Reversed(schedule):
        def _calculate_single_rank_operations(self, rank):
            return super()._calculate_single_rank_operations(self.pp_group_size - 1 - rank)

    return Reversed


def train_by_torch(pipeline, batches, finish):
    """As `Pipeline.train`, of rows of equal length without passes, by torch's schedule."""
    tokens = batches[0].ids.shape[1]
    assert all(batch.ids.shape[1] == tokens and not batch.passes for batch in batches)
    schedule = torch_schedule(pipeline, len(batches), tokens)
    numbers = torch.arange(len(batches))
    inputs = [torch.cat([batch.ids for batch in batches])] if pipeline.numbers[0] == 0 else []
    with pipeline.prepared(batches, finish, with_entropy=True):
        schedule.step(*inputs, target=numbers, number=numbers)


def torch_schedule(pipeline, num_batches, tokens):
    """torch's schedule for the chunks of this rank."""
    pairs = zip(pipeline.chunks, pipeline.numbers, strict=True)
    stages = [torch_stage(pipeline, *pair, tokens) for pair in pairs]
    settings = {"loss_fn": lambda output, _: output.sum(), "scale_grads": False}
    if pipeline.kind is PipelineSchedule.one_f_one_b:
        return Schedule1F1B(stages[0], num_batches, **settings)
    kind = {
        PipelineSchedule.interleaved: ScheduleInterleaved1F1B,
        PipelineSchedule.zero_bubble: ScheduleZBVZeroBubble,
    }[pipeline.kind]
    if pipeline.ranks[0] > 0:
        kind = reversed_ranks(kind)
    return kind(stages, num_batches, **settings)


def torch_stage(pipeline, chunk, number, tokens):
    """torch's stage of one chunk; it splits inputs over micro-batches, so it passes numbers."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    hidden = torch.zeros(pipeline.hidden_shape(tokens), dtype=pipeline.dtype, device="meta")
    hidden.requires_grad_()  # else no gradient is received for it
    loss = torch.zeros(1, device="meta", requires_grad=True)
    num_chunks = len(pipeline.ranks)
    stage = PipelineStage(
        chunk,
        number,
        num_chunks,
        pipeline.device,
        input_args=hidden if number else ids,
        output_args=loss if number == num_chunks - 1 else hidden,
        group=pipeline.group,
    )
    stage.stage_index_to_group_rank = dict(enumerate(pipeline.ranks))  # else i mod pp
    return stage
