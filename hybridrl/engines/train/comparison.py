"""Distance of the trained policy from others that made its samples, over all ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.algorithms import corrections


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
