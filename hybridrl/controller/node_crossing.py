"""tp, ep and cp across nodes, which a run is warned of: each layer's collectives are slow."""

from collections.abc import Sequence

from hybridrl.config import Config
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.parameters import context_mesh, expert_mesh


def crossing_warnings(
    config: Config,
    node_of: Sequence[str],
    ranks: Sequence[int],
    instances: Sequence[Sequence[int]],
    wide: Sequence[Sequence[int]] = (),
) -> list[str]:
    """A line for each layout whose tp, ep or cp groups span several nodes.

    `node_of` is by rank. `ranks` are the actor's, `instances` the ranks of each generation
    instance, ascending. `wide` are those of wide instances, by instance rank.
    """
    train, gen = config.trainer.layout.tp, config.rollout.layout.tp
    groups = {"trainer.layout.tp": (train, [ranks]), "rollout.layout.tp": (gen, instances)}
    lines = []
    for key, (tp, blocks) in groups.items():
        split = [group for block in blocks for group in _pieces(block, tp)]
        lines += _warning(f"{key}={tp}", split, node_of, "tensor-parallel groups", "all-reduces")
    pp, tail = config.rollout.layout.pp, f"rollout.tail_tp={config.rollout.tail_tp}"
    split = [group for block in wide for group in _pieces(block, len(block) // pp)]
    lines += _warning(tail, split, node_of, "tensor-parallel groups", "all-reduces")
    axes = TrainAxes.of(config.trainer.layout)
    # Experts go to the ranks that generate with them; so the ranks of an ep group are far apart.
    split = [[ranks[i] for i in group] for group in expert_mesh(axes).lines("ep")]
    key = f"trainer.layout.ep={axes.ep}"
    lines += _warning(key, split, node_of, "expert-parallel groups", "all-to-alls")
    cp = config.trainer.layout.cp
    split = [[ranks[i] for i in group] for group in context_mesh(axes, cp).lines("cp")]
    key = f"trainer.layout.cp={cp}"
    return lines + _warning(key, split, node_of, "context-parallel groups", "all-to-alls")


def _warning(
    setting: str,
    groups: Sequence[Sequence[int]],
    node_of: Sequence[str],
    kind: str,
    collectives: str,
) -> list[str]:
    across = [group for group in groups if len({node_of[rank] for rank in group}) > 1]
    if not across:
        return []
    named = ", ".join(map(str, across[0]))
    return [
        f"{setting}: ranks {named} are on several nodes, as {len(across)} of {len(groups)}"
        f" {kind}; every layer's {collectives} cross the network"
    ]


def _pieces(ranks: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]
