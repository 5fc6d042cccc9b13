"""The layouts of a model in training and in generation, derived from its parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layout import Layout, Rule, Split, stages_of_layers
from hybridrl.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as layouts see it, by its Hugging Face name.

    `layer` is its decoder layer; -1 (`FIRST`) is before the layers, -2 (`LAST`) after them, -3
    (`BOTH`) both (a tied embedding). `tp_dim` is the dimension that tensor parallelism splits
    (None: replicated over tp), in full `units` (heads) if set, within each of `blocks`. `experts`
    is the number of experts that dimension 0 counts, 0 for any other parameter. What is `precise`
    stays in float32 (`Layout.precise`).
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    tp_dim: int | None = None
    units: int = 0
    blocks: int = 1
    experts: int = 0
    precise: bool = False


FIRST, LAST, BOTH = -1, -2, -3


def train_mesh(axes: TrainAxes) -> Mesh:
    """The mesh of training ranks."""
    return Mesh((("pp", axes.pp), ("replica", axes.replicas), ("fsdp", axes.fsdp), ("tp", axes.tp)))


def expert_mesh(axes: TrainAxes) -> Mesh:
    """The training ranks along the experts' axes; see `TrainAxes`."""
    sizes = (axes.pp, axes.replicas, axes.ep, axes.efsdp)
    ranks = train_mesh(axes).grid()
    if axes.ep_near:
        ranks = ranks.reshape(axes.pp, axes.replicas, axes.efsdp, axes.ep)
    numbers = tuple(ranks.swapaxes(2, 3).ravel().tolist())
    return Mesh(tuple(zip(("pp", "replica", "ep", "efsdp"), sizes, strict=True)), numbers)


