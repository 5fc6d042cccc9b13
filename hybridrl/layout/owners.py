"""Layouts in which ranks own whole matrices: what a computation on whole matrices needs.

A plan from a training layout to one of these gathers each matrix on its owner, and the plan back
returns shards (veScale-FSDP's ragged shards). Pure data. Invariants, asserted by the tests:
1. every element has exactly one owner, on a pipeline stage that holds it in training;
2. a matrix is whole on one rank, also each of a parameter of several (experts, dimension 0);
3. owners are balanced: no rank has more than the mean of its stage and one largest matrix.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from hybridrl.layout.layout import Layout, Rule, Split
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import Parameter


def owner_layouts(layout: Layout, names: Iterable[str]) -> list[Layout]:
    """The owners of the matrices `names` of a training layout, whose slowest axis is pp.

    At most two layouts: of single matrices, each on one rank, and of batches of matrices, whose
    first dimension the ranks of the stage share.

    Example: on fsdp 2, matrices of 6, 5 and 1 elements go to the ranks 0, 1 and 1. A batch of four
    matrices has the first two on rank 0.
    """
    assert layout.mesh.names[0] == "pp", layout.mesh.names
    singles: list[str] = []
    batches: list[str] = []
    for name in names:
        (batches if len(layout.shapes[name]) > 2 else singles).append(name)
    layouts = [_on_single_ranks(layout, singles), _shared(layout, batches)]
    return [owners for owners in layouts if owners.rules]


def _on_single_ranks(layout: Layout, names: list[str]) -> Layout:
    """The largest first, each on the rank of its stage that has least."""
    grid = layout.mesh.grid().reshape(layout.mesh.extent("pp"), -1)
    load = dict.fromkeys(layout.mesh.ranks, 0)
    owners: dict[str, int] = {}
    for name in sorted(names, key=lambda name: (-prod(layout.shapes[name]), name)):
        ranks = grid[layout.rules[name].stages[0]].tolist()
        owner = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner] += prod(layout.shapes[name])
        owners[name] = owner
    return on_owners(layout, {name: owners[name] for name in names})


def on_owners(layout: Layout, owners: Mapping[str, int]) -> Layout:
    """The parameters `owners`, each whole on the rank that it is mapped to."""
    # Each rank is a separate stage: a rule then names its owner.
    mesh = Mesh((("pp", layout.mesh.size),))
    return _of(layout, mesh, {name: Rule(stages=(owner,)) for name, owner in owners.items()})


def _shared(layout: Layout, names: list[str]) -> Layout:
    pp = layout.mesh.extent("pp")
    mesh = Mesh((("pp", pp), ("owner", layout.mesh.size // pp)), layout.mesh.ranks)
    by_owner = (Split("owner", 0),)  # on this mesh, also experts, which have another in training
    rules = {n: replace(layout.rules[n], splits=by_owner, mesh=None) for n in names}
    return _of(layout, mesh, rules)


def _of(layout: Layout, mesh: Mesh, rules: dict[str, Rule]) -> Layout:
    return replace(layout.only(rules), mesh=mesh, rules=rules)


def matrices_of(parameters: Iterable[Parameter]) -> list[str]:
    """The names of the matrices of decoder layers, and of their batches of matrices.

    The biases of a layer's experts are a batch of vectors (gpt-oss), and not among them. Nor are
    the filters of a convolution by channel, and rates of decay by channel and state.
    """
    return [p.name for p in parameters if p.layer >= 0 and _is_matrix(p)]


def _is_matrix(parameter: Parameter) -> bool:
    shape = parameter.shape[parameter.experts > 0 :]
    return len(shape) > 1 and min(shape[-2:]) > 1 and not parameter.name.endswith(".A_log")


def restricted(layout: Layout, names: Iterable[str]) -> Layout:
    """The layout of these parameters alone."""
    return layout.only(names)
