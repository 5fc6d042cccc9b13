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
    (None: replicated over tp), in full `units` (heads) if set, within each of `blocks`.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    tp_dim: int | None = None
    units: int = 0
    blocks: int = 1


FIRST, LAST, BOTH = -1, -2, -3


def train_mesh(axes: TrainAxes) -> Mesh:
    """The mesh of training ranks."""
    return Mesh((("pp", axes.pp), ("replica", axes.replicas), ("fsdp", axes.fsdp), ("tp", axes.tp)))


def train_layout(
    parameters: Sequence[Parameter],
    axes: TrainAxes,
    stage_of_layer: Sequence[int],
    gen_tp: int = 1,
) -> Layout:
    """The training layout of the parameters: split by tp, then by FSDP, copied over replicas.

    `stage_of_layer` is the pipeline rank of each layer (`stages_of_layers`); the first and the last
    chunk also hold the parameters before and after the layers. `gen_tp` decides FSDP's dimension,
    see `fsdp_dim`.
    """
    rules = {}
    for parameter in parameters:
        fsdp = Split("fsdp", fsdp_dim(parameter, axes, gen_tp))
        splits = (*_tp(parameter), fsdp)
        rules[parameter.name] = Rule(
            _stages(parameter, stage_of_layer), splits, _padded(parameter, axes.tp)
        )
    return Layout(train_mesh(axes), _shapes(parameters), rules)


def gen_layout(
    parameters: Sequence[Parameter], mesh: Mesh, num_layers: int, vocab_multiple: int = 1
) -> Layout:
    """The generation layout of the parameters on `mesh` (`gen_mesh`): split by tp alone.

    An engine may want the rows of a vocabulary, of all tp ranks together, to be a multiple of
    `vocab_multiple`.
    """
    stage_of_layer = stages_of_layers(num_layers, mesh.extent("pp"))
    tp = mesh.extent("tp")
    rules = {}
    for parameter in parameters:
        in_vocab = parameter.layer < 0 and parameter.tp_dim is not None
        multiple = math.lcm(vocab_multiple, tp) if in_vocab else tp
        rules[parameter.name] = Rule(
            _stages(parameter, stage_of_layer), _tp(parameter), _padded(parameter, multiple)
        )
    return Layout(mesh, _shapes(parameters), rules)


def fsdp_dim(parameter: Parameter, axes: TrainAxes, gen_tp: int) -> int:
    """The dimension that FSDP shards.

    Dimension 0, unless generation has more tensor parallelism than training. Then FSDP cuts tp's
    dimension further, so that a rank's shard is inside its generation shard. FSDP2 allows that
    only for dimensions that divide evenly.
    """
    dim = parameter.tp_dim
    if dim is None or gen_tp <= axes.tp or parameter.shape[dim] % (axes.tp * axes.fsdp):
        return 0
    return dim


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
