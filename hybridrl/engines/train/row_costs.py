"""Costs of a row's passes over the chunks of a model, in operations: what pipeline plans read."""

from collections.abc import Sequence

from hybridrl.models.flops import ForwardFlops
from hybridrl.pipelines.problem import PassCosts, PassKind, PipelinedModel

HALVES = (PassKind.backward_input, PassKind.backward_weights)


def row_costs(
    flops: ForwardFlops,
    lengths: Sequence[int],
    scored: int,
    chunk_layers: Sequence[int],
    hidden_size: int,
    halves: bool = False,
    before: Sequence[int] = (),
) -> list[PassCosts]:
    """A row's costs by chunk, of `chunk_layers` layers each; the last chunk has the head.

    `lengths` are the tokens of the row's sequences. Each attends to itself and to the tokens
    `before` it, which are computed elsewhere in the row; without them to itself alone. Backward
    takes twice as long as forward; of one in `halves` each takes as long. Activations are counted
    in hidden states by layer.
    """
    costs = []
    earlier, tokens = before or [0] * len(lengths), sum(lengths)
    of_layers = sum(
        flops(more + own, 0) - flops(more, 0) for own, more in zip(lengths, earlier, strict=True)
    )
    for number, layers in enumerate(chunk_layers):
        forward = of_layers * layers / sum(chunk_layers)
        if number == len(chunk_layers) - 1:
            forward += flops.per_scored * scored
        costs.append(
            PassCosts(
                forward_s=forward,
                backward_s=forward if halves else 2 * forward,
                weights_s=forward if halves else 0.0,
                kept_bytes=tokens * layers * hidden_size,
            )
        )
    return costs


def kept_under_1f1b(models: Sequence[PipelinedModel], owners: Sequence[object]) -> float:
    """The most that a rank keeps of the models, each under 1F1B, on the rank where that is most.

    The `owners` are by pipeline; those of one owner are on different ranks.
    """
    most: dict[object, float] = {}
    for model, owner in zip(models, owners, strict=True):
        on_rank: dict[int, list[int]] = {}
        for chunk, rank in enumerate(model.ranks):
            on_rank.setdefault(rank, []).append(chunk)
        rows = [
            max(sum(costs[c].kept_bytes for c in chunks) for chunks in on_rank.values())
            for costs in model.costs
        ]
        own = sum(sorted(rows, reverse=True)[: len(on_rank)])
        most[owner] = max(most.get(owner, 0.0), own)
    return sum(most.values()) * (1 + 1e-9)  # sums in another order round otherwise