def context_mesh(axes: TrainAxes, cp: int) -> Mesh:
    """The training ranks with fsdp as blocks of `cp`, which share long rows."""
    outer = (("pp", axes.pp), ("replica", axes.replicas))
    return Mesh((*outer, ("block", axes.fsdp // cp), ("cp", cp), ("tp", axes.tp)))


def has_expert_axes(parameter: Parameter, axes: TrainAxes) -> bool:
    """Whether training splits the parameter on the experts' axes.

    tp never cuts an expert in training: tp ranks share the tokens of a sequence instead.
    """
    return parameter.experts > 0 and axes.ep * axes.tp > 1


def train_layout(
    parameters: Sequence[Parameter],
    axes: TrainAxes,
    stage_of_layer: Sequence[int],
    gen_tp: int = 1,
    gen_ep: int = 1,
) -> Layout:
    """The training layout of the parameters: split by tp, then by FSDP, copied over replicas.

    Experts are split by ep, then by FSDP, on separate axes (`expert_mesh`). `stage_of_layer` is
    the pipeline rank of each layer (`stages_of_layers`); the first and the last chunk also hold the
    parameters before and after the layers. `gen_tp` and `gen_ep` decide FSDP's dimension, see
    `fsdp_dim`.
    """
    rules, of_experts = {}, expert_mesh(axes)
    for parameter in parameters:
        stages, dim = _stages(parameter, stage_of_layer), fsdp_dim(parameter, axes, gen_tp, gen_ep)
        if has_expert_axes(parameter, axes):
            by_expert = Split("ep", 0), Split("efsdp", dim)
            rules[parameter.name] = Rule(stages, by_expert, mesh=of_experts)
        else:
            by_tp = () if parameter.experts else _tp(parameter)
            splits = *by_tp, Split("fsdp", dim)
            rules[parameter.name] = Rule(stages, splits, _padded(parameter, axes.tp))
    return Layout(train_mesh(axes), _shapes(parameters), rules, _precise(parameters))


def gen_layout(
    parameters: Sequence[Parameter],
    mesh: Mesh,
    num_layers: int,
    vocab_multiple: int = 1,
    ep: int = 1,
) -> Layout:
    """The generation layout of the parameters on `mesh` (`gen_mesh`): split by tp alone.

    tp cuts every expert with `ep` 1; with `ep` equal to tp it splits the experts. An engine may
    want the rows of a vocabulary, of all tp ranks together, to be a multiple of `vocab_multiple`.
    """
    stage_of_layer = stages_of_layers(num_layers, mesh.extent("pp"))
    tp = mesh.extent("tp")
    assert ep in (1, tp), f"ep={ep} with tp={tp}"
    rules = {}
    for parameter in parameters:
        if ep > 1 and parameter.experts:
            stages = _stages(parameter, stage_of_layer)
            rules[parameter.name] = Rule(stages, (Split("tp", 0),))
            continue
        in_vocab = parameter.layer < 0 and parameter.tp_dim is not None
        multiple = math.lcm(vocab_multiple, tp) if in_vocab else tp
        rules[parameter.name] = Rule(
            _stages(parameter, stage_of_layer), _tp(parameter), _padded(parameter, multiple)
        )
    return Layout(mesh, _shapes(parameters), rules, _precise(parameters))


def fsdp_dim(parameter: Parameter, axes: TrainAxes, gen_tp: int, gen_ep: int = 1) -> int:
    """The dimension that FSDP shards.

    Dimension 0, unless generation has more tensor parallelism than training. Then FSDP cuts tp's
    dimension further, so that a rank's shard is inside its generation shard. FSDP2 allows that
    only for dimensions that divide evenly. For experts see `_expert_dim`.
    """
    if parameter.experts:
        return _expert_dim(parameter, axes, gen_tp, gen_ep)
    dim = parameter.tp_dim
    if dim is None or gen_tp <= axes.tp or parameter.shape[dim] % (axes.tp * axes.fsdp):
        return 0
    return dim


def _expert_dim(parameter: Parameter, axes: TrainAxes, gen_tp: int, gen_ep: int) -> int:
    """The dimension of experts that FSDP shards.

    Dimension 0 keeps experts whole, if every rank has as many of them. Otherwise FSDP cuts each
    expert, in the first dimension that divides evenly. It also does where tp cuts experts in
    generation, in one block: only then is a rank's shard inside its generation shard.
    """
    even = [dim for dim, size in enumerate(parameter.shape) if dim and size % axes.efsdp == 0]
    cut_in_gen = gen_ep == 1 < gen_tp and axes.ep == parameter.blocks == 1
    if cut_in_gen and parameter.tp_dim in even:
        return parameter.tp_dim
    if parameter.experts // axes.ep % axes.efsdp == 0:
        return 0
    return even[0] if even else 0


def _tp(parameter: Parameter) -> tuple[Split, ...]:
    if parameter.tp_dim is None:
        return ()
    return (Split("tp", parameter.tp_dim, parameter.units, parameter.blocks),)


def _stages(parameter: Parameter, stage_of_layer: Sequence[int]) -> tuple[int, ...]:
    first, last = stage_of_layer[0], stage_of_layer[-1]
    at = {FIRST: (first,), LAST: (last,), BOTH: tuple(sorted({first, last}))}
    return at.get(parameter.layer) or (stage_of_layer[parameter.layer],)


def _padded(parameter: Parameter, multiple: int) -> tuple[int, ...] | None:
    """Tensor parallelism needs equal shards: a vocabulary that does not divide is padded."""
    dim = parameter.tp_dim
    if dim is None or parameter.units or parameter.shape[dim] % multiple == 0:
        return None
    size = -(-parameter.shape[dim] // multiple) * multiple
    return (*parameter.shape[:dim], size, *parameter.shape[dim + 1 :])


def _shapes(parameters: Sequence[Parameter]) -> Mapping[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in parameters}


def _precise(parameters: Sequence[Parameter]) -> frozenset[str]:
    return frozenset(parameter.name for parameter in parameters if parameter.precise)
