"""Which ranks a run has, and which nodes they are on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import accumulate
from typing import ClassVar, Protocol

from hybridrl.config.bounds import bounded
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.errors import ConfigError
from hybridrl.config.evaluation import EvalConfig
from hybridrl.config.model import ModelConfig
from hybridrl.config.reward import JudgeConfig, JudgeHome
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.run import Deterministic, TelemetryConfig
from hybridrl.config.trainer import TrainerConfig, WarmStartConfig


class Placement(Enum):
    """How roles map to pools of ranks; `cluster.pool_of` moves single ones."""

    colocate = "colocate"  # every role on every rank
    split = "split"  # value models, and judges that are models, in the pool `critic`
    standalone = "standalone"  # every role in the pool of its name


class PoolName(Enum):
    """Pools of roles, and one that generates; their ranks follow each other in this order."""

    actor = "actor"
    critic = "critic"
    cost_critic = "cost_critic"
    reference = "reference"
    teacher = "teacher"
    reward = "reward"
    cost = "cost"
    rollout = "rollout"


OF_SPLIT = ("critic", "cost_critic", "reward", "cost")
"""The roles that are in the pool `critic` under placement=split."""


class Device(Enum):
    """What ranks compute on."""

    auto = "auto"  # GPUs where the nodes have any
    cpu = "cpu"
    cuda = "cuda"  # one GPU for each rank


class MemoryCheck(Enum):
    """What becomes of a run whose memory plan does not fit."""

    refuse = "refuse"  # it does not start, where a phase needs more than there is
    warn = "warn"  # it starts, with a line in the log


class ClusterKind(Enum):
    """Where the nodes of the ranks come from."""

    local = "local"  # this node, or a running Ray cluster at `address`
    slurm = "slurm"  # the nodes of a Slurm allocation
    ray = "ray"  # a standing Ray cluster that runs jobs: hybridrl submit
    processes = "processes"  # this node without Ray, to debug: rank 0 is the driver itself
    emulated = "emulated"  # this node, with ranks that hold no model: work takes modeled seconds


CPU_RANKS = 2  # of a run that names no number


@dataclass(kw_only=True, slots=True)
class PoolOfConfig:
    """The pool of each role that is a model; null takes that of `cluster.placement`.

    The actor is always in the pool `actor`. Verifiers and samples are in the pool that generates:
    `rollout` where it has ranks, else `actor`.
    """

    critic: PoolName | None = None
    """The value model."""
    cost_critic: PoolName | None = None
    """The value model of the cost."""
    reference: PoolName | None = None
    """The reference, and other copies of the actor."""
    teacher: PoolName | None = None
    """The teacher."""
    reward: PoolName | None = None
    """A reward model that judges, or is trained; a verifier stays with the actor."""
    cost: PoolName | None = None
    """A model of the cost."""


@dataclass(kw_only=True, slots=True)
class PoolsConfig:
    """Ranks of each pool, where there are several; 0 takes an even share of the rest."""

    actor: int = bounded(0, least=0)
    """The actor's."""
    critic: int = bounded(0, least=0)
    """The pool `critic`: under placement=split of all value models and neural judges."""
    cost_critic: int = bounded(0, least=0)
    """The pool `cost_critic`."""
    reference: int = bounded(0, least=0)
    """The pool `reference`."""
    teacher: int = bounded(0, least=0)
    """The pool `teacher`."""
    reward: int = bounded(0, least=0)
    """The pool `reward`."""
    cost: int = bounded(0, least=0)
    """The pool `cost`."""
    rollout: int = bounded(0, least=0)
    """Ranks that generate and do nothing else, the last ones. 0: those of `actor` generate, too."""

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """The ranks of these pools, by name."""
        return {name: getattr(self, name) for name in names}

    def resolve(self, names: Sequence[str], ranks: int) -> None:
        """Replace the zeros of pools with these names, where that leaves each a rank.

        They share what is left of the `ranks`; the first ones have one more.
        """
        sizes = self.sizes(names)
        empty = [name for name, size in sizes.items() if not size]
        rest = ranks - sum(sizes.values())
        if rest >= len(empty):
            for number, name in enumerate(empty):
                setattr(self, name, rest // len(empty) + (number < rest % len(empty)))

    def check(self, names: Sequence[str], ranks: int) -> None:
        """Raise ConfigError where the pools do not make up the `ranks`."""
        sizes = self.sizes(names)
        if min(sizes.values()) < 1 or sum(sizes.values()) != ranks:
            allowed = f"{' + '.join(names)} = cluster.ranks={ranks}, each 1 or more"
            shown = " + ".join(str(size or "?") for size in sizes.values())
            raise ConfigError("cluster.pools", shown, allowed)


class OtherSettings(Protocol):
    """The groups of a run's settings that a kind of cluster may exclude."""

    model: ModelConfig
    environment: EnvironmentConfig
    rollout: RolloutConfig
    trainer: TrainerConfig
    warm_start: WarmStartConfig
    eval: EvalConfig
    telemetry: TelemetryConfig
    deterministic: Deterministic

    @property
    def longest_generated(self) -> int:
        """See `Config`."""
        ...

    def judges_of(self, role: str) -> tuple[str, ...]:
        """See `Config`."""
        ...

    def judge_of(self, role: str) -> JudgeConfig:
        """See `Config`."""
        ...

    def home_of(self, role: str) -> JudgeHome:
        """See `Config`."""
        ...


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Ranks, and where they run: settings of every kind of cluster, and all of `cluster=local`."""

    kind: ClusterKind = ClusterKind.local
    """Where the ranks are; `cluster=NAME` chooses it and brings its settings along."""
    ranks: int = bounded(0, least=0)
    """Worker processes: at most one per GPU, any number on CPUs. 0: one per GPU, or 2 on CPUs."""
    rank_order: list[int] = field(default_factory=list)
    """The worker of each rank, counted in the order of nodes and their GPUs; empty: its own number.
    Where links differ, neighbors of a layout go to the fastest ones (Pipette, arXiv 2405.18093)."""
    device: Device = Device.auto
    """What the ranks compute on; `auto`: GPUs where the nodes have any."""
    placement: Placement = Placement.colocate
    """How roles map to pools of ranks."""
    pool_of: PoolOfConfig = field(default_factory=PoolOfConfig)
    """The pools of single roles, by name: any partition of the roles."""
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    """Sizes of the pools, where there are several."""
    memory_check: MemoryCheck = MemoryCheck.refuse
    """What becomes of a run whose memory plan does not fit (`hybridrl plan memory`)."""
    object_store_mb: int = bounded(0, least=0)
    """MiB of Ray's object store on each node, for migrated KV caches and lent weights. 0: 30 % of
    the node's memory, within 80 % of what is free in /dev/shm."""
    threads_per_rank: int = bounded(0, least=0)
    """CPU threads of one rank; 0: the node's cores by the node's GPUs, or 1 on CPUs."""
    address: str | None = None
    """A running Ray cluster to join; null starts one for the run and ends it with it."""
    start_timeout_s: float = bounded(120.0, above=0)
    """Seconds to wait for the nodes to join, and for the ranks to come up."""
    timeout_s: float = bounded(1800.0, above=0)
    """Seconds after which a collective among ranks that has not ended ends the run."""
    hang_factor: float = bounded(10.0, least=0)
    """A rank is stuck once a stretch of its call (a pass of a micro-batch, 16 decode steps) lasts
    so many times its longest of late, and above `hang_floor_s`: a line says what each rank is in,
    and it counts as dead. 0: no rank is watched."""
    hang_floor_s: float = bounded(60.0, above=0)
    """Seconds that a stretch of a call may last in any case."""
    restarts: int = bounded(0, least=0)
    """How often all ranks may start anew within the run, from its newest checkpoint, once one of
    them has died or is stuck. Then `trainer.resume` is at least `auto`."""
    holds_models: ClassVar[bool] = True
    """Whether its ranks hold models; those of an emulated device take modeled seconds."""
    uses_ray: ClassVar[bool] = True
    """Whether its ranks are actors of Ray."""
    label: ClassVar[str] = ""
    """The mark of everything that a run on it writes; empty on ranks that compute."""

    @property
    def knows_model(self) -> bool:
        """Whether layouts and memory can be checked by the sizes of the models."""
        return True

    @property
    def nodes(self) -> int:
        """Nodes of the ranks, as far as the settings say."""
        return 1

    @property
    def turns(self) -> str | None:
        """The turns of modeled conversations; null where environments are real."""
        return None

    @property
    def requeue(self) -> int:
        """How often the job of the run may start again."""
        return 0

    @property
    def begins_again(self) -> str:
        """The key by which a run goes on from its checkpoints after a death; empty without one."""
        keys = {"cluster.restarts": self.restarts, "cluster.requeue": self.requeue}
        return next((key for key, number in keys.items() if number), "")

    def settle(self, settings: OtherSettings) -> None:
        """Fit other settings to this kind of cluster; raise ConfigError for what it excludes."""

    def resolve(self) -> None:
        """Fill in the sizes of pools, once the ranks are known."""
        if self.ranks and len(self.pool_names) > 1:
            self.pools.resolve(self.pool_names, self.ranks)

    def resolve_device(self, gpus: int, owner: str) -> None:
        """Fill in device and ranks, where `owner` (this machine, say) has `gpus` GPUs.

        Raises ConfigError for ranks on GPUs that are not there.
        """
        if self.device is Device.cuda and not gpus:
            allowed = f"auto or cpu: torch finds no GPU on {owner}"
            raise ConfigError("cluster.device", self.device.value, allowed)
        if self.device is Device.auto:
            self.device = Device.cuda if gpus else Device.cpu
        on_gpus = self.device is Device.cuda
        if on_gpus and self.ranks > gpus:
            allowed = f"at most {gpus} (the GPUs of {owner}), or cluster.device=cpu with it"
            raise ConfigError("cluster.ranks", self.ranks, allowed)
        self.ranks = self.ranks or (gpus if on_gpus else CPU_RANKS)

    def check_request(self) -> None:
        """Raise ConfigError for settings of another kind, or that do not fit each other."""
        if fields(self)[0].default is not self.kind:
            name = self.kind.value
            raise ConfigError("cluster.kind", name, f"cluster={name} in its place")

    def check_restarts(self) -> None:
        """Raise ConfigError for `restarts` of ranks that cannot start anew within the run."""

    def check_starts_once(self, command: str) -> None:
        """Raise ConfigError for `restarts` of a `command` that has no steps to make again."""
        if self.restarts:
            raise ConfigError("cluster.restarts", self.restarts, f"0, with hybridrl {command}")

    @property
    def worker_of_rank(self) -> Sequence[int]:
        """The number of each rank's worker, in the order in which they are started."""
        return self.rank_order or range(self.ranks)

    def check_pools(self) -> None:
        """Raise ConfigError for pools that do not make up the ranks, once these are known.

        Also for an order that does not have each rank once.
        """
        if self.rank_order and sorted(self.rank_order) != list(range(self.ranks)):
            allowed = f"each of the {self.ranks} ranks once: 0 to {self.ranks - 1} in some order"
            raise ConfigError("cluster.rank_order", self.rank_order, allowed)
        names = self.pool_names
        used = names if len(names) > 1 else []
        for role in fields(self.pool_of):
            if getattr(self.pool_of, role.name) is PoolName.rollout:
                allowed = "another pool: ranks of the pool rollout generate, and do nothing else"
                raise ConfigError(f"cluster.pool_of.{role.name}", "rollout", allowed)
        for name in PoolName:
            size = getattr(self.pools, name.value)
            if size and name.value not in used:
                allowed = (
                    f"0, or a role in it: cluster.pool_of.ROLE={name.value}, or cluster.placement="
                    "split or standalone"
                )
                raise ConfigError(f"cluster.pools.{name.value}", size, allowed)
        if used:
            self.pools.check(names, self.ranks)

    def pool_of_role(self, role: str) -> str:
        """The pool of a role among the fields of `PoolOfConfig`."""
        own: PoolName | None = getattr(self.pool_of, role)
        if own is not None:
            return own.value
        if self.placement is Placement.standalone:
            return role
        is_apart = self.placement is Placement.split and role in OF_SPLIT
        return "critic" if is_apart else "actor"

    @property
    def pool_names(self) -> list[str]:
        """The pools of the run, that of the actor first.

        Under standalone they are those that have a size, since a recipe does not have every role.
        """
        roles = [role.name for role in fields(self.pool_of)]
        by_name = {self.pool_of_role(role) for role in roles}
        if self.placement is Placement.standalone:
            named = {own.value for role in roles if (own := getattr(self.pool_of, role))}
            by_name = {name for name in by_name if name in named or getattr(self.pools, name)}
        if self.pools.rollout:
            by_name.add("rollout")
        return [name.value for name in PoolName if name.value in {"actor", *by_name}]

    @property
    def home(self) -> str:
        """The pool that generates, where samples live."""
        return "rollout" if self.pools.rollout else "actor"

    @property
    def pool_ranks(self) -> dict[str, range]:
        """The ranks of every pool, by its name; under colocate there is one, named actor."""
        names = self.pool_names
        if len(names) == 1:
            return {names[0]: range(self.ranks)}
        stops = list(accumulate(self.pools.sizes(names).values()))
        return {
            name: range(start, stop)
            for name, start, stop in zip(names, [0, *stops], stops, strict=False)
        }

    def pool_key(self, pool: str) -> str:
        """The key that says how many ranks a pool has."""
        return "cluster.ranks" if len(self.pool_names) == 1 else f"cluster.pools.{pool}"

    @property
    def ranks_per_node(self) -> int:
        """Worker processes on each node."""
        return self.ranks // self.nodes
