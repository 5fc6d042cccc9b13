"""Which ranks a run has, and which nodes they are on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError


class Placement(Enum):
    """How roles map to pools of ranks; `cluster.pool_of` moves single ones."""

    colocate = "colocate"  # every role on every rank
    split = "split"  # value models, and judges that are models, in the pool `critic`
    standalone = "standalone"  # every role in the pool of its name


class PoolName(Enum):
    """Pools are named after roles. Their ranks follow each other in this order."""

    actor = "actor"
    critic = "critic"
    cost_critic = "cost_critic"
    reference = "reference"
    teacher = "teacher"
    reward = "reward"
    cost = "cost"


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


class Container(Enum):
    """The container of a Slurm job's processes."""

    none = "none"  # the nodes' own file systems
    pyxis = "pyxis"  # Slurm's plugin for Enroot: srun --container-image
    apptainer = "apptainer"  # apptainer exec; Singularity's successor


@dataclass(kw_only=True, slots=True)
class PoolOfConfig:
    """The pool of each role that is a model; null takes that of `cluster.placement`.

    The actor, verifiers and samples are always in the pool `actor`.
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
    """The actor's. Samples stay here."""
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


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """Ranks, the Ray cluster that they run on, and the requests of a Slurm job."""

    kind: ClusterKind = ClusterKind.local
    """Where the ranks are; chosen by `cluster=local`, `slurm`, `ray` or `processes`."""
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
    rank_in_driver: bool = True
    """Under `cluster=processes` rank 0 is the driver itself, which `breakpoint()` stops. While it
    computes, the driver answers no other rank; false makes it a child process, as others are."""
    address: str | None = None
    """A running Ray cluster to join; null starts one for the run and ends it with it."""
    start_timeout_s: float = bounded(120.0, above=0)
    """Seconds to wait for the nodes to join, and for the ranks to come up."""
    timeout_s: float = bounded(1800.0, above=0)
    """Seconds after which a collective among ranks that has not ended ends the run."""
    nodes: int = bounded(1, least=1)
    """Nodes; the ranks are spread evenly over them, those of a node one after the other."""
    gpus_per_node: int = bounded(0, least=0)
    """Slurm: GPUs of each node; 0 for a job on CPUs."""
    cpus_per_node: int | None = bounded(None, least=1)
    """Slurm: CPUs of each node; null asks for whole nodes."""
    memory_per_node: str | None = None
    """Slurm: memory of each node (`200G`); null leaves it to the partition."""
    partition: str | None = None
    """Slurm: the partition; null takes the default one."""
    account: str | None = None
    """Slurm: the account that is charged."""
    qos: str | None = None
    """Slurm: quality of service."""
    time: str | None = None
    """Slurm: time limit (`2:00:00`, `1-12` for a day and a half); null takes the partition's."""
    sbatch: list[str] = field(default_factory=list)
    """Slurm: more options of sbatch (in a shell `"cluster.sbatch=['--constraint=h100']"`)."""
    setup: list[str] = field(default_factory=list)
    """Slurm: lines of the batch script before the run (`['ulimit -n 65536']`)."""
    modules: list[str] = field(default_factory=list)
    """Slurm: modules that the batch script loads with `module load` (`[cuda/12.4]`)."""
    container: Container = Container.none
    """Slurm: the container of the whole job, the driver and the ranks."""
    image: str | None = None
    """Slurm: the container's image: a file, or an address that Pyxis or Apptainer can fetch."""
    mounts: list[str] = field(default_factory=list)
    """Slurm: `SOURCE:TARGET[:ro]`; the working directory and the run directory are mounted, too."""
    python: str | None = None
    """Slurm: the job's Python; null takes that of `hybridrl submit`, or a container's `python3`."""
    local_scratch: str | None = None
    """Slurm: a directory on each node for compilers' caches and Ray's spilled objects; null takes
    the first of $SLURM_TMPDIR, $TMPDIR and /tmp there."""
    requeue: int = bounded(0, least=0)
    """Slurm: how often the job may start again, at its time limit, after preemption, or when a node
    or a rank has died. Then `trainer.resume` is at least `auto`."""
    costs: str | None = None
    """Emulated: seconds of work, as `--costs` of `hybridrl plan schedule`: a run, a file, or a
    roofline of the run's ranks (`gpu:model=8b`)."""
    lengths: str | None = None
    """Emulated: lengths of responses, as its `--lengths` has them: the directory of a run, a file,
    `lmsys`, or `lognormal:median=M,sigma=S`. Those of a distribution follow from `run.seed`."""
    prompt_tokens: int | None = bounded(None, least=1)
    """Emulated: tokens of each prompt; null: the recorded ones, or 128 with a distribution."""
    turns: str | None = None
    """Emulated: turns of responses, tokens of replies and their waits, as its `--turns`:
    `turns=N,reply=TOKENS,wait=SECONDS`; null: a response is one turn."""
    time_scale: float = bounded(1.0, above=0)
    """Emulated: factor of all modeled seconds; below 1 a run is sooner through."""
    ranks_per_process: int | None = bounded(None, least=0)
    """Emulated: ranks that share a process of Ray; 0: all are in the driver's, without Ray. Null:
    32, or as many near that as are whole instances."""
    warn_s: int = bounded(120, least=1)
    """Slurm, with `requeue`: seconds before the time limit at which the run writes a checkpoint."""

    @property
    def emulated(self) -> bool:
        """Whether the ranks hold no model."""
        return self.kind is ClusterKind.emulated

    def resolve(self) -> None:
        """Fill in device and ranks of a Slurm job, which its request says, and sizes of pools."""
        if self.kind is ClusterKind.slurm:
            self.ranks = self.ranks or self.nodes * self.gpus_per_node
            if self.device is Device.auto:
                self.device = Device.cuda if self.gpus_per_node else Device.cpu
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
        """Raise ConfigError for settings that this kind of cluster excludes."""
        if self.kind is ClusterKind.slurm:
            self._check_slurm()
        else:
            self._check_local()

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
        if self.rank_order and self.emulated:
            allowed = "[]: emulated ranks have no links"
            raise ConfigError("cluster.rank_order", self.rank_order, allowed)
        names = self.pool_names
        used = names if len(names) > 1 else []
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
        roles = [name.value for name in PoolName if name is not PoolName.actor]
        by_name = {self.pool_of_role(role) for role in roles}
        if self.placement is Placement.standalone:
            named = {own.value for role in roles if (own := getattr(self.pool_of, role))}
            by_name = {name for name in by_name if name in named or getattr(self.pools, name)}
        return [name.value for name in PoolName if name.value in {"actor", *by_name}]

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

    def _check_local(self) -> None:
        served = (self.address or "").startswith(("http://", "https://"))
        if self.kind is ClusterKind.ray and not served:
            allowed = "the address of a Ray cluster's dashboard: http://HEAD:8265"
            raise ConfigError("cluster.address", self.address, allowed)
        if self.kind is ClusterKind.processes and self.address is not None:
            raise ConfigError("cluster.address", self.address, "null: cluster=processes has no Ray")
        if not self.emulated:
            for key in ("costs", "lengths", "prompt_tokens", "turns"):
                if getattr(self, key) is not None:
                    raise ConfigError(
                        f"cluster.{key}", getattr(self, key), "cluster=emulated with it"
                    )
        slurm = ("nodes", "gpus_per_node", "cpus_per_node", "memory_per_node", "partition")
        if self.container is not Container.none:
            raise ConfigError("cluster.container", self.container.value, "cluster=slurm before it")
        job: tuple[str, ...] = (
            *("account", "qos", "time", "sbatch", "setup"),
            *("requeue", "modules", "image", "mounts"),
        )
        if self.kind is not ClusterKind.ray:
            job = (*job, "python")
        for key in (*slurm, *job, "local_scratch"):
            value = getattr(self, key)
            if value and (key, value) != ("nodes", 1):
                raise ConfigError(f"cluster.{key}", value, "cluster=slurm before it")

    def _check_slurm(self) -> None:
        if self.address is not None:
            raise ConfigError("cluster.address", self.address, "null: a Slurm job has its own Ray")
        if self.ranks == 0:
            allowed = "the GPUs of each node, or cluster.ranks for a job on CPUs"
            raise ConfigError("cluster.gpus_per_node", 0, allowed)
        gpus = self.nodes * self.gpus_per_node
        if (self.device is Device.cuda) is not bool(gpus):
            allowed = f"auto with cluster.gpus_per_node={self.gpus_per_node}"
            raise ConfigError("cluster.device", self.device.value, allowed)
        if self.ranks % self.nodes:
            raise ConfigError(
                "cluster.ranks", self.ranks, f"a multiple of cluster.nodes={self.nodes}"
            )
        if gpus and self.ranks > gpus:
            raise ConfigError("cluster.ranks", self.ranks, f"at most the {gpus} GPUs of all nodes")
        for key in ("sbatch", "setup", "modules", "mounts"):
            for option in getattr(self, key):
                if "\n" in option or not option:
                    raise ConfigError(f"cluster.{key}", option, "one line each")
        self._check_container()
        for option in self.sbatch:
            if not option.startswith("-"):
                example = "cluster.sbatch=['--constraint=h100']"
                raise ConfigError("cluster.sbatch", option, f'options of sbatch: "{example}"')

    def _check_container(self) -> None:
        kind = self.container.value
        if self.container is Container.none:
            for key in ("image", "mounts"):
                if getattr(self, key):
                    allowed = "cluster.container=pyxis or apptainer with it"
                    raise ConfigError(f"cluster.{key}", getattr(self, key), allowed)
            return
        if not self.image:
            allowed = f"an image for cluster.container={kind}: a file, or docker://..."
            raise ConfigError("cluster.image", self.image, allowed)
        for mount in self.mounts:
            source, *target = mount.split(":")
            if not source.startswith("/") or len(target) > 2 or "," in mount:
                allowed = "SOURCE:TARGET or SOURCE:TARGET:ro, from the root"
                raise ConfigError("cluster.mounts", mount, allowed)
