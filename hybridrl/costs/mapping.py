"""What a mapping of models to devices consists of (HybridFlow, arXiv 2409.19256, section 6).

A mapping has pools of ranks, the roles of each pool, the training layout of each trained role, the
layout of generation, and a schedule. These are plain data: `CostModel` has their seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from hybridrl.config import (
    ActivationMode,
    PipelineSchedule,
    ScheduleConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.costs.devices import Accelerator
from hybridrl.costs.links import LinkSpeed, LinkTable
from hybridrl.costs.model_shape import ModelShape
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layout import chunk_bounds, rank_of_chunk
from hybridrl.layout.parameters import context_mesh, expert_mesh, train_mesh

ACTOR = "actor"


class SampleLength(NamedTuple):
    """Tokens of a sample."""

    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt + self.response

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to."""
        return self.tokens * (self.tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class SampleTotals:
    """Sums over samples, in tokens and in pairs of a query and a key; the longest sample."""

    samples: int
    tokens: int
    scored: int
    pairs: int
    longest: int

    @classmethod
    def of(cls, samples: Sequence[SampleLength]) -> "SampleTotals":
        """Return the sums over the samples of a mini-batch."""
        # A replay asks for each of its calls, so no property is asked.
        tokens = [prompt + response for prompt, response in samples]
        pairs = sum([n * (n + 1) for n in tokens]) // 2
        scored = sum([response for _, response in samples])
        return cls(len(samples), sum(tokens), scored, pairs, max(tokens, default=0))


AT_ONCE = LinkSpeed(1e18)
"""Where nothing moves: between the host and a rank on CPUs, say."""


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Nodes of equal accelerators; ranks are on nodes one after the other, one an accelerator."""

    nodes: int
    per_node: int
    accelerator: Accelerator
    within: LinkSpeed
    """Between accelerators of a node."""
    between: LinkSpeed
    """Between nodes: one accelerator's share."""
    host: LinkSpeed
    """From an accelerator's memory to the host's, and back."""
    table: LinkTable | None = None
    """Links between workers where they differ, in place of `within` and `between`."""
    order: tuple[int, ...] = ()
    """The worker of each rank; empty: its own number."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    def ordered(self, order: Sequence[int]) -> "ClusterShape":
        """Return the cluster with this worker for each rank (`cluster.rank_order`).

        Where it is empty, a rank's worker is its own number.
        """
        return replace(self, order=tuple(order))

    @property
    def is_even(self) -> bool:
        """Whether ranks at the same place within nodes have the same links."""
        return self.table is None and not self.order

    def worker(self, rank: int) -> int:
        """The worker of a rank, which decides its node and its links."""
        return self.order[rank] if self.order else rank

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return self.worker(rank) // self.per_node

    def aligned(self, ranks: range) -> range:
        """Ranks at the same place within nodes, which cross the same links."""
        if not self.is_even:
            return ranks
        start = ranks.start % self.per_node
        return range(start, start + len(ranks))

    def link(self, ranks: Sequence[int]) -> LinkSpeed:
        """The slowest link that a collective of these ranks crosses, or a message between two.

        Members of a collective on one node send to others through their shares of the network
        together. With a `table` members send around a ring in their order.
        """
        nodes = len({self.node(rank) for rank in ranks})
        together = max(1, len(ranks) // nodes)
        if self.table is not None:
            return self._slowest_of_ring(self.table, ranks, together)
        if nodes == 1:
            return self.within
        bytes_per_s = min(self.within.bytes_per_s, self.between.bytes_per_s * together)
        return LinkSpeed(bytes_per_s, max(self.within.message_s, self.between.message_s))

    def _slowest_of_ring(self, table: LinkTable, ranks: Sequence[int], together: int) -> LinkSpeed:
        bytes_per_s, message_s = AT_ONCE.bytes_per_s, 0.0
        for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
            if a != b:
                link = table.link(self.worker(a), self.worker(b))
                share = together if self.node(a) != self.node(b) else 1
                bytes_per_s = min(bytes_per_s, link.bytes_per_s * share)
                message_s = max(message_s, link.message_s)
        return LinkSpeed(bytes_per_s, message_s)

    def slowest(self, groups: Sequence[Sequence[int]]) -> LinkSpeed:
        """The slowest link of collectives that wait for each other."""
        if self.is_even:  # of equal groups that on most nodes
            return self.link(max(groups, key=lambda group: len({*map(self.node, group)})))
        links = [self.link(group) for group in groups]
        return LinkSpeed(
            min(link.bytes_per_s for link in links), max(link.message_s for link in links)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainLayout:
    """How a role is trained: `trainer.layout` and the settings of its micro-batches, hashable.

    Ranks of a pool are numbered pp, replicas, fsdp, tp, the last one fastest.
    """

    pp: int = 1
    replicas: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    ep_near: bool = False
    """As in `TrainAxes`."""
    cp: int = 1
    schedule: PipelineSchedule = PipelineSchedule.one_f_one_b
    activations: ActivationMode = ActivationMode.keep
    sequence_parallel: bool = False
    micro_batch_tokens: int = 8192
    """`trainer.max_tokens_per_micro_batch`."""
    chunk_layers: tuple[int, ...] = ()
    """Layers of each pipeline chunk, in the order of the forward pass; empty: as even as can be."""

    @classmethod
    def of(cls, layout: TrainLayoutConfig, trainer: TrainerConfig) -> "TrainLayout":
        """Return the layout of a role in a config."""
        return cls(
            pp=layout.pp,
            replicas=layout.replicas,
            fsdp=layout.fsdp,
            tp=layout.tp,
            ep=layout.ep,
            ep_near=TrainAxes.of(layout).ep_near,
            cp=layout.cp,
            schedule=layout.schedule,
            activations=trainer.activations,
            sequence_parallel=layout.sequence_parallel,
            micro_batch_tokens=trainer.max_tokens_per_micro_batch,
            chunk_layers=tuple(layout.chunk_layers),
        )

    @property
    def axes(self) -> TrainAxes:
        """The sizes of the axes over the ranks."""
        return TrainAxes(self.pp, self.replicas, self.fsdp, self.tp, self.ep, self.ep_near)

    @property
    def ranks(self) -> int:
        """The product of all axes but ep and cp."""
        return self.pp * self.replicas * self.fsdp * self.tp

    @property
    def data_ranks(self) -> int:
        """Sets of ranks that compute different sequences."""
        return self.replicas * self.fsdp

    def sharing(self, longest: int) -> "TrainLayout":
        """The layout without cp, unless samples of so many tokens are longer than a row may be."""
        return self if longest > self.micro_batch_tokens else replace(self, cp=1)

    @property
    def chunks(self) -> int:
        """Pipeline chunks in all; 1 without a pipeline."""
        return self.pp * self.schedule.chunks_per_rank if self.pp > 1 else 1

    @property
    def zigzag(self) -> bool:
        """Whether chunks run there and back."""
        return self.pp > 1 and self.schedule is PipelineSchedule.zero_bubble

    def layers_of_chunks(self, layers: int) -> tuple[int, ...]:
        """Layers of each chunk. Raises ValueError as `chunk_bounds` does."""
        bounds = chunk_bounds(layers, self.chunks, self.chunk_layers)
        return tuple(stop - start for start, stop in bounds)

    def stage_of_chunk(self, chunk: int) -> int:
        """The pipeline stage that holds a chunk."""
        return rank_of_chunk(chunk, self.pp, self.zigzag)

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass has two halves."""
        return self.zigzag


@dataclass(frozen=True, kw_only=True, slots=True)
class GenLayout:
    """`rollout.layout`: the sizes of a rollout instance."""

    pp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of an instance."""
        return self.pp * self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRole:
    """A neural role of a recipe: its model, and what a step does with it."""

    name: str
    shape: ModelShape
    trained: bool = False
    passes: tuple[str, ...] = ()
    """Its forward-only stages by name: `reference`, `values`, `old_log_probs`, ..."""
    value_head: bool = False
    """Whether it has one output a token, in place of the vocabulary's head."""
    scores_in_generation: bool = True
    """Whether the actor's passes run with generation's weights, not with its training shards."""
    epochs: int | None = None
    """Epochs of its update, where the recipe sets them; None: the trainer's."""
    mini_batches: int | None = None
    """Mini-batches of its update, where the recipe sets them; None: the trainer's."""
    adapters: int = 0
    """Parameters of a layer's adapters, which alone are trained; 0: it has none."""

    @property
    def scores_with_shards(self) -> bool:
        """Whether its forward-only stages need its training shards."""
        return self.trained and not (self.name == ACTOR and self.scores_in_generation)


@dataclass(frozen=True, kw_only=True)
class DeviceMapping:
    """Which roles are on which ranks, and in which layouts.

    Pools share no rank; the first one has the actor and its rollout instances. Example, PPO:
    pools {"actor": ("actor", "reference"), "critic": ("critic", "reward")}, ranks {"actor": 48,
    "critic": 16}, a `TrainLayout` for actor and critic each.
    """

    pools: Mapping[str, tuple[str, ...]]
    """Roles of each pool, by its name."""
    ranks: Mapping[str, int]
    """Number of ranks of each pool, in the order in which they take the cluster's ranks."""
    train: Mapping[str, TrainLayout]
    """The layout of each trained role."""
    gen: GenLayout = field(default_factory=GenLayout)
    schedule: ScheduleConfig
    rank_order: tuple[int, ...] = ()
    """`cluster.rank_order`: the worker of each rank; empty: its own number."""
    fuses: bool = False
    """`trainer.fuse_updates`: roles of a pool train in one plan, and score in one."""

    @cached_property
    def pool_ranks(self) -> dict[str, range]:
        """The cluster's ranks of each pool."""
        ranges, start = {}, 0
        for pool, number in self.ranks.items():
            ranges[pool] = range(start, start + number)
            start += number
        return ranges

    def pool_of(self, role: str) -> str:
        """The pool of a role."""
        return next(pool for pool, roles in self.pools.items() if role in roles)

    def ranks_of(self, role: str) -> range:
        """The cluster's ranks of a role."""
        return self.pool_ranks[self.pool_of(role)]

    @property
    def instances(self) -> int:
        """Rollout instances."""
        return len(self.ranks_of(ACTOR)) // self.gen.ranks


NETWORK_SHARE = 0.7  # of the datasheet: an assumption, as the others of `layers.py`


def cluster_of(accelerator: Accelerator, nodes: int, per_node: int) -> ClusterShape:
    """A cluster by its accelerator's datasheet."""

    def link(bytes_per_s: float) -> LinkSpeed:
        return LinkSpeed(bytes_per_s * NETWORK_SHARE, accelerator.message_s)

    return ClusterShape(
        nodes,
        per_node,
        accelerator,
        within=link(accelerator.node_bytes_per_s),
        between=link(accelerator.network_bytes_per_s),
        host=link(accelerator.host_bytes_per_s),
    )


class LayoutLinks:
    """Links by axis of a training layout; those of all groups along it count, which run at once."""

    def __init__(self, cluster: ClusterShape) -> None:
        self.cluster = cluster
        # A search asks for the same ones again and again.
        self._slowest = lru_cache(4096)(self._slowest_along)
        self._matrix = lru_cache(4096)(self._hops)
        self._among = lru_cache(4096)(cluster.link)

    def among(self, ranks: range) -> LinkSpeed:
        """The slowest link of a collective of all these ranks."""
        return self._among(self.cluster.aligned(ranks))

    def along(self, layout: TrainLayout, ranks: range, axis: str) -> LinkSpeed:
        """The slowest link of a collective along an axis, one of experts or context too.

        An all-to-all (ep, cp) sends each message over its own link, where a ring shares them.
        """
        return self._slowest(layout.axes, layout.cp, self.cluster.aligned(ranks), axis)

    def hops(self, layout: TrainLayout, ranks: range) -> tuple[tuple[LinkSpeed, ...], ...]:
        """The slowest link from each pipeline stage to each other one, of all their ranks."""
        return self._matrix(layout.axes, self.cluster.aligned(ranks))

    def between(self, sources: Sequence[int], targets: Sequence[int]) -> LinkSpeed:
        """The slowest link of messages from each source to its target."""
        return self.cluster.slowest([list(pair) for pair in zip(sources, targets, strict=True)])

    def _slowest_along(self, axes: TrainAxes, cp: int, ranks: range, axis: str) -> LinkSpeed:
        if axis in ("ep", "efsdp"):
            mesh = expert_mesh(axes)
        else:
            mesh = context_mesh(axes, cp) if axis == "cp" else train_mesh(axes)
        lines = [[ranks[i] for i in line] for line in mesh.lines(axis)]
        if axis in ("ep", "cp"):
            lines = [[line[0], other] for line in lines for other in line[1:]]
        return self.cluster.slowest(lines)

    def _hops(self, axes: TrainAxes, ranks: range) -> tuple[tuple[LinkSpeed, ...], ...]:
        lines = train_mesh(axes).lines("pp")
        stages = [*zip(*([ranks[i] for i in line] for line in lines), strict=True)]
        return tuple(tuple(self.between(a, b) for b in stages) for a in stages)
