"""`hybridrl doctor`: examines the nodes of a run as its ranks see them, and reports problems.

Ray starts as for a run, with a `Probe` in place of each rank; `checks`, which is pure, diagnoses
their facts.
"""

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from hybridrl.compat import verl
from hybridrl.config import (
    ClusterConfig,
    Config,
    ConfigError,
    Device,
    DType,
    JailKind,
    JudgeConfig,
    RewardKind,
)
from hybridrl.doctor.checks import Facts, Finding, Needs, Severity, diagnose
from hybridrl.doctor.measure import (
    Link,
    Probe,
    find_jail,
    gpu_problem,
    link_table,
    measure_disk,
)
from hybridrl.runtime.devices import resolve_device
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.ray_cluster import RANK_BYTES, check_ranks, ranks_placement, ray_runtime
from hybridrl.system.node_info import OBJECT_STORE_LEAST, NodeInfo, read_node_info
from hybridrl.system.owned_folder import temporary_folder
from hybridrl.telemetry.records import write_json

logger = logging.getLogger(__name__)

USAGE = """usage: hybridrl doctor [--json] [--links=FILE] [OVERRIDES]

Finds problems of a run of these overrides on this node, on a Ray cluster (cluster.address=...)
or on the nodes of a Slurm job (cluster=slurm ...): inside of a job it looks at its nodes, elsewhere
it submits one and waits for it. Exit code 1 where such a run cannot work.

  --json    the report as JSON
  --links   measures the link between each two ranks, one after the other, and writes them to FILE,
            for `hybridrl plan auto --links=FILE`"""
_CLOCK_READS = 5


@dataclass(frozen=True, slots=True)
class Report:
    """Facts and their diagnosis."""

    facts: Facts
    needs: Needs
    findings: list[Finding]

    @property
    def works(self) -> bool:
        """Whether a run can work."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def record(self) -> dict[str, Any]:
        """The report as JSON data."""
        findings = [{**asdict(f), "severity": f.severity.name.lower()} for f in self.findings]
        links = [{**asdict(link), "rate": link.rate} for link in self.facts.links]
        facts = {**asdict(self.facts), "links": links}
        return {"works": self.works, "findings": findings, "needs": asdict(self.needs), **facts}


def examine(config: Config, directory: Path, all_links: bool = False) -> Report:
    """Examine all nodes of a run with a directory below `directory`; leaves no files there.

    With `all_links` each two ranks exchange messages, large and small ones. If the ranks do not
    start, the reason is a finding, and only this node's facts are judged.
    """
    resolve_device(config)
    needs, cluster, kind = needs_of(config), config.cluster, jail_kind_of(config)
    trouble: list[Finding] = []
    with temporary_folder(directory, ".doctor") as folder:
        try:
            check_ranks(cluster)
            logger.debug("starting %d ranks", cluster.ranks)
            logs = folder / "logs"
            with ray_runtime(cluster, verl.environment(cluster.device), logs) as ray:
                dtype = config.model.compute_dtype
                facts = gather(ray, cluster, folder, kind, dtype, all_links)
        except (RayStartError, ConfigError, TimeoutError) as error:
            what, fix = "the ranks do not come up", "see the reason, and the findings below"
            why = "; ".join([str(error), *_last_lines(folder / "logs")])
            trouble.append(Finding(Severity.ERROR, what, why, fix))
            logger.debug("%s; this node is examined alone", what)
            facts = _this_node_alone(directory, kind)
    return Report(facts, needs, [*trouble, *diagnose(facts, needs)])


def needs_of(config: Config) -> Needs:
    """Requirements of the actor of `config` on a node; other trained roles need more.

    A trained parameter takes 16 bytes in all (float32 itself, its gradient, Adam's two moments:
    ZeRO, section 3.1), 12 of them in a checkpoint.
    """
    from transformers.utils import logging

    from hybridrl.models.parallel import model_parameters
    from hybridrl.models.shape import model_shape

    logging.disable_progress_bar()
    cluster, train, gen = config.cluster, config.trainer.layout, config.rollout.layout
    shape = model_shape(config.model)
    parameters = sum(math.prod(parameter.shape) for parameter in model_parameters(shape))
    itemsize = config.rollout.dtype.itemsize
    return Needs(
        ranks_per_node=cluster.ranks_per_node,
        threads_per_rank=cluster.threads_per_rank or 1,
        wants_gpus=cluster.device is Device.cuda,
        rank_memory=RANK_BYTES,
        object_store=cluster.object_store_mb * 2**20 or OBJECT_STORE_LEAST,
        train_bytes=16 * parameters // (train.pp * train.fsdp * train.tp),
        gen_bytes=itemsize * parameters // (gen.pp * gen.tp),
        checkpoint_bytes=12 * parameters,
        checkpoints=(config.trainer.keep_last if config.trainer.save_every else 0) + 2,
        runs_programs=any(judge.kind is RewardKind.code for judge in _judges(config)),
        gen_tp=gen.tp,
        train_tp=train.tp,
        layers=shape.num_hidden_layers,
    )


def jail_kind_of(config: Config) -> JailKind:
    """The jail of the run's first verifier of programs, else what works."""
    kinds = (judge.jail for judge in _judges(config) if judge.kind is RewardKind.code)
    return next(kinds, JailKind.auto)


