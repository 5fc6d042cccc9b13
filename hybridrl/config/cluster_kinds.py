"""The kinds of clusters besides this node: their settings, and what they exclude."""

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from hybridrl.config.bounds import bounded
from hybridrl.config.cluster import (
    CPU_RANKS,
    ClusterConfig,
    ClusterKind,
    Device,
    MemoryCheck,
    OtherSettings,
)
from hybridrl.config.environment import EnvironmentKind
from hybridrl.config.errors import ConfigError
from hybridrl.config.evaluation import EvalConfig
from hybridrl.config.reward import JudgeHome
from hybridrl.config.rollout import Engine
from hybridrl.config.run import Deterministic, KeptSamples
from hybridrl.config.trainer import FuseUpdates, SharePrompts


class Container(Enum):
    """The container of a Slurm job's processes."""

    none = "none"  # the nodes' own file systems
    pyxis = "pyxis"  # Slurm's plugin for Enroot: srun --container-image
    apptainer = "apptainer"  # apptainer exec; Singularity's successor


@dataclass(kw_only=True, slots=True)
class SlurmClusterConfig(ClusterConfig):
    """The nodes of a Slurm allocation, and what its job asks for."""

    kind: ClusterKind = ClusterKind.slurm
    """This kind."""
    nodes: int = bounded(1, least=1)
    """Nodes; the ranks are spread evenly over them, those of a node one after the other."""
    gpus_per_node: int = bounded(0, least=0)
    """GPUs of each node; 0 for a job on CPUs."""
    cpus_per_node: int | None = bounded(None, least=1)
    """CPUs of each node; null asks for whole nodes."""
    memory_per_node: str | None = None
    """Memory of each node (`200G`); null leaves it to the partition."""
    partition: str | None = None
    """The partition; null takes the default one."""
    account: str | None = None
    """The account that is charged."""
    qos: str | None = None
    """Quality of service."""
    time: str | None = None
    """Time limit (`2:00:00`, `1-12` for a day and a half); null takes the partition's."""
    sbatch: list[str] = field(default_factory=list)
    """More options of sbatch (in a shell `"cluster.sbatch=['--constraint=h100']"`)."""
    setup: list[str] = field(default_factory=list)
    """Lines of the batch script before the run (`['ulimit -n 65536']`)."""
    modules: list[str] = field(default_factory=list)
    """Modules that the batch script loads with `module load` (`[cuda/12.4]`)."""
    container: Container = Container.none
    """The container of the whole job, the driver and the ranks."""
    image: str | None = None
    """The container's image: a file, or an address that Pyxis or Apptainer can fetch."""
    mounts: list[str] = field(default_factory=list)
    """`SOURCE:TARGET[:ro]`; the working directory and the run directory are mounted, too."""
    python: str | None = None
    """The job's Python; null takes that of `hybridrl submit`, or a container's `python3`."""
    local_scratch: str | None = None
    """A directory on each node for compilers' caches and Ray's spilled objects; null takes the
    first of $SLURM_TMPDIR, $TMPDIR and /tmp there."""
    requeue: int = bounded(0, least=0)
    """How often the job may start again, at its time limit, after preemption, or when a node or a
    rank has died. Then `trainer.resume` is at least `auto`."""
    warn_s: int = bounded(120, least=1)
    """With `requeue`: seconds before the time limit at which the run writes a checkpoint."""

    def resolve(self) -> None:
        """Fill in device and ranks, which the request says, and sizes of pools."""
        self.ranks = self.ranks or self.nodes * self.gpus_per_node
        if self.device is Device.auto:
            self.device = Device.cuda if self.gpus_per_node else Device.cpu
        ClusterConfig.resolve(self)

    def check_request(self) -> None:
        """See `ClusterConfig`."""
        ClusterConfig.check_request(self)
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


@dataclass(kw_only=True, slots=True)
class RayClusterConfig(ClusterConfig):
    """A standing Ray cluster, by the job service of its dashboard."""

    kind: ClusterKind = ClusterKind.ray
    """This kind."""
    python: str | None = None
    """The job's Python; null takes that of `hybridrl submit`."""

    def check_request(self) -> None:
        """See `ClusterConfig`."""
        ClusterConfig.check_request(self)
        if not (self.address or "").startswith(("http://", "https://")):
            allowed = "the address of a Ray cluster's dashboard: http://HEAD:8265"
            raise ConfigError("cluster.address", self.address, allowed)


@dataclass(kw_only=True, slots=True)
class ProcessesClusterConfig(ClusterConfig):
    """This node without Ray, to debug."""

    uses_ray: ClassVar[bool] = False
    """Ranks are children of the driver, or one of them is the driver."""
    kind: ClusterKind = ClusterKind.processes
    """This kind."""
    rank_in_driver: bool | None = None
    """Whether rank 0 is the driver itself, which `breakpoint()` stops. While it computes, the
    driver answers no other rank; else it is a child process, as others are. Null: true with one
    rank, false with several."""

    @property
    def driver_is_rank(self) -> bool:
        """Whether rank 0 is the driver's process."""
        return self.ranks == 1 if self.rank_in_driver is None else self.rank_in_driver

    def check_request(self) -> None:
        """See `ClusterConfig`."""
        ClusterConfig.check_request(self)
        if self.address is not None:
            raise ConfigError("cluster.address", self.address, "null: cluster=processes has no Ray")

    def check_restarts(self) -> None:
        """See `ClusterConfig`."""
        if self.restarts and self.driver_is_rank:
            allowed = (
                "0, or cluster.rank_in_driver=false: the run ends with a rank that is its driver"
            )
            raise ConfigError("cluster.restarts", self.restarts, allowed)


