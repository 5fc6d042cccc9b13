"""Ray, started for a run and ended with it."""

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.compat.verl import Bundle
from hybridrl.config import ClusterConfig, ClusterKind, ConfigError, Device, SlurmClusterConfig
from hybridrl.runtime.errors import RayStartError
from hybridrl.runtime.ray_cleanup import MARK, keep_logs, kill_marked, no_process_stays
from hybridrl.runtime.ray_node import RANK
from hybridrl.runtime.ray_on_slurm import ray_on_slurm
from hybridrl.system import signals
from hybridrl.system.node_info import object_store_bytes, usable_memory
from hybridrl.system.owned_folder import owned, remove_abandoned

__all__ = ["RayStartError", "check_ranks", "ranks_placement", "ray_runtime"]

# A rank of a tiny model on CPU, measured: torch, transformers, verl and Ray, all imported.
RANK_BYTES = int(0.6 * 2**30)
_CONNECT_S = 5.0
_LOCAL_STARTS = 2

logger = logging.getLogger(__name__)


def check_ranks(config: ClusterConfig) -> None:
    """Raise `ConfigError` for more ranks than this machine's memory holds, before they start.

    Ranks on CPUs may share cores, but not memory. `ranks_placement` checks a joined cluster, Slurm
    its own jobs, and `resolve_device` has counted GPUs.
    """
    is_job = config.kind is ClusterKind.slurm
    if config.address is not None or is_job or not config.holds_models:
        return
    memory = usable_memory()
    most = max(1, int(memory // RANK_BYTES))
    if config.ranks > most:
        why = f"at {RANK_BYTES / 2**30:.1f} GiB each, this machine's {memory / 2**30:.0f} GiB"
        raise ConfigError("cluster.ranks", config.ranks, f"at most {most} ({why})")


@contextmanager
def ray_runtime(config: ClusterConfig, env: dict[str, str], logs: Path) -> Iterator[Any]:
    """Join the cluster at `cluster.address`, or start one, here or over the nodes of a Slurm job.

    Yields the ray module.

    A local cluster has its own temporary directory, and more logical CPUs than ranks: Ray's CPUs
    are only tickets, and `cluster.threads_per_rank` sets the ranks' threads. On exit its workers'
    logs are in `logs`, and all its processes have ended. Raises ConfigError for an address without
    a cluster, RayStartError if a cluster does not start.
    """
    os.environ.update(env)
    # Ray reads these at import: no usage report, no metrics agent, no warning about either.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    ray._private.worker.print_to_stdstream = _note_cluster_message
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if isinstance(config, SlurmClusterConfig):
        with ray_on_slurm(config, logs) as started, _ended(ray):
            _refresh_token()
            with _signals_kept(ray):
                ray.init(address=started.address, **options)
            started.wait_for_nodes(ray)
            yield ray
        return
    if config.address is not None:
        address = _cluster_of_job() if config.kind is ClusterKind.ray else config.address
        _check_address(address)
        with _ended(ray):
            try:
                _use_token(ray, address)
                with _signals_kept(ray):
                    ray.init(address=address, **options)
            except (ConnectionError, ValueError, ray.exceptions.AuthenticationError) as error:
                raise _no_cluster(address, error) from error
            yield ray
        return
    remove_abandoned(Path(tempfile.gettempdir()), "hrl", lambda left: kill_marked(str(left)))
    temp = Path(tempfile.mkdtemp(prefix="hrl"))  # short: Ray's sockets below it have 107 characters
    options |= {
        "num_cpus": config.ranks + 2,
        "include_dashboard": False,
        "object_store_memory": object_store_bytes(config.object_store_mb),
        "_temp_dir": str(temp),
        # Idle workers ready beforehand; the ranks, whose environment differs, are others.
        "_system_config": {"prestart_worker_first_driver": False},
    }
    os.environ[MARK] = str(temp)
    try:
        with owned(temp), no_process_stays(str(temp)), _ended(ray):
            _start_local(ray, options, str(temp))
            yield ray
    finally:
        os.environ.pop(MARK, None)
        keep_logs(temp, logs)


def _start_local(ray: Any, options: dict[str, Any], mark: str) -> None:
    """Start Ray here, twice if need be: on a busy machine its own limit of 30 s may be too short.

    What a failed start has left behind, the processes with `MARK=mark`, ends first.
    """
    for start in range(1, _LOCAL_STARTS + 1):
        _forget_token()
        try:
            with _signals_kept(ray):
                ray.init(address="local", **options)
            return
        except Exception as error:  # Ray raises bare Exceptions
            reason = " ".join(str(error).split())
            if start == _LOCAL_STARTS:
                raise RayStartError(f"Ray did not start on this machine: {reason}") from error
            logger.warning("Ray did not start, which is tried again: %s", reason)
        ray.shutdown()
        kill_marked(mark)


@contextmanager
def _signals_kept(ray: Any) -> Iterator[None]:
    """Around Ray's start: keep our SIGTERM handler, since Ray's handlers exit without a message.

    Ray's Python handlers are not set; that of its core (it aborts, with a stack) is replaced
    afterwards.
    """
    utils = ray._private.utils
    theirs = utils.set_sigterm_handler
    if signals.installed():
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs
        if signals.installed():
            signals.reinstall()


def _note_cluster_message(data: dict[str, Any], ignore_prefix: bool) -> None:
    """Log Ray's messages of dead workers, which it prints to standard output, kept for the result.

    Its option `log_to_driver` does not affect these messages. Important ones raise `WorkerError`.
    """
    logging.getLogger("ray").info("%s", " ".join(data["lines"]))


@contextmanager
def _ended(ray: Any) -> Iterator[None]:
    """Shut Ray down on exit, also after an interrupted start."""
    try:
        yield
    finally:
        ray.shutdown()


def in_ray_job() -> bool:
    """Whether a Ray cluster runs this process as a job."""
    return "RAY_ADDRESS" in os.environ


def _cluster_of_job() -> str:
    """The address of the Ray cluster that runs this process as a job."""
    if not in_ray_job():
        raise ConfigError("cluster", "ray", "a job of a Ray cluster; hybridrl submit makes one")
    return os.environ["RAY_ADDRESS"]


def _check_address(address: str) -> None:
    """Raise ConfigError for an address without a listener, which Ray would retry for minutes."""
    host, sign, port = address.rpartition(":")
    if not sign or not port.isdigit() or "/" in host:
        if address == "auto":
            return
        raise ConfigError("cluster.address", address, "host:port of a running Ray cluster, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _use_token(ray: Any, address: str) -> None:
    """Show Ray's token (`~/.ray/auth_token`, say) to a cluster that asks for one, and to no other.

    A cluster wants a token if there was one when it started, and does not say so. A cluster that
    wants none accepts a token, but then every actor dies at its start.
    """
    with contextlib.suppress(ImportError):  # since Ray 2.60
        from ray._private import services
        from ray._private.authentication import authentication_token_setup as setup

        logging.getLogger("ray").setLevel(logging.ERROR)
        os.environ.pop(setup.AUTH_MODE_ENV_VAR, None)
        ray._raylet.Config.initialize("")
        _forget_token()
        gcs = services.canonicalize_bootstrap_address_or_die(address)
        with _no_stderr():  # where Ray prints a refusal
            try:
                ray._raylet.GcsClient(address=gcs)
            except setup.AuthenticationError:
                show_token()
                ray._raylet.GcsClient(address=gcs)


@contextmanager
def _no_stderr() -> Iterator[None]:
    kept = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def show_token() -> None:
    """Show Ray's token from now on; raises AuthenticationError if there is none."""
    with contextlib.suppress(ImportError):
        from ray._private.authentication import authentication_token_setup as setup

        _refresh_token()
        setup.ensure_token_if_auth_enabled(create_token_if_missing=False)


def _refresh_token() -> None:
    """Make Ray read its token from the environment again: it may have been imported before."""
    with contextlib.suppress(ImportError):
        from ray._private.authentication import authentication_token_setup as setup

        setup._enable_token_auth()
    _forget_token()


def _forget_token() -> None:
    """Make Ray read its token again, or write one: an earlier run of this process cached its own.

    A cluster reads the token from a file. Where that file is gone, it would not start.
    """
    with contextlib.suppress(ImportError):
        from ray._private.authentication import authentication_token_setup as setup

        setup.AuthenticationTokenLoader.instance().reset_cache()


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError("cluster.address", address, f"a running Ray cluster ({error})")


def ranks_placement(ray: Any, config: ClusterConfig) -> list[Bundle]:
    """A bundle for each rank; those of a node are neighbors, nodes are in their addresses' order.

    ConfigError names the available resources where they do not suffice. A Slurm job has a placement
    group for each node. Elsewhere Ray spreads one over as few nodes as it can, in no order.
    RayStartError says that Ray's node is gone, or that of a bundle.
    """
    if not any(node["Alive"] for node in ray.nodes()):
        raise RayStartError("Ray's node is gone")
    use_gpu = config.device is Device.cuda
    resource = "GPU" if use_gpu else "CPU"
    available = ray.cluster_resources().get(resource, 0)
    if available < config.ranks:
        raise ConfigError(
            "cluster.ranks", config.ranks, f"at most the pool's {available:g} {resource}"
        )
    bundle, strategy = {"CPU": 1.0} | ({"GPU": 1.0} if use_gpu else {}), "PACK"
    if config.kind is ClusterKind.slurm:
        bundle, strategy = bundle | {RANK: 1.0}, "STRICT_PACK"
    groups = [
        ray.util.placement_group([dict(bundle)] * config.ranks_per_node, strategy=strategy)
        for _ in range(config.nodes)
    ]
    try:
        ray.get([group.ready() for group in groups], timeout=config.start_timeout_s)
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources().get(resource, 0)
        raise ConfigError(
            "cluster.ranks",
            config.ranks,
            f"{resource}s that are free within cluster.start_timeout_s={config.start_timeout_s:g}"
            f" (free now: {free:g} of {available:g})",
        ) from None
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed = [
        (node, index, group)
        for group in groups
        for index, node in ray.util.placement_group_table(group)["bundles_to_node_id"].items()
    ]
    if not {node for node, _, _ in placed} <= addresses.keys():
        raise RayStartError("the node of a placement group is gone")
    bundles = [Bundle(addresses[node], node, index, group) for node, index, group in placed]
    return sorted(bundles, key=lambda bundle: (bundle.address, bundle.node, bundle.index))
