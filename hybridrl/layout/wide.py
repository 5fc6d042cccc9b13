"""Wide instances: several generation instances that decode the last samples as one.

With few samples left a decode step reads weights, and more tensor parallelism reads fewer of them
on each rank. So k instances of tp t form one of tp k t. Pipeline stages stay as they are.

Invariants, which tests assert:
- Wide tp rank i k + m is tp rank i of the m-th member. So a rank's wide boxes lie inside the boxes
  that it holds, and widening receives no weights (`wide_slices`).
- Likewise a rank's wide heads of keys and values are among those of tp rank i of every member
  (`wide_heads`). So a sample's cache comes from one rank of its instance.
- A wide instance has consecutive members, and of one width no instance is in two.
"""

from collections.abc import Sequence

from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import Parameter


def wide_instances(num_instances: int, widths: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The members of every wide instance, by its number; numbers follow those of the instances.

    Example: three instances and widths 2 and 3 give {3: (0, 1), 4: (0, 1, 2)}. Instance 2 is in no
    pair.
    """
    members = [
        tuple(range(first, first + width))
        for width in sorted(widths)
        for first in range(0, num_instances - width + 1, width)
    ]
    return dict(enumerate(members, num_instances))


def wide_mesh(gen: Mesh, members: Sequence[int]) -> Mesh:
    """The mesh of the one wide instance of `members`, out of the generation mesh (`gen_mesh`)."""
    _, pp, tp = (size for _, size in gen.axes)
    ranks = gen.grid()[list(members)].transpose(1, 2, 0).ravel().tolist()
    axes = (("instance", 1), ("pp", pp), ("tp", tp * len(members)))
    return Mesh(axes, tuple(ranks))


def wide_slices(
    parameter: Parameter, shape: Sequence[int], tp: int, width: int, member: int
) -> tuple[slice, ...]:
    """The wide rank's part of a rank's tensor of `shape`, on member number `member` of `width`.

    `tp` is that of one instance. Rows of a vocabulary are cut in chunks of ceil(rows / width), of
    which the last may be smaller. Experts are cut whole. A replicated tensor stays whole. Raises
    AssertionError for a tensor of several blocks that tp cuts: its part is no view.
    """
    slices = [slice(0, size) for size in shape]
    if parameter.experts:
        slices[0] = _chunk(shape[0], member, width)
    elif parameter.tp_dim is not None:
        assert parameter.blocks == 1, f"{parameter.name} has {parameter.blocks} blocks"
        dim, units = parameter.tp_dim, parameter.units
        if units and (own := max(1, units // tp)) < width:  # ranks share heads
            slices[dim] = _chunk(shape[dim], member * own // width, own)
        else:
            slices[dim] = _chunk(shape[dim], member, width)
    return tuple(slices)


def wide_heads(heads: int, num_wide: int, width: int, member: int) -> slice:
    """Which of a rank's `heads` of keys and values the wide rank has, which has `num_wide`.

    `member` is the number of the wide rank's own instance; the heads may be of another's rank.
    """
    start = member * heads // width if num_wide < heads else 0
    return slice(start, start + num_wide)


def _chunk(size: int, index: int, count: int) -> slice:
    each = -(-size // count)
    return slice(min(index * each, size), min((index + 1) * each, size))
