"""Which pool has which kind of rank."""

from hybridrl.config import Config
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.pool import PoolWorker
from hybridrl.workers.rank import RankWorker
from hybridrl.workers.value_rank import ValueWorker

POOLS: dict[str, type[PoolWorker]] = {"actor": RankWorker, "critic": ValueWorker}


def make_worker(
    rank: int, world_size: int, config: Config, model_path: str, data_plane: DataPlane
) -> PoolWorker:
    """The worker of a run's `rank`; in its pool it has a number of its own."""
    pools = config.cluster.pool_ranks
    assert world_size == sum(map(len, pools.values()))
    name = next(name for name, ranks in pools.items() if rank in ranks)
    return POOLS[name](pools[name].index(rank), len(pools[name]), config, model_path, data_plane)
