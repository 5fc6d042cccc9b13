"""tp, ep and cp across nodes, which a run is warned of: each layer's collectives are slow."""

from collections.abc import Sequence

from hybridrl.config import Config, Grouping
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.parameters import context_mesh, expert_mesh

Groups = Sequence[Sequence[int]]


def crossing_warnings(
    config: Config,
    node_of: Sequence[str] | Sequence[int],
    ranks: Sequence[int],
    instances: Groups,
    wide: Groups = (),
) -> list[str]:
    """A line for each layout whose tp, ep or cp groups span several nodes, with what avoids it.

    `node_of` is by rank. `ranks` are the actor's, `instances` the ranks of each generation
    instance, by instance rank. `wide` are those of wide instances.
    """
    train, gen, tail_tp = config.trainer.layout, config.rollout.layout, config.rollout.tail_tp
    axes = TrainAxes.of(train)
    decoding = [group for block in instances for group in _pieces(block, gen.tp)]
    joined = [group for block in wide for group in _pieces(block, len(block) // gen.pp)]
    ep, cp = expert_mesh(axes).lines("ep"), context_mesh(axes, train.cp).lines("cp")
    order = "rollout.layout.grouping=auto and " * (gen.grouping is not Grouping.auto)
    near = "trainer.layout.ep_grouping=vanilla and " * (not axes.ep_near)
    with_tp = " x tp" * (train.tp > 1)  # neighbours along cp are tp ranks apart
    lines = []
    for setting, kind, groups, instead in (
        (f"trainer.layout.tp={train.tp}", "tensor", _pieces(ranks, train.tp),
         "a trainer.layout.tp that divides a node's ranks"),
        (f"rollout.layout.tp={gen.tp}", "tensor", decoding,
         f"{order}a rollout.layout.tp that divides a node's ranks"),
        (f"rollout.tail_tp={tail_tp}", "tensor", joined, "rollout.tail_tp=off"),
        (f"trainer.layout.ep={axes.ep}", "expert", _ranked(ep, ranks),
         f"{near}a trainer.layout.ep that divides a node's ranks"),
        (f"trainer.layout.cp={train.cp}", "context", _ranked(cp, ranks),
         f"a trainer.layout.cp{with_tp} that divides a node's ranks"),
    ):  # fmt: skip
        across = [group for group in groups if len({node_of[rank] for rank in group}) > 1]
        if across:
            named = ", ".join(map(str, across[0]))
            sends = "all-reduces" if kind == "tensor" else "all-to-alls"
            lines.append(
                f"{setting}: ranks {named} are on several nodes, as {len(across)} of {len(groups)}"
                f" {kind}-parallel groups; every layer's {sends} cross the network;"
                f" {instead} avoids it"
            )
    return lines


def _ranked(groups: Groups, ranks: Sequence[int]) -> Groups:
    """The ranks at these places of a pool."""
    return [[ranks[place] for place in group] for group in groups]


def _pieces(ranks: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]
