"""Which pool has which kind of rank."""

from hybridrl.config import Config
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.base_worker import BaseWorker
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.data_plane import DataPlane

POOLS: dict[str, type[BaseWorker]] = {"actor": ActorWorker, "critic": CriticWorker}


def make_worker(
    rank: int, world_size: int, config: Config, model_path: str, data_plane: DataPlane
) -> BaseWorker:
    """The worker of a run's `rank`; in its pool it has a number of its own."""
    pools = config.cluster.pool_ranks
    assert world_size == sum(map(len, pools.values()))
    name = next(name for name, ranks in pools.items() if rank in ranks)
    return POOLS[name](pools[name].index(rank), len(pools[name]), config, model_path, data_plane)
