"""tp, ep and cp across nodes, which a run is warned of: each layer's collectives are slow."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridrl.config import Config, ConfigError, Grouping, RolloutLayoutConfig
from hybridrl.layout.grouping import TrainAxes, nodes_spanned
from hybridrl.layout.parameters import context_mesh, expert_mesh
from hybridrl.layout.switching import candidate_orders, check_ascending

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    train, gen = config.trainer.layout, config.rollout.layout
    axes, nodes = TrainAxes.of(train), [node_of[rank] for rank in ranks]

    def crosses(group: Sequence[int]) -> bool:
        return len({node_of[rank] for rank in group}) > 1

    def line(setting: str, groups: Groups, kind: str, sends: str, instead: str) -> list[str]:
        across = [group for group in groups if crosses(group)]
        if not across:
            return []
        named = ", ".join(map(str, across[0]))
        return [
            f"{setting}: ranks {named} are on several nodes, as {len(across)} of {len(groups)}"
            f" {kind} groups; every layer's {sends} cross the network; {instead} avoids it"
        ]

    def of_training(axes: TrainAxes, cp: int = 1) -> dict[str, Groups]:
        mesh = expert_mesh(axes).lines("ep"), context_mesh(axes, cp).lines("cp")
        ep, cp_groups = ([[ranks[i] for i in group] for group in groups] for groups in mesh)
        return {"tp": _pieces(ranks, axes.tp), "ep": ep, "cp": cp_groups}

    def stays(groups: Groups) -> bool:
        return not any(map(crosses, groups))

    def experts_instead() -> str:
        near = replace(axes, ep_near=True)
        if stays(of_training(near)["ep"]):
            return "trainer.layout.ep_grouping=vanilla"
        ep = _largest(axes.ep, lambda ep: stays(of_training(replace(near, ep=ep))["ep"]))
        return f"trainer.layout.ep={ep} trainer.layout.ep_grouping=vanilla"

    def generation_instead() -> str:
        from hybridrl.models.shape import model_shape

        shape = model_shape(config.model)

        def helps(layout: RolloutLayoutConfig) -> bool:
            if not _allowed(config, axes, layout, shape):
                return False
            ascending = config.rollout.features.ascending
            sizes = layout.pp, layout.tp, layout.grouping
            orders = candidate_orders(axes, *sizes, ascending=ascending, nodes=nodes)
            return not any(nodes_spanned(positions, nodes)[0] for positions in orders)

        alone = replace(gen, tp=1, ep=1, grouping=Grouping.auto)
        return _changes(gen, next(filter(helps, _alternatives(gen)), alone))

    groups = of_training(axes, train.cp)
    decoding = [group for block in instances for group in _pieces(block, gen.tp)]
    joined = [group for block in wide for group in _pieces(block, len(block) // gen.pp)]
    of_tp = ("tensor-parallel", "all-reduces")
    lines = []
    if not stays(groups["tp"]):
        tp = _largest(train.tp, lambda tp: stays(_pieces(ranks, tp)))
        setting, fsdp = f"trainer.layout.tp={train.tp}", train.fsdp * train.tp // tp
        instead = f"trainer.layout.tp={tp} trainer.layout.fsdp={fsdp}"
        lines += line(setting, groups["tp"], *of_tp, instead)
    if not stays(decoding):
        lines += line(f"rollout.layout.tp={gen.tp}", decoding, *of_tp, generation_instead())
    lines += line(
        f"rollout.tail_tp={config.rollout.tail_tp}", joined, *of_tp, "rollout.tail_tp=off"
    )
    if not stays(groups["ep"]):
        kind = "expert-parallel", "all-to-alls"
        lines += line(f"trainer.layout.ep={axes.ep}", groups["ep"], *kind, experts_instead())
    if not stays(groups["cp"]):
        kind = "context-parallel", "all-to-alls"
        cp = _largest(train.cp, lambda cp: stays(of_training(axes, cp)["cp"]))
        lines += line(
            f"trainer.layout.cp={train.cp}", groups["cp"], *kind, f"trainer.layout.cp={cp}"
        )
    return lines


def _alternatives(gen: RolloutLayoutConfig) -> Iterator[RolloutLayoutConfig]:
    """Layouts to generate with instead, those nearest to `gen` first.

    Instances keep their size, or have fewer ranks: some models and settings allow no stages. Ranks
    that have whole experts still do. An order by name gives way to `auto` before tp shrinks.
    """
    divisors = [tp for tp in range(gen.tp, 0, -1) if gen.tp % tp == 0]
    sizes = [(tp, pp) for tp in divisors for pp in (gen.ranks // tp, gen.pp)]
    for tp, pp in sizes:
        for grouping in dict.fromkeys((gen.grouping, Grouping.auto)):
            layout = replace(gen, tp=tp, pp=pp, ep=1 if gen.ep == 1 else tp, grouping=grouping)
            if layout != gen:
                yield layout


def _allowed(
    config: Config, axes: TrainAxes, layout: RolloutLayoutConfig, model: "PretrainedConfig"
) -> bool:
    """Whether a run with this generation layout passes the checks that depend on it."""
    from hybridrl.engines.rollout.vllm.arguments import check_asynchronous
    from hybridrl.models.parallel import check_gen_layout, check_tail_tp

    other = copy.copy(config)
    other.rollout = rollout = replace(config.rollout, layout=layout)
    try:
        layout.check(axes.ranks)
        rollout.check()
        rollout.check_tail_ranks(axes.ranks, "cluster.ranks")
        other.check_experts()
        check_asynchronous(rollout.vllm, layout.pp, on_cpu=False)
        if rollout.features.ascending:
            check_ascending(axes, layout.pp, layout.tp, layout.grouping)
        check_gen_layout(model, layout.pp, layout.tp, ep=layout.ep)
        check_tail_tp(model, rollout)
    except ConfigError:
        return False
    return True


def _changes(old: RolloutLayoutConfig, new: RolloutLayoutConfig) -> str:
    """The overrides that make `new` of `old`."""
    sizes = {"tp": new.tp, "pp": new.pp, "ep": new.ep}
    changed = [f"{name}={size}" for name, size in sizes.items() if size != getattr(old, name)]
    if new.grouping is not old.grouping:
        changed.append(f"grouping={new.grouping.value}")
    return " ".join(f"rollout.layout.{change}" for change in changed)


def _largest(size: int, stays: Callable[[int], bool]) -> int:
    """The largest divisor of `size` below it of which this is true; 1 if there is none."""
    return next((d for d in range(size // 2, 0, -1) if size % d == 0 and stays(d)), 1)


def _pieces(ranks: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]