@dataclass(kw_only=True, slots=True)
class EmulatedClusterConfig(ClusterConfig):
    """Ranks without a model, all in the driver's process, whose work takes modeled seconds."""

    holds_models: ClassVar[bool] = False
    """Weights are neither read nor trained."""
    uses_ray: ClassVar[bool] = False
    """Ranks are in the driver's process."""
    label: ClassVar[str] = "emulated"
    """Everything that is written says so."""
    kind: ClusterKind = ClusterKind.emulated
    """This kind."""
    costs: str = "gpu:model=8b"
    """Seconds of work, as `--costs` of `hybridrl plan schedule`: a run, a file, or a roofline of
    the run's ranks (`gpu:model=8b`), whose GPU must have the memory that the run takes."""
    lengths: str = "lognormal:median=400,sigma=0.9"
    """Lengths of responses, as its `--lengths` has them: the directory of a run, a file, `lmsys`,
    or `lognormal:median=M,sigma=S`. Those of a distribution follow from `run.seed`."""
    prompt_tokens: int | None = bounded(None, least=1)
    """Tokens of each prompt; null: the recorded ones, or 128 with a distribution."""
    turns: str | None = None
    """Turns of responses, tokens of replies and their waits, as its `--turns`:
    `turns=N,reply=TOKENS,wait=SECONDS`; null: a response is one turn."""
    time_scale: float = bounded(1.0, above=0)
    """Factor of all modeled seconds; below 1 a run is sooner through."""

    @property
    def knows_model(self) -> bool:
        """Whether the costs name a model and a GPU; those of a run or of a file do not."""
        return self.costs.startswith("gpu:")

    def settle(self, settings: OtherSettings) -> None:
        """Leave out what ranks without a model cannot do; raise ConfigError where it is wanted."""
        evaluation, trainer, telemetry = settings.eval, settings.trainer, settings.telemetry
        if evaluation == EvalConfig():
            evaluation.sets.clear()
        if settings.warm_start.steps is None:
            settings.warm_start.steps = 0
        if trainer.fuse_updates is FuseUpdates.auto:
            trainer.fuse_updates = FuseUpdates.never
        if trainer.share_prompts is SharePrompts.auto:
            trainer.share_prompts = SharePrompts.never
        device = Device.cuda if self.knows_model else Device.cpu
        if self.device is Device.auto:
            self.device = device
        for key, value, allowed in (
            ("cluster.device", self.device, device),
            ("cluster.memory_check", self.memory_check, MemoryCheck.refuse),
            ("cluster.address", self.address, None),
            ("cluster.rank_order", self.rank_order, []),
            ("cluster.restarts", self.restarts, 0),
            ("rollout.engine", settings.rollout.engine, Engine.native),
            ("environment.kind", settings.environment.kind, EnvironmentKind.none),
            ("eval.sets", ",".join(evaluation.sets), ""),
            ("warm_start.steps", settings.warm_start.steps, 0),
            ("trainer.resume", trainer.resume, "never"),
            ("trainer.save_every", trainer.save_every, 0),
            ("trainer.fuse_updates", trainer.fuse_updates, FuseUpdates.never),
            ("trainer.share_prompts", trainer.share_prompts, SharePrompts.never),
            ("telemetry.profile.steps", telemetry.profile.steps, []),
            ("telemetry.samples", telemetry.samples, KeptSamples.first),
            ("telemetry.digests", bool(telemetry.digests), False),
            ("deterministic", settings.deterministic, Deterministic.off),
        ):
            if value != allowed:
                shown = "none" if allowed in ("", []) else _text(allowed)
                raise ConfigError(key, _text(value), f"{shown} {WITHOUT_MODEL}")
        for role in (*settings.judges_of("reward"), *settings.judges_of("cost")):
            if settings.home_of(role) is JudgeHome.driver:
                allowed = f"a verifier or a model {WITHOUT_MODEL}"
                raise ConfigError(f"{role}.kind", settings.judge_of(role).kind.value, allowed)
        tiny = settings.model.tiny  # its tokenizer reads prompts; lengths of responses are modeled
        tiny.max_positions = max(tiny.max_positions, settings.longest_generated)

    def resolve_device(self, gpus: int, owner: str) -> None:
        """Fill in the ranks, whose number has no bound here."""
        self.ranks = self.ranks or CPU_RANKS


WITHOUT_MODEL = "with cluster=emulated, whose ranks hold no model"


def _text(value: object) -> str:
    return "null" if value is None else str(getattr(value, "value", value)).lower()


CLUSTERS: dict[ClusterKind, type[ClusterConfig]] = {
    ClusterKind.local: ClusterConfig,
    ClusterKind.slurm: SlurmClusterConfig,
    ClusterKind.ray: RayClusterConfig,
    ClusterKind.processes: ProcessesClusterConfig,
    ClusterKind.emulated: EmulatedClusterConfig,
}
"""The settings of each kind; `conf/cluster/NAME.yaml` chooses it."""
