"""Seconds of work under a mapping, by role and layout, from what a layer costs."""

from collections.abc import Sequence

from hybridrl.flow.costs import Costs
from hybridrl.pipelines.problem import PassCosts, PipelineProblem
from hybridrl.planner.layer_costs import LayerCosts
from hybridrl.planner.mapping import (
    ClusterShape,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    TrainLayout,
)

Lengths = Sequence[int]
"""Tokens of sequences."""


class MappingCosts:
    """Predicts seconds of roles in layouts on a cluster.

    `ranks` are always the cluster's ranks of the role's pool: they decide which links are crossed.
    """

    def __init__(self, layer_costs: LayerCosts, cluster: ClusterShape) -> None:
        self.layer_costs, self.cluster = layer_costs, cluster

    # Training

    def passes(
        self, role: PlannedRole, layout: TrainLayout, ranks: Sequence[int], row: Lengths
    ) -> tuple[PassCosts, ...]:
        """Of a micro-batch of these sequences on each pipeline chunk, in the forward order.

        Tensor-parallel traffic is in them, that of FSDP is where weights are gathered for each
        micro-batch. With recomputation a backward pass has a forward pass in it.
        """
        raise NotImplementedError

    def send_s(
        self, role: PlannedRole, layout: TrainLayout, ranks: Sequence[int], row: Lengths
    ) -> float:
        """Of a micro-batch from one pipeline stage to the next one."""
        raise NotImplementedError

    def pipeline(
        self,
        role: PlannedRole,
        layout: TrainLayout,
        ranks: Sequence[int],
        rows: Sequence[Lengths],
        trains: bool = True,
    ) -> PipelineProblem:
        """The micro-batches of one data-parallel rank, as a pipeline; one rank without pp."""
        raise NotImplementedError

    def gradient_s(self, role: PlannedRole, layout: TrainLayout, ranks: Sequence[int]) -> float:
        """Of what comes once an update: weights gathered, gradients reduced over fsdp, replicas."""
        raise NotImplementedError

    def optimizer_s(self, role: PlannedRole, layout: TrainLayout, ranks: Sequence[int]) -> float:
        """Of an optimizer step, with the clipping of gradients."""
        raise NotImplementedError

    def update_s(
        self, role: PlannedRole, layout: TrainLayout, ranks: Sequence[int], lengths: Lengths
    ) -> float:
        """Of one optimizer step on sequences of these lengths, on all ranks, action by action.

        They are dealt to ranks and micro-batches as the engine does.
        """
        raise NotImplementedError

    def bound_s(
        self, role: PlannedRole, layout: TrainLayout, ranks: Sequence[int], lengths: Lengths
    ) -> float:
        """A closed form that `update_s` is never below."""
        raise NotImplementedError

    # Forward-only stages

    def score_s(
        self,
        role: PlannedRole,
        layout: TrainLayout | GenLayout,
        ranks: Sequence[int],
        lengths: Lengths,
    ) -> float:
        """Of a forward-only stage on these sequences.

        With a `GenLayout` of one instance, whose `ranks` these are; else of all ranks of the pool.
        """
        raise NotImplementedError

    # Between phases

    def activate_s(self, role: PlannedRole, layout: TrainLayout | GenLayout) -> float:
        """Of a role's way from the host's memory onto the device: shards, moments."""
        raise NotImplementedError

    def deactivate_s(self, role: PlannedRole, layout: TrainLayout | GenLayout) -> float:
        """Of its way back."""
        raise NotImplementedError

    def switch_s(
        self, role: PlannedRole, train: TrainLayout, gen: GenLayout, ranks: Sequence[int]
    ) -> float:
        """Of the weight switch from training to generation: its plan's bytes by link."""
        raise NotImplementedError

    # Generation

    def generation(self, role: PlannedRole, gen: GenLayout, ranks: Sequence[int]) -> Costs:
        """Of one rollout instance, with decode steps, rows and cached tokens; for the scheduler."""
        raise NotImplementedError

    def costs(self, roles: Sequence[PlannedRole], mapping: DeviceMapping) -> Costs:
        """`generation`, with forward-only stages a token, the switch, and round trips."""
        raise NotImplementedError
