"""A rank's shares of wide instances (`layout.wide`), and how parked samples are cut for them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from hybridrl.config import RolloutConfig
from hybridrl.engines.rollout.interface import KV, JoinedEngine, RolloutEngine, join_engine
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import Parameter
from hybridrl.layout.wide import wide_heads, wide_instances, wide_mesh
from hybridrl.models.parallel import kv_heads_of_rank, wide_ep, wide_widths
from hybridrl.models.shard import GenParallel


@dataclass(slots=True)
class WideShare:
    """This rank's place in a wide instance, whose ranks are `peers`, by instance rank.

    The engine is made when the instance first decodes. It is joined as long as it has samples.
    """

    rollout: RolloutConfig
    width: int
    parallel: GenParallel
    peers: list[int]
    engine: JoinedEngine | None = None

    def join(self, own: RolloutEngine, parameters: Iterable[Parameter]) -> JoinedEngine:
        """The engine, on the weights of the rank's `own`."""
        if self.engine is None:
            by_name = {parameter.name: parameter for parameter in parameters}
            self.engine = join_engine(self.rollout, own, by_name, self.parallel)
        if not self.engine.joined:
            stats = own.stats()
            unfinished = stats.running + stats.waiting + stats.held
            assert not unfinished, "an instance joins with unfinished samples"
            self.engine.join()
        return self.engine


def wide_shares(
    model_config: PretrainedConfig, rollout: RolloutConfig, gen: Mesh, device: torch.device
) -> dict[int, WideShare]:
    """This rank's shares, by the number of the wide instance. Collective: it makes groups."""
    num_instances, layout = gen.extent("instance"), rollout.layout
    widths = wide_widths(model_config, rollout, num_instances)
    shares = {}
    for number, members in wide_instances(num_instances, widths).items():
        mesh, width = wide_mesh(gen, members), len(members)
        if dist.get_rank() in mesh.ranks:
            ep = wide_ep(model_config, layout.tp, width, layout.ep)
            parallel = GenParallel.make(mesh, device.type, ep)
            shares[number] = WideShare(rollout, width, parallel, list(mesh.ranks))
    return shares


def cut_samples(
    samples: dict[Any, Any], parallel: GenParallel, model_config: PretrainedConfig, width: int
) -> dict[int, dict[Any, Any]]:
    """Parked samples for each rank that continues them on an instance `width` times as wide.

    The answer is by instance rank there. A rank gets the keys and values of its heads alone;
    `samples` are `ParkedSample`s by id. Without keys and values all ranks get the same.
    """
    first = (parallel.pp_rank * parallel.tp + parallel.tp_rank) * width
    if all(sample.request.kv is None for sample in samples.values()):
        return dict.fromkeys(range(first, first + width), samples)
    num_wide = kv_heads_of_rank(model_config, parallel.tp * width)
    cut = {}
    for member in range(width):
        share = {}
        for id, sample in samples.items():
            request = sample.request
            if request.kv is not None:
                heads = wide_heads(request.kv.blocks.shape[2], num_wide, width, member)
                request = replace(request, kv=KV(request.kv.blocks[:, :, heads].contiguous()))
            share[id] = replace(sample, request=request)
        cut[first + member] = share
    return cut