def _judges(config: Config) -> list[JudgeConfig]:
    roles = (*config.judges_of("reward"), *config.judges_of("cost"))
    return [config.judge_of(role) for role in roles]


def gather(
    ray: Any,
    cluster: ClusterConfig,
    folder: Path,
    kind: JailKind = JailKind.auto,
    dtype: DType = DType.auto,
    all_links: bool = False,
) -> Facts:
    """Facts of a probe in place of every rank, which computes in `dtype`.

    With `all_links` those between each two ranks. Raises TimeoutError if they do not answer.
    """

    def answers(calls: list[Any], doing: str) -> list[Any]:
        logger.debug("%d ranks are to %s", len(calls), doing)
        try:
            results: list[Any] = ray.get(calls, timeout=cluster.start_timeout_s)
        except ray.exceptions.GetTimeoutError:
            limit = f"within cluster.start_timeout_s={cluster.start_timeout_s:g}"
            raise TimeoutError(f"the ranks did not {doing} {limit}") from None
        except ray.exceptions.RayError as error:
            raise TimeoutError(f"the ranks did not {doing}: {_cause(error)}") from error
        return results

    def time_of(probe: Any) -> float:
        (seconds,) = answers([probe.clock.remote()], "tell the time")
        return float(seconds)

    # facts of every node
    probes = _probes(ray, cluster)
    node_facts: list[tuple[NodeInfo, str, str]] = answers(
        [p.look.remote() for p in probes], "start"
    )
    node_of = [info.node for info, _, _ in node_facts]
    first = {node: node_of.index(node) for node in node_of}
    leaders = [probes[rank] for rank in first.values()]
    clocks = {node: _clock(partial(time_of, probes[rank])) for node, rank in first.items()}
    # file systems
    seen = folder / "seen"
    seen.touch()
    visible = answers([probe.sees.remote(str(seen)) for probe in leaders], "look for a file")
    disks = answers([probe.disks.remote(str(folder)) for probe in leaders], "write files")
    jails = answers([probe.jail.remote(kind) for probe in leaders], "start a jail")
    # devices
    peaks, peak_format = [], dtype.on(cluster.device.value).value
    if not any(problem for _, problem, _ in node_facts):
        peaks = answers([probe.peak.remote(peak_format) for probe in probes], "multiply matrices")
    # links between ranks
    links: list[Link] = []
    if len(probes) > 1:
        (address,) = answers([probes[0].listen.remote()], "listen")
        # If a host's name resolves to 127.0.0.1, gloo and NCCL need the name of the interface.
        doing = "meet (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface)"
        answers([probe.join.remote(*address) for probe in probes], doing)
        pings = [probe.measure.remote(messages=all_links, all_pairs=all_links) for probe in probes]
        measured = answers(pings, "exchange messages")
        sent = (x for links in measured[1:] for x in links if x.kind != "all_reduce")
        links = [*measured[0], *sent]
    infos = {info.node: info for info, _, _ in reversed(node_facts)}
    driver_node = read_node_info()
    return Facts(
        nodes=[infos.pop(driver_node.node, driver_node), *infos.values()],
        gpu_problems={node_of[rank]: problem for rank, (_, problem, _) in enumerate(node_facts)},
        disks=[disk for of_node in disks for disk in of_node],
        hidden=[node for node, sees in zip(first, visible, strict=True) if not sees],
        links=links,
        node_of=node_of,
        peaks=peaks,
        peak_format=peak_format if peaks else "",
        clocks=clocks,
        jails=dict(zip(first, jails, strict=True)),
    )


def _probes(ray: Any, cluster: ClusterConfig) -> list[Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategies = [
        PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.index)
        for bundle in ranks_placement(ray, cluster)
    ]
    env = {"env_vars": verl.environment(cluster.device)}  # a rank's: it sees all GPUs of its node
    on_gpu = int(cluster.device is Device.cuda)
    probe = ray.remote(num_cpus=1, num_gpus=on_gpu, runtime_env=env)(Probe)
    return [
        probe.options(scheduling_strategy=strategy).remote(rank, len(strategies), cluster)
        for rank, strategy in enumerate(strategies)
    ]


def _clock(read: Callable[[], float]) -> tuple[float, float]:
    """A node's clock by `read`, less this one, and half of the round trip that bounds the error."""
    reads = []
    for _ in range(_CLOCK_READS):
        start = time.time()
        node_time = read()
        stop = time.time()
        reads.append((node_time - (start + stop) / 2, (stop - start) / 2))
    return min(reads, key=lambda read: read[1])


