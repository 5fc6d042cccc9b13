"""Diagnosis of a run from facts about its nodes: pure, so that tests supply the facts.

A check compares a fact with the run's `Needs`, or with a limit of another system that its comment
names. An ERROR prevents the run; a WARNING makes it slow, fragile or hard to read.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median

from hybridrl.config.versions import untried
from hybridrl.doctor.measure import Disk, Link
from hybridrl.system.node_info import NodeInfo

# Ray: below that `ray.init` warns of connection errors.
_OPEN_FILES = 8192
# Ray's local_fs_capacity_threshold: on a fuller disk it makes no object that must be spilled.
_RAY_FULL = 0.95
# ntpd's step threshold (RFC 5905, STEPT): a clock that is kept by NTP is not that far off.
_CLOCK_S = 0.128
# munge's credentials live that long: Slurm's commands fail between clocks that differ by more.
_MUNGE_S = 300.0
# Slurm's KillWait: from the SIGTERM of a time limit or a preemption to the SIGKILL.
_KILL_WAIT_S = 30.0
# A collective goes at the pace of its slowest link: below half, it takes more than twice as long.
_SLOW_LINK = 0.5
_NETWORK_DISKS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs", "9p")


class Severity(IntEnum):
    """Severity of a finding."""

    ERROR = 0
    WARNING = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem (`what`), its nodes (empty: all), its effect (`why`), and its `fix`."""

    severity: Severity
    what: str
    why: str
    fix: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of a run on each node, from its config; sizes in bytes."""

    ranks_per_node: int
    threads_per_rank: int
    wants_gpus: bool
    """The config asks for GPUs."""
    rank_memory: int
    """Memory of a rank without a model."""
    object_store: int
    train_bytes: int = 0
    """Per rank: parameters, gradients and Adam's moments of its shard in float32."""
    gen_bytes: int = 0
    """Per rank: its shard of the generation weights."""
    checkpoint_bytes: int = 0
    """Size of a checkpoint."""
    checkpoints: int = 1
    """Checkpoints on the disk at once."""
    runs_programs: bool = False
    """A verifier runs programs that the model has written (`reward.kind=code`)."""
    gen_tp: int = 1
    train_tp: int = 1
    layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Measured facts. `nodes` has one for each node, the driver's first."""

    nodes: Sequence[NodeInfo]
    gpu_problems: dict[str, str] = field(default_factory=dict)
    """By node, why torch cannot use its GPUs."""
    disks: Sequence[Disk] = ()
    hidden: Sequence[str] = ()
    """Nodes that do not see the run directory of the driver's node."""
    links: Sequence[Link] = ()
    node_of: Sequence[str] = ()
    """By rank."""
    peaks: Sequence[float] = ()
    """By rank, floating-point operations a second in products of large matrices."""
    peak_format: str = ""
    """The number format of these matrices: the run's `model.compute_dtype`."""
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By node, its clock less the driver's, and by how much that may be wrong; in seconds."""
    jails: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By node, what confines a model's programs there, and why nothing does (else empty)."""


def diagnose(facts: Facts, needs: Needs) -> list[Finding]:
    """Findings, the worst first; the same on several nodes is one."""
    nodes = (_gpus, _compilers, _memory, _shm, _files, _cpus, _versions)
    checks = (*nodes, _disks, _links, _clocks, _jails)
    findings = [finding for check in checks for finding in check(facts, needs)]
    merged: dict[tuple[Severity, str, str, str], list[str]] = defaultdict(list)
    for finding in findings:
        key = (finding.severity, finding.what, finding.why, finding.fix)
        merged[key] += finding.nodes
    return sorted(
        (Finding(*key, tuple(dict.fromkeys(nodes))) for key, nodes in merged.items()),
        key=lambda finding: finding.severity,
    )


