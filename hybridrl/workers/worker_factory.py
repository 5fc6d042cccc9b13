"""The worker of each rank, by its pool."""

from pathlib import Path

from hybridrl.config import ClusterKind, Config, Device
from hybridrl.system import activity
from hybridrl.system.rendezvous import NCCL_TRACE, record_collectives
from hybridrl.telemetry.log import rank_log
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.base_worker import BaseWorker
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.rollout_worker import RolloutWorker
from hybridrl.workers.serving import ServingWorker
from hybridrl.workers.trainer_worker import TrainerWorker


def make_worker(
    number: int,
    world_size: int,
    config: Config,
    model_path: str,
    data_plane: DataPlane,
    serves: bool = False,
) -> BaseWorker:
    """The worker of this `number`: of a rank of the run, by `cluster.rank_order`.

    In its pool the rank has another number. It begins its logs. With `serves` its models are those
    of clients.
    """
    rank = config.cluster.worker_of_rank.index(number)
    # Under Ray a rank's standard error is a file; without it is the terminal.
    plain, logs = config.cluster.kind is ClusterKind.processes, Path(config.run.dir) / "logs"
    rank_log(rank, config.log.level, logs / f"rank-{rank}.log" if plain else None)
    activity.record_to(activity.file_of(Path(config.run.dir), rank))
    pools = config.cluster.pool_ranks
    assert world_size == sum(map(len, pools.values()))
    name = next(name for name, ranks in pools.items() if rank in ranks)
    rank_in_pool = pools[name].index(rank)
    if config.cluster.device is Device.cuda:
        record_collectives(logs / f"{NCCL_TRACE}{name}-", rank_in_pool)
    place = rank_in_pool, len(pools[name]), config, model_path, data_plane
    if serves:
        return ServingWorker(*place)
    if name == "actor":
        generates = config.cluster.home == name
        return ActorWorker(*place) if generates else TrainerWorker(*place)
    return RolloutWorker(*place) if name == "rollout" else CriticWorker(*place, pool=name)


class ClusterWorker(ServingWorker, TrainerWorker):  # type: ignore[misc]  # nobody calls them
    """The marks of all workers' methods, for launchers; it has no instance."""