def _last_lines(logs: Path) -> Iterator[str]:
    """The last lines of Ray's log of each node, before its directory is deleted."""
    for file in sorted(logs.glob("ray-*.log")):
        lines = file.read_text(errors="replace").strip().splitlines()
        yield f"{file.name} ends with: {' | '.join(line.strip() for line in lines[-5:])}"


def _cause(error: Exception) -> str:
    return " ".join(str(getattr(error, "cause", None) or error).split())


def _this_node_alone(directory: Path, kind: JailKind) -> Facts:
    """This node without ranks."""
    info = read_node_info()
    disks = []
    with suppress(OSError):
        disks.append(measure_disk("run.dir", directory, info.node))
        scratch = Path(tempfile.gettempdir())
        disks.append(measure_disk("scratch", scratch, info.node))
    problems = {info.node: gpu_problem()[0]} if info.gpus else {}
    jails = {info.node: find_jail(kind)}
    return Facts(nodes=[info], gpu_problems=problems, disks=disks, jails=jails)


def write_links(report: Report, out: Path) -> None:
    """Write the links of all ranks for `hybridrl plan auto --links`. Raises ConfigError."""
    table = link_table(report.facts.links, len(report.facts.node_of))
    if table is None:
        raise ConfigError("--links", str(out), "a run of two ranks or more, which come up")
    write_json(out, asdict(table))


def existing(path: Path) -> Path:
    """The existing directory at `path` or nearest above it."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def inside_a_job() -> bool:
    """Whether this process is in a Slurm job."""
    return "SLURM_JOB_ID" in os.environ


def shown(report: Report) -> RenderableType:
    """The report for the terminal: tables of facts, then the findings."""
    parts: list[RenderableType] = [_nodes(report.facts), _disks(report.facts)]
    if report.facts.peaks:
        parts.append(_peaks(report.facts))
    if report.facts.links:
        parts.append(_links(report.facts))
    return Group(*parts, *_words(report.findings))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _nodes(facts: Facts) -> Table:
    table = _table("node", "CPUs", "memory", "/dev/shm", "GPUs", "Python", "torch", "ray", "jail")
    for info in facts.nodes:
        names = {gpu.name for gpu in info.gpus}
        packages = info.packages
        table.add_row(
            info.node,
            f"{info.usable_cpus:g} ({info.cpu})",
            f"{info.usable_memory / 2**30:,.4g} GiB",
            f"{info.shm / 2**30:,.4g} GiB",
            f"{len(info.gpus)} x {', '.join(sorted(names))}" if names else "none",
            info.python,
            packages.get("torch", "none"),
            packages.get("ray", "none"),
            facts.jails.get(info.node, ("unknown", ""))[0],
        )
    return table


def _disks(facts: Facts) -> Table:
    table = _table("node", "files", "on", "free", "write+fsync", "read", "replace", "small files")
    for disk in facts.disks:
        table.add_row(
            disk.node,
            disk.role,
            disk.kind,
            f"{disk.free / 2**30:,.4g} GiB",
            f"{disk.write / 1e6:,.0f} MB/s",
            f"{disk.read / 1e6:,.0f} MB/s",
            f"{disk.replace_s * 1e3:.2g} ms",
            f"{disk.files_per_s:,.0f} /s",
        )
    return table


def _peaks(facts: Facts) -> Table:
    table = _table("rank", "node", f"products of large {facts.peak_format} matrices")
    for rank, (peak, node) in enumerate(zip(facts.peaks, facts.node_of, strict=True)):
        table.add_row(str(rank), node, f"{peak / 1e12:.3g} TFLOP/s")
    return table


def _links(facts: Facts) -> Table:
    table = _table("ranks", "transfer", "size", "time", "rate")
    for link in facts.links:
        nodes = list(dict.fromkeys(facts.node_of[rank] for rank in link.ranks))
        many = link.kind == "all_reduce"
        ranks = f"all {len(link.ranks)}" if many else " - ".join(map(str, link.ranks))
        table.add_row(
            f"{ranks}, {nodes[0] if len(nodes) == 1 else f'{len(nodes)} nodes'}",
            link.kind,
            f"{link.nbytes / 2**20:g} MiB" if link.nbytes >= 2**16 else f"{link.nbytes} B",
            f"{link.seconds * 1e3:.3g} ms",
            f"{link.rate / 1e9:.3g} GB/s" if link.nbytes >= 2**16 else "",
        )
    return table


def _words(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "\nno problems found"
    for finding in findings:
        color = "red" if finding.severity is Severity.ERROR else "yellow"
        location = f" on {', '.join(finding.nodes)}" if finding.nodes else ""
        yield f"\n[{color}]{finding.severity.name}[/]{location}: {_plain(finding.what)}"
        yield f"  {_plain(finding.why)}"
        yield f"  fix: {_plain(finding.fix)}"


def _plain(text: str) -> str:
    """Square brackets as they are."""
    return text.replace("[", "\\[")
