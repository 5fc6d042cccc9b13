"""Assignment of samples to the ranks that train, or read, them, and to optimizer steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hybridrl.config import VALUE_MODELS, Config, TrainerConfig, TrainLayoutConfig
from hybridrl.flow import Graph
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import NO_VERSION, Sample, SampleId
from hybridrl.pipelines.balance import BY_TOKENS, SequenceCost, balance
from hybridrl.pipelines.prompt_groups import PromptGroups
from hybridrl.workers.training import UpdateShare

# Moving samples costs a few milliseconds a step; below this surplus of the busiest rank's work
# over the mean they train where they were made.
_TOLERATED_IMBALANCE = 0.02


@dataclass(frozen=True, slots=True)
class RankWork:
    """What samples cost the ranks of a role: by lengths alone, so a batch has one split.

    `blocks` has, for each rank, the ranks that share its rows of more than `max_tokens`: each of
    them costs all of its block alike. Without blocks none is shared. With `shares_prompts` a rank
    computes the prompt of its samples of a group once. Example: the blocks of fsdp 4 with cp 2 are
    (0, 1), (0, 1), (2, 3), (2, 3).
    """

    cost: SequenceCost = BY_TOKENS
    max_tokens: int = 0
    blocks: tuple[tuple[int, ...], ...] = ()
    shares_prompts: bool = False

    @classmethod
    def of(
        cls,
        layout: TrainLayoutConfig,
        max_tokens: int,
        cost: SequenceCost,
        shares_prompts: bool = False,
    ) -> "RankWork":
        """Return the work of a trained role, whose layout is resolved.

        Where ranks share rows, prompts do not decide which rank gets a sample.
        """
        if layout.cp == 1:
            return cls(cost, shares_prompts=shares_prompts)
        ranks = range(layout.pp * layout.replicas * layout.fsdp * layout.tp)
        # The stages and tp ranks of a replica pool their sequences, so they are of its block.
        block_of = [
            (rank // (layout.tp * layout.fsdp) % layout.replicas,
             rank // layout.tp % layout.fsdp // layout.cp)
            for rank in ranks
        ]  # fmt: skip
        blocks = {own: tuple(r for r in ranks if block_of[r] == own) for own in set(block_of)}
        return cls(cost, max_tokens, tuple(blocks[own] for own in block_of))

    def sharers(self, row: Sequence[Sample], rank: int) -> Sequence[int]:
        """The ranks that compute a row which is on `rank`."""
        return self.blocks[rank] if self.is_shared(row) else [rank]

    def is_shared(self, row: Sequence[Sample]) -> bool:
        """Whether a block of ranks computes the row."""
        return bool(self.blocks) and sum([s.tokens for s in row]) > self.max_tokens

    def costs(self, rows: Sequence[Sequence[Sample]]) -> list[int]:
        """The cost of each row: that of its samples, each of which attends to itself alone."""
        return [sum(self.cost.of_all([sample.tokens for sample in row])) for row in rows]

    def groups(self, samples: Sequence[Sample], samples_per_row: int) -> PromptGroups:
        """The samples as groups that share prompts."""
        return PromptGroups(
            [sample.tokens for sample in samples],
            [(sample.id.prompt, sample.prompt_tokens) for sample in samples],
            [sample.prompt_tokens for sample in samples],
            self.cost,
            samples_per_row,
        )


UNKNOWN_WORK = RankWork()
"""The work of a role whose ranks do not share rows, by tokens."""


def joint_work(works: Sequence[RankWork]) -> RankWork:
    """The work of roles that train on the same samples together; of one role its own.

    Those of several roles share no rows.
    """
    if len(works) == 1:
        return works[0]
    assert not any(work.blocks for work in works), "roles with shared rows train alone"
    per_token = sum(work.cost.per_token for work in works)
    cost = SequenceCost(per_token, sum(work.cost.per_pair for work in works))
    return RankWork(cost, shares_prompts=works[0].shares_prompts)


def work_of_roles(config: Config, graph: Graph, model_path: str) -> dict[str, RankWork]:
    """The work of each role that is trained, by the operations of its model."""
    from hybridrl.models.flops import forward_flops
    from hybridrl.models.load import load_config

    trainer, shares = config.trainer, config.trainer.shares_prompts
    budget = trainer.max_tokens_per_micro_batch
    actor = SequenceCost(*forward_flops(load_config(model_path)))
    works = {"actor": RankWork.of(trainer.layout, budget, actor, shares)}
    for role in VALUE_MODELS:
        if role in graph.learned:
            settings, cost = config.value_model_of(role), actor
            if settings.path is not None:
                cost = SequenceCost(*forward_flops(load_config(settings.path)))
            works[role] = RankWork.of(settings.layout, budget, cost, shares)
    return works


def assign_ranks(
    samples: Sequence[Sample],
    num_ranks: int,
    samples_per_row: int = 1,
    move: bool = False,
    work: RankWork = UNKNOWN_WORK,
) -> list[int]:
    """The rank that trains each sample: its present rank if that is balanced, else by `work`.

    `samples_per_row` consecutive samples stay together. Depends on lengths and present ranks only,
    never on time; with `move` on lengths alone.
    """
    here = [sample.rank for sample in samples]
    rows = _rows(samples, samples_per_row)
    together = {len({sample.rank for sample in row}) for row in rows} <= {1}
    if not move and together and work.shares_prompts:
        dealt = deal(samples, num_ranks, samples_per_row, work)
        groups = work.groups(samples, samples_per_row)
        present, best = (groups.heaviest(_parts(ranks, num_ranks)) for ranks in (here, dealt))
        return here if present <= (1 + _TOLERATED_IMBALANCE) * best else dealt
    if not move and together:
        loads = [0.0] * num_ranks
        for row, cost in zip(rows, work.costs(rows), strict=True):
            sharers = work.sharers(row, row[0].rank)
            for rank in sharers:
                loads[rank] += cost / len(sharers)
        if max(loads) <= (1 + _TOLERATED_IMBALANCE) * sum(loads) / num_ranks:
            return here
    return deal(samples, num_ranks, samples_per_row, work)


def deal(
    samples: Sequence[Sample],
    num_ranks: int,
    samples_per_row: int = 1,
    work: RankWork = UNKNOWN_WORK,
) -> list[int]:
    """The rank that gets each sample, by `work`; `samples_per_row` in a row stay together.

    Shared rows are spread over blocks of ranks, then the others over what these leave.
    """
    if work.shares_prompts:
        places = [0] * len(samples)
        for rank, indices in enumerate(work.groups(samples, samples_per_row).deal(num_ranks)):
            for index in indices:
                places[index] = rank
        return places
    rows = _rows(samples, samples_per_row)
    costs, ranks_of_rows, loads = work.costs(rows), [0] * len(rows), [0] * num_ranks
    shared = [i for i, row in enumerate(rows) if work.is_shared(row)]
    blocks = list(dict.fromkeys(work.blocks)) if shared else []
    rows_by_block = balance([costs[i] for i in shared], len(blocks)) if shared else []
    for block, numbers in zip(blocks, rows_by_block, strict=True):
        for place, number in enumerate(numbers):
            ranks_of_rows[shared[number]] = block[place % len(block)]
        for rank in block:
            loads[rank] = sum(costs[shared[number]] for number in numbers) // len(block)
    alone = [i for i, row in enumerate(rows) if not work.is_shared(row)]
    for rank, numbers in enumerate(balance([costs[i] for i in alone], num_ranks, loads=loads)):
        for number in numbers:
            ranks_of_rows[alone[number]] = rank
    return [ranks_of_rows[i // samples_per_row] for i in range(len(samples))]


def _parts(ranks: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The samples of each rank, by the `ranks` of the samples."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, rank in enumerate(ranks):
        parts[rank].append(index)
    return parts


def _rows(samples: Sequence[Sample], samples_per_row: int) -> list[Sequence[Sample]]:
    """Consecutive samples that stay together."""
    return [samples[i : i + samples_per_row] for i in range(0, len(samples), samples_per_row)]


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
    versions = {s.id: min([x.version for x in s.spans], default=NO_VERSION) for s in samples}
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
