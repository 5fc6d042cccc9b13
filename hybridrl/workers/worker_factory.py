"""The class of the ranks of each pool."""

from pathlib import Path

from hybridrl.config import ClusterKind, Config
from hybridrl.telemetry.log import rank_log
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.base_worker import BaseWorker
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.data_plane import DataPlane

POOLS: dict[str, type[BaseWorker]] = {"actor": ActorWorker, "critic": CriticWorker}


def make_worker(
    rank: int, world_size: int, config: Config, model_path: str, data_plane: DataPlane
) -> BaseWorker:
    """The worker of a run's `rank`; in its pool it has another number. It begins its log."""
    # Under Ray a rank's standard error is a file; without it is the terminal.
    plain = config.cluster.kind is ClusterKind.processes
    file = Path(config.run.dir) / "logs" / f"rank-{rank}.log" if plain else None
    rank_log(rank, config.log.level, file)
    pools = config.cluster.pool_ranks
    assert world_size == sum(map(len, pools.values()))
    name = next(name for name, ranks in pools.items() if rank in ranks)
    return POOLS[name](pools[name].index(rank), len(pools[name]), config, model_path, data_plane)
