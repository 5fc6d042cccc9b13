"""The shares of an update: which samples each rank trains in each optimizer step."""

from collections.abc import Sequence
from itertools import pairwise

from hybridrl.config import TrainerConfig
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import NO_VERSION, Sample, SampleId
from hybridrl.workers.training import UpdateShare


def update_shares(
    stage: UpdateStage,
    samples: Sequence[Sample],
    ranks: Sequence[int],
    members: Sequence[int],
    trainer: TrainerConfig,
) -> dict[int, UpdateShare]:
    """Each member's share of an update, without parcels; `ranks` are those of the samples.

    Mini-batches are consecutive rows of samples, nearly equally many.
    """
    wanted = {
        sample.id: {
            field: sample.number(field)
            for field in stage.fields.values()
            if field in sample.scalars
        }
        for sample in samples
    }
    versions = {s.id: min((x.version for x in s.spans), default=NO_VERSION) for s in samples}
    num = stage.mini_batches or trainer.mini_batches
    rows = -(-len(samples) // stage.samples_per_row)
    bounds = [rows * i // num * stage.samples_per_row for i in range(num)] + [len(samples)]
    # Without samples where all were trained early.
    batches = [(a, b) for a, b in pairwise(bounds) if a < b or num == 1]
    by_rank: dict[int, list[list[SampleId]]] = {rank: [[] for _ in batches] for rank in members}
    for number, (a, b) in enumerate(batches):
        for i in range(a, b):
            by_rank[ranks[i]][number].append(samples[i].id)
    shares = {}
    for rank, ids_of_batches in by_rank.items():
        mini_batches = tuple(map(tuple, ids_of_batches))
        own = [id for ids in mini_batches for id in ids]
        scalars = {id: wanted[id] for id in own}
        oldest = {id: versions[id] for id in own}
        shares[rank] = UpdateShare(mini_batches, scalars, oldest, ())
    return shares
