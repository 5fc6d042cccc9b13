"""Tensor parallelism across nodes, which a run is warned of: each layer's all-reduces are slow."""

from collections.abc import Sequence

from hybridrl.config import Config


def crossing_warnings(
    config: Config, node_of: Sequence[str], ranks: Sequence[int], instances: Sequence[Sequence[int]]
) -> list[str]:
    """A line for each layout whose tp groups span several nodes.

    `node_of` is by rank. `ranks` are the actor's, `instances` the ranks of each generation
    instance, ascending.
    """
    train, gen = config.trainer.layout.tp, config.rollout.layout.tp
    groups = {"trainer.layout.tp": (train, [ranks]), "rollout.layout.tp": (gen, instances)}
    lines = []
    for key, (tp, blocks) in groups.items():
        split = [group for block in blocks for group in _pieces(block, tp)]
        across = [group for group in split if len({node_of[rank] for rank in group}) > 1]
        if across:
            named = ", ".join(map(str, across[0]))
            lines.append(
                f"{key}={tp}: ranks {named} are on several nodes, as {len(across)} of {len(split)}"
                " tensor-parallel groups; every layer's all-reduces cross the network"
            )
    return lines


def _pieces(ranks: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]
