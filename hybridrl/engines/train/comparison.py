"""Distance of the trained policy from others that made its samples, over all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.algorithms import corrections
from hybridrl.engines.train.packed import PackedBatch


def compare_row(log_probs: torch.Tensor, others: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Figures [9] of the distance of a row's log-probabilities [scored] from `others`.

    The first of the ranks that share a row counts it, the others count nothing.
    """
    group = batch.packing.group
    if group is not None and group.rank():
        return corrections.compare(log_probs[:0], others[:0], ())
    return corrections.compare(log_probs, others, batch.counts)


def distance_metrics(
    micro_batches: list[torch.Tensor], prefixes: Sequence[str], device: torch.device
) -> dict[str, float]:
    """Metrics of the log-probabilities that all ranks have compared, [prefixes, 9] each."""
    own_figures = torch.stack(
        [corrections.combine(parts) for parts in torch.stack(micro_batches).unbind(1)]
    ).to(device)
    gathered = [torch.empty_like(own_figures) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own_figures)
    # The ranks of a replica count alike, which changes none of the ratios.
    joined = [corrections.combine(parts) for parts in torch.stack(gathered).unbind(1)]
    metrics: dict[str, float] = {}
    for prefix, figures in zip(prefixes, joined, strict=True):
        metrics |= corrections.describe(figures, prefix)
    if of_all := corrections.describe(corrections.combine(torch.stack(joined)), "all"):
        metrics["effective_share"] = of_all["all/ess_sequence"]
    return metrics
