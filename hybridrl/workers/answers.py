"""What ranks answer when they come up, make a role, or change phase."""

from dataclasses import asdict, dataclass
from typing import Any

from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.weight_switch import SwitchStats


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessDescription:
    """A rank's process: its node, and the file of its log (empty where that is not known).

    `peak_flops` are its device's operations a second in products of large matrices.
    """

    pid: int
    node: str
    log: str
    peak_flops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """A trained model: its parameters, and the axes over which they are sharded."""

    parameters: int
    trained_parameters: int
    train_layout: TrainAxes


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorDescription:
    """The actor where it is trained: its parameters and their layout."""

    parameters: int
    trained_parameters: int
    attention: str
    device: str
    train_layout: TrainAxes


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceDescription:
    """The rollout instance of a rank; ranks are those of the run."""

    gen_layout: dict[str, int]
    gen_grouping: str
    instance: int
    peers: list[int]
    """The ranks of the instance, stage by stage, each in the order of tp."""
    wide: dict[int, list[int]]
    """Ranks of the wide instances that this rank can be in, by their numbers."""
    kept_tokens: tuple[str, ...] = ()
    """The special tokens that the text of responses keeps (`rollout.skip_special_tokens`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDescription:
    """A rank that is up: the actor where it is trained, an instance where it generates."""

    process: ProcessDescription
    actor: ActorDescription | None = None
    instance: InstanceDescription | None = None

    def record(self) -> dict[str, Any]:
        """All of it in one dict, for the run's records."""
        record = asdict(self.process)
        record |= asdict(self.instance) if self.instance else {}
        return record | (asdict(self.actor) if self.actor else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class EnteredPhase:
    """A rank in its new phase: the weights' version, and the switch's cost if weights moved."""

    version: int
    switch: SwitchStats | None = None
