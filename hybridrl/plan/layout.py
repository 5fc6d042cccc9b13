"""Traffic and memory of a weight switch, by rank, from its plan."""

import math
from dataclasses import asdict, dataclass

import numpy as np

from hybridrl.layout.switching import Switch


@dataclass(frozen=True, slots=True)
class Spread:
    """A number of bytes over the ranks."""

    min: int
    mean: int
    max: int

    @classmethod
    def of(cls, elements: np.ndarray, itemsize: int) -> "Spread":
        """The spread of a number of elements by rank."""
        num_bytes = elements * itemsize
        return cls(int(num_bytes.min()), round(float(num_bytes.mean())), int(num_bytes.max()))

    def __str__(self) -> str:
        if self.min == self.max:
            return size(self.max)
        return f"{size(self.mean)} ({size(self.min)} to {size(self.max)})"


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """A weight switch in numbers; bytes are of the generation dtype unless said otherwise."""

    train: str
    """pp x replicas x fsdp x tp."""
    gen: str
    """pp x tp of an instance."""
    experts: str
    """ep x fsdp of experts in training, how generation has them, and whether ep crosses nodes.

    Empty for a dense model.
    """
    instances: int
    order: str
    """The order of ranks (`Grouping`)."""
    parameters: int
    model_bytes: int
    ranks: int
    train_shard: Spread
    """fp32 parameters that a rank trains, in their four bytes; optimizer state not counted."""
    gathered: Spread
    """Generation parameters on a rank while it generates."""
    received: Spread
    sent: Spread
    kept: Spread
    """Bytes that a rank holds already."""
    least: Spread
    """Lower bound on a rank's received bytes (`Plan.least`)."""
    total_received: int
    total_theory: int
    """M/(p_g t_g) - M/(p f t) by each rank (HybridFlow, section 5.4)."""
    scratch: int
    """Most extra memory of a rank: two buckets."""
    bytes_within_nodes: int
    bytes_across_nodes: int
    gpus_per_node: int

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values to read."""
        ratio = "nothing to move" if not self.total_received else "none: theory moves nothing"
        if self.total_theory:
            ratio = f"{self.total_received / self.total_theory:.3f}"
        experts = [("experts, ep x fsdp; generation", self.experts)] if self.experts else []
        across = f"{size(self.bytes_across_nodes)} across nodes of {self.gpus_per_node}"
        return [
            ("parameters", f"{self.parameters:,} ({size(self.model_bytes)})"),
            ("training, pp x replicas x fsdp x tp", f"{self.train} = {self.ranks} ranks"),
            ("generation, pp x tp", f"{self.gen}, {self.instances} instances"),
            *experts,
            ("order of ranks", self.order),
            ("trained by a rank, float32", str(self.train_shard)),
            ("generated with by a rank (peak)", str(self.gathered)),
            ("  of it held already", str(self.kept)),
            ("  of it received", str(self.received)),
            ("  lower bound", str(self.least)),
            ("sent by a rank", str(self.sent)),
            ("received by all", size(self.total_received)),
            ("  theory; ratio", f"{size(self.total_theory)}; {ratio}"),
            ("scratch of a rank, at most", size(self.scratch)),
            ("traffic", f"{size(self.bytes_within_nodes)} within, {across}"),
        ]

    def record(self) -> dict[str, object]:
        """The report as JSON data."""
        return asdict(self)


def report(switch: Switch, itemsize: int, bucket_bytes: int, gpus_per_node: int) -> LayoutReport:
    """Describe a planned switch for generation weights of `itemsize` bytes an element."""
    plan, traffic = switch.plan, switch.plan.traffic
    src, dst = plan.src.mesh, plan.dst.mesh
    num_elements = sum(math.prod(shape) for shape in plan.dst.shapes.values())
    before, after = (np.zeros(plan.num_ranks, np.int64) for _ in range(2))
    for cls in plan.classes:
        before += plan.src.elements(cls.names[0], plan.num_ranks) * len(cls.names)
        after += plan.dst.elements(cls.names[0], plan.num_ranks) * len(cls.names)
    across = sum(
        count for (a, b), count in traffic.links.items() if a // gpus_per_node != b // gpus_per_node
    )
    total = int(traffic.received.sum())
    axes = ("pp", "replica", "fsdp", "tp")
    return LayoutReport(
        train=" x ".join(str(src.extent(axis)) for axis in axes),
        gen=f"{dst.extent('pp')} x {dst.extent('tp')}",
        experts=_experts(switch, gpus_per_node),
        instances=dst.extent("instance"),
        order=switch.grouping.value,
        parameters=num_elements,
        model_bytes=num_elements * itemsize,
        ranks=src.size,
        train_shard=Spread.of(before, 4),
        gathered=Spread.of(after, itemsize),
        received=Spread.of(traffic.received, itemsize),
        sent=Spread.of(traffic.sent, itemsize),
        kept=Spread.of(traffic.kept, itemsize),
        least=Spread.of(plan.least, itemsize),
        total_received=total * itemsize,
        total_theory=switch.theory * itemsize,
        scratch=2 * bucket_bytes if total else 0,
        bytes_within_nodes=(total - across) * itemsize,
        bytes_across_nodes=across * itemsize,
        gpus_per_node=gpus_per_node,
    )


def _experts(switch: Switch, gpus_per_node: int) -> str:
    if not switch.experts:
        return ""
    name, (src, dst) = switch.experts[0], (switch.plan.src, switch.plan.dst)
    mesh, tp = src.mesh_of(name), dst.mesh.extent("tp")
    whole = tp == 1 or dst.rules[name].splits[0].dim == 0
    cut = "whole" if whole else f"each cut by tp {tp}"
    groups = mesh.lines("ep") if mesh.extent("ep") > 1 else []
    across = any(len({rank // gpus_per_node for rank in group}) > 1 for group in groups)
    sizes = f"{mesh.extent('ep')} x {mesh.extent('fsdp') * mesh.extent('efsdp')}"
    return f"{sizes}; {cut}" + f"; ep crosses nodes of {gpus_per_node}" * across


def size(num_bytes: float) -> str:
    """`17.6 GB`: decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