def _gpus(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for info in facts.nodes:
        nodes = (info.node,)
        problem = facts.gpu_problems.get(info.node, "")
        mend = "mend the driver, or leave the node out"
        if info.gpus and problem:
            severity = Severity.ERROR if needs.wants_gpus else Severity.WARNING
            why = f"{problem}; the ranks compute on CPUs"
            fix = f"a torch that fits driver {info.gpus[0].driver}: pytorch.org/get-started"
            yield Finding(severity, "torch cannot use the GPUs", why, fix, nodes)
        elif needs.wants_gpus and len(info.gpus) < needs.ranks_per_node:
            what = f"{len(info.gpus)} GPUs for {needs.ranks_per_node} ranks"
            why = info.gpu_fault or "each rank needs its own"
            fix = mend if info.gpu_fault else "cluster.ranks, cluster.gpus_per_node"
            yield Finding(Severity.ERROR, what, why, fix, nodes)
        elif info.gpu_fault:
            yield Finding(Severity.WARNING, "nvidia-smi fails", info.gpu_fault, mend, nodes)
        if not info.gpus or problem:
            continue
        need = max(needs.train_bytes, needs.gen_bytes)
        least = min(info.gpus, key=lambda gpu: gpu.memory_bytes)
        if need > least.memory_bytes > 0:
            yield _too_large(need, f"the {_gib(least.memory_bytes)} of a GPU", nodes)
        used = max(gpu.used_bytes for gpu in info.gpus)
        if need and least.memory_bytes - used < need <= least.memory_bytes:
            why = f"{_gib(used)} of a GPU are in use, and a rank needs {_gib(need)}"
            fix = "end the processes that nvidia-smi lists"
            yield Finding(Severity.ERROR, "GPUs are occupied", why, fix, nodes)
    kinds = {gpu.name for info in facts.nodes for gpu in info.gpus}
    if len(kinds) > 1:
        why = f"{', '.join(sorted(kinds))}: every step waits for the slowest"
        yield Finding(Severity.WARNING, "different GPUs", why, "cluster.sbatch=[--constraint=...]")


def _compilers(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for info in facts.nodes:
        if info.compiler_fault and (needs.wants_gpus or info.gpus):
            severity = Severity.ERROR if needs.wants_gpus else Severity.WARNING
            why = (
                f"Triton builds its kernels' launchers with one at first use: {info.compiler_fault}"
            )
            fix = "install gcc and Python's headers, or name a compiler in CC"
            yield Finding(severity, "no C compiler that Triton can use", why, fix, (info.node,))


def _too_large(need: int, room: str, nodes: tuple[str, ...]) -> Finding:
    why = f"its shard with gradients and optimizer, or its generation weights: {_gib(need)}"
    fix = "more ranks, or a larger trainer.layout.fsdp, .tp, .pp or rollout.layout.tp, .pp"
    return Finding(Severity.ERROR, f"a rank does not fit in {room}", why, fix, nodes)


def _memory(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for info in facts.nodes:
        # Host memory holds both engines' weights without GPUs, offloaded ones with GPUs.
        rank = needs.rank_memory + needs.train_bytes + needs.gen_bytes
        need = needs.ranks_per_node * rank + needs.object_store
        nodes = (info.node,)
        if need > info.usable_memory:
            why = (
                f"{needs.ranks_per_node} ranks of {_gib(rank)} and an object store of"
                f" {_gib(needs.object_store)} need {_gib(need)}: the kernel will end one of them"
            )
            what = f"{_gib(info.usable_memory)} of memory"
            fix = "cluster.memory_per_node, fewer ranks a node, or more nodes"
            yield Finding(Severity.ERROR, what, why, fix, nodes)
        elif need > info.memory_available:
            why = f"the run needs {_gib(need)}; other processes have the rest"
            what = f"{_gib(info.memory_available)} of memory are free"
            yield Finding(Severity.WARNING, what, why, "end it, or ask for whole nodes", nodes)


def _shm(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for info in facts.nodes:
        if info.shm_free >= needs.object_store:
            continue
        why = (
            f"Ray's object store needs {_gib(needs.object_store)} there and goes to a file"
            " otherwise: samples between ranks go through the disk. NCCL needs it, too"
        )
        fix = "a larger one: mount -o remount,size=..., docker --shm-size, or delete its files"
        what = f"/dev/shm has {_gib(info.shm_free)} free of {_gib(info.shm)}"
        yield Finding(Severity.WARNING, what, why, fix, (info.node,))


def _files(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for info in facts.nodes:
        if info.open_files < _OPEN_FILES:
            why = f"Ray asks for {_OPEN_FILES}: with fewer, connections between processes fail"
            fix = f"ulimit -Hn {_OPEN_FILES}, or /etc/security/limits.conf"
            what = f"at most {info.open_files} open files"
            yield Finding(Severity.WARNING, what, why, fix, (info.node,))


def _cpus(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for info in facts.nodes:
        nodes = (info.node,)
        threads = needs.ranks_per_node * needs.threads_per_rank
        if threads > info.usable_cpus:
            what = f"{info.usable_cpus:g} CPUs for {threads} threads"
            why = "ranks wait for each other's turn, and every collective for the last of them"
            fix = "fewer cluster.ranks or cluster.threads_per_rank, more cluster.cpus_per_node"
            yield Finding(Severity.WARNING, what, why, fix, nodes)
        if info.cpu_quota is not None and info.cpu_quota < info.cpus:
            what = f"{info.cpus} CPUs are shown, the control group gives {info.cpu_quota:g}"
            why = "libraries start a thread for each that is shown; the kernel then stops them all"
            fix = "a limit by cpuset (docker --cpuset-cpus), which libraries see"
            yield Finding(Severity.WARNING, what, why, fix, nodes)


def _versions(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for info in facts.nodes:
        for line in untried(info.packages):
            why = "its interfaces may have changed"
            fix = "make install, which takes versions that work together"
            yield Finding(Severity.WARNING, line, why, fix, (info.node,))
        for line in info.unmet:
            why = "these versions are not tested together"
            fix = "install into a separate environment: make install, make install-vllm"
            yield Finding(Severity.WARNING, line, why, fix, (info.node,))
    driver = facts.nodes[0]
    for info in facts.nodes[1:]:
        ours = {"Python": driver.python, **driver.packages}
        theirs = {"Python": info.python, **info.packages}
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(name, "none"), theirs.get(name, "none")
            if a != b:
                # Ray compares the first two when a node joins.
                fatal = name in ("Python", "ray", "hybridrl", "torch")
                why = "processes of one run exchange objects that the other version may not read"
                severity = Severity.ERROR if fatal else Severity.WARNING
                what = f"{name} {b}, and {a} on {driver.node}"
                fix = "the same environment on all nodes: a shared directory, or a container"
                yield Finding(severity, what, why, fix, (info.node,))


def _disks(facts: Facts, needs: Needs) -> Iterator[Finding]:
    if facts.hidden:
        why = "ranks write checkpoints and logs there, and the job ends without them"
        fix = "run.dir on a file system that all nodes share"
        what = "the run directory is another one there"
        yield Finding(Severity.ERROR, what, why, fix, tuple(facts.hidden))
    for disk in facts.disks:
        yield from _scratch(disk) if disk.role == "scratch" else _run_dir(disk, needs)


def _run_dir(disk: Disk, needs: Needs) -> Iterator[Finding]:
    nodes = (disk.node,)
    need = needs.checkpoint_bytes * needs.checkpoints
    if disk.free < need:
        severity = Severity.ERROR if disk.free < needs.checkpoint_bytes else Severity.WARNING
        why = (
            f"{needs.checkpoints} checkpoints of {_gib(needs.checkpoint_bytes)} need"
            f" {_gib(need)}; the run ends when one cannot be written"
        )
        what = f"{_gib(disk.free)} are free in {disk.path}"
        yield Finding(severity, what, why, "another run.dir, or a smaller trainer.keep_last", nodes)
    seconds = needs.checkpoint_bytes / disk.write
    if seconds > _KILL_WAIT_S:
        what = f"a checkpoint takes {seconds:.0f} s at {disk.write / 1e6:.0f} MB/s in {disk.path}"
        why = (
            f"all ranks wait meanwhile; and {_KILL_WAIT_S:g} s after a job's SIGTERM Slurm kills it"
        )
        fix = "a faster file system, or a signal earlier before the end"
        yield Finding(Severity.WARNING, what, why, fix, nodes)
    if disk.kind == "tmpfs":
        what, why = f"{disk.path} is in memory (tmpfs)", "it takes memory, and is gone with it"
        yield Finding(Severity.WARNING, what, why, "run.dir on a disk", nodes)


def _scratch(disk: Disk) -> Iterator[Finding]:
    nodes = (disk.node,)
    if disk.free < (1 - _RAY_FULL) * disk.total:
        what = f"{disk.path} is {1 - disk.free / disk.total:.0%} full"
        why = f"above {_RAY_FULL:.0%} Ray refuses objects that do not fit in memory"
        fix = "delete files there, or set cluster.local_scratch"
        yield Finding(Severity.WARNING, what, why, fix, nodes)
    if disk.kind in _NETWORK_DISKS:
        what = f"temporary files are on {disk.kind} ({disk.path})"
        why = "Ray's sockets and logs, and compilers' caches, go over the network"
        yield Finding(Severity.WARNING, what, why, "cluster.local_scratch on a disk", nodes)


def _links(facts: Facts, needs: Needs) -> Iterator[Finding]:
    # links that are slower than others of their kind
    links_by_crossing: dict[bool, list[Link]] = defaultdict(list)
    for link in facts.links:
        if link.kind == "send":
            a, b = (facts.node_of[rank] for rank in link.ranks)
            links_by_crossing[a != b].append(link)
    for across, links in links_by_crossing.items():
        usual = median(link.rate for link in links)
        for link in links:
            if link.rate < _SLOW_LINK * usual:
                nodes = tuple(dict.fromkeys(facts.node_of[rank] for rank in link.ranks))
                location = "between these nodes" if across else "within this node"
                what = f"ranks {link.ranks[0]} and {link.ranks[1]}: {_rate(link.rate)} {location}"
                why = f"others have {_rate(usual)}; every collective goes at the slowest one's pace"
                fix = "leave the node out: cluster.sbatch=[--exclude=...]"
                yield Finding(Severity.WARNING, what, why, fix, nodes)
    yield from _idle_infiniband(facts, links_by_crossing[True])
    # tensor parallelism across nodes
    tp = max(needs.gen_tp, needs.train_tp)
    if tp > needs.ranks_per_node:
        latency = min(
            (link.seconds for link in facts.links if link.kind == "all_reduce"), default=0.0
        )
        what = f"tensor parallelism of {tp} ranks, {needs.ranks_per_node} on a node"
        # Megatron-LM, section 3: two in the forward pass of a layer.
        why = (
            f"two all-reduces a layer cross nodes: {2 * needs.layers * latency * 1e3:.2g} ms of"
            " every token's decoding, at this latency"
        )
        fix = f"trainer.layout.tp and rollout.layout.tp of at most {needs.ranks_per_node}"
        fix += ", with pp or fsdp across nodes"
        yield Finding(Severity.WARNING, what, why, fix)


def _idle_infiniband(facts: Facts, across: Sequence[Link]) -> Iterator[Finding]:
    """Active InfiniBand, and transfers no faster than the node's other interfaces allow."""
    if not across or not facts.nodes[0].gpus:
        return  # gloo does not use it
    best = max(link.rate for link in across) * 8 / 1e9
    for info in facts.nodes:
        fastest = max(info.infiniband.values(), default=0.0)
        other = max(info.networks.values(), default=0.0)
        if fastest > other >= best:
            what = f"{best:.3g} Gbit/s between nodes, with InfiniBand of {fastest:g} Gbit/s"
            why = f"no more than the {other:g} Gbit/s of the other interfaces: NCCL uses these"
            fix = "NCCL_DEBUG=INFO says why; NCCL_IB_HCA, and in a container /dev/infiniband"
            yield Finding(Severity.WARNING, what, why, fix, (info.node,))


def _clocks(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for node, (offset, error) in facts.clocks.items():
        off = abs(offset) - error  # at least
        if off > _CLOCK_S:
            severity = Severity.ERROR if off > _MUNGE_S else Severity.WARNING
            why = "the timeline shows that node's work at wrong times"
            if severity is Severity.ERROR:
                why = f"Slurm's credentials (munge) are refused beyond {_MUNGE_S:g} s"
            what = f"its clock is {offset:+.3g} s off"
            yield Finding(severity, what, why, "chronyd or ntpd on all nodes", (node,))


def _jails(facts: Facts, needs: Needs) -> Iterator[Finding]:
    for node, (_, obstacle) in facts.jails.items():
        if obstacle and needs.runs_programs:
            fix = "install bubblewrap, or allow user namespaces; reward.jail=off does without"
            what = "no jail works for the model's programs"
            yield Finding(Severity.ERROR, what, obstacle, fix, (node,))


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.4g} GiB"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
