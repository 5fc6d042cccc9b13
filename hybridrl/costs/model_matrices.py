"""The matrices of a model, for the plan of its weight switch."""

from functools import cache

from hybridrl.costs.model_shape import ModelShape
from hybridrl.layout.parameters import BOTH, FIRST, LAST, Parameter


@cache
def matrices(shape: ModelShape, *tps: int) -> tuple[Parameter, ...]:
    """Return the matrices of the model as layouts see them, without norms.

    Heads are kept whole where the tensor-parallel sizes `tps` and their number divide each other;
    other models do not cut attention by heads.
    """
    hidden, features = shape.hidden, shape.features
    queries, keys = (
        0 if any(tp > number and tp % number for tp in tps) else number
        for number in (shape.heads, shape.kv_heads)
    )
    ffn = shape.ffn * max(1, shape.experts)
    sizes: list[tuple[str, tuple[int, ...], int, int]] = [
        ("q", (shape.heads * features, hidden), 0, queries),
        ("k", (shape.kv_heads * features, hidden), 0, keys),
        ("v", (shape.kv_heads * features, hidden), 0, keys),
        ("o", (hidden, shape.heads * features), 1, queries),
        ("gate", (ffn, hidden), 0, 0),
        ("up", (ffn, hidden), 0, 0),
        ("down", (hidden, ffn), 1, 0),
    ]
    parameters = [
        Parameter(f"layers.{layer}.{name}", size, layer, dim, units)
        for layer in range(shape.layers)
        for name, size, dim, units in sizes
    ]
    ends = (shape.vocabulary, hidden)
    parameters.append(Parameter("embedding", ends, BOTH if shape.tied else FIRST, 0))
    if not shape.tied:
        parameters.append(Parameter("head", ends, LAST, 0))
    return tuple(parameters)
