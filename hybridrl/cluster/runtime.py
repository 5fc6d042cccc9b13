"""Ray, started for a run and ended with it."""

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.cluster import signals
from hybridrl.config import ClusterConfig, ConfigError

# A rank of a tiny model on CPU, measured: torch, transformers, verl and Ray, all imported.
_RANK_BYTES = 0.6 * 2**30
_CONNECT_S = 5.0
_MARK = "HYBRIDRL_CLUSTER"  # in the environment of every process of a cluster of our own


class RayStartError(RuntimeError):
    """Ray did not come up on this machine."""


def check_ranks(config: ClusterConfig) -> None:
    """Raise `ConfigError` for more ranks than this machine can hold, before anything starts.

    A run of its own needs an accelerator per rank; without any, ranks are processes, which may
    share cores but not memory. What a joined cluster holds is asked there (`ranks_placement`).
    """
    import torch

    if config.address is not None:
        return
    if torch.cuda.is_available():
        most, why = torch.cuda.device_count(), "the GPUs of this machine"
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = max(1, int(memory // _RANK_BYTES))
        why = f"at {_RANK_BYTES / 2**30:.1f} GiB each, this machine's {memory / 2**30:.0f} GiB"
    if config.ranks > most:
        raise ConfigError("cluster.ranks", config.ranks, f"at most {most} ({why})")


@contextmanager
def ray_runtime(config: ClusterConfig, env: dict[str, str], logs: Path) -> Iterator[Any]:
    """Join the cluster at `cluster.address`, or start a local one; yields the ray module.

    A local cluster has a temporary directory of its own, and more logical CPUs than ranks, since
    Ray's CPUs are only tickets: the ranks' threads are set by `cluster.threads_per_rank`. On the
    way out its workers' logs are kept in `logs`, and all its processes are gone. Raises ConfigError
    for an address where there is none, RayStartError where the local one does not come up.
    """
    os.environ.update(env)
    # Ray reads these at import: no usage report, no metrics agent, no warning about either.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    ray._private.worker.print_to_stdstream = _note_cluster_message
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.address is not None:
        _check_address(config.address)
        _use_token()
        with _quiet_end(ray):
            try:
                ray.init(address=config.address, **options)
            except (ConnectionError, ValueError) as error:
                raise _no_cluster(config.address, error) from error
            signals.reinstall()
            yield ray
        return
    temp = Path(tempfile.mkdtemp(prefix="hrl"))  # short: Ray's sockets below it have 107 characters
    options |= {
        "num_cpus": config.ranks + 2,
        "include_dashboard": False,
        "object_store_memory": 512 * 1024**2,
        "_temp_dir": str(temp),
    }
    try:
        with _quiet_end(ray, temp):
            _start_local(ray, options)
            signals.reinstall()
            yield ray
    finally:
        _keep_logs(temp, logs)


def _start_local(ray: Any, options: dict[str, Any]) -> None:
    try:
        ray.init(address="local", **options)
    except Exception as error:  # Ray raises bare Exceptions, after 30 s on a busy machine
        reason = " ".join(str(error).split())
        raise RayStartError(f"Ray did not start on this machine: {reason}") from error


def _note_cluster_message(data: dict[str, Any], ignore_prefix: bool) -> None:
    """Ray prints every death of a worker to standard output, which holds the run's result alone.

    Its option `log_to_driver` does not reach these messages. What matters is a `WorkerError`.
    """
    logging.getLogger("ray").info("%s", " ".join(data["lines"]))


@contextmanager
def _quiet_end(ray: Any, temp: Path | None = None) -> Iterator[None]:
    """Leave Ray, also when it was interrupted half-way up; with `temp`, end its processes.

    The processes of a cluster of our own are told by their environment, which all of them inherit,
    orphans too. One may start another while it is ended, hence several rounds.
    """
    import psutil

    if temp is not None:
        os.environ[_MARK] = str(temp)
    try:
        yield
    finally:
        os.environ.pop(_MARK, None)
        ray.shutdown()
        for _ in range(5 if temp is not None else 0):
            ours = _marked(str(temp))
            for process in ours:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(ours, timeout=5)
            if not ours:
                break


def _marked(value: str) -> list[Any]:
    import psutil

    found = []
    for process in psutil.process_iter():
        # A zombie has no environment: it has ended, and its parent may never ask for it.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _check_address(address: str) -> None:
    """Ray tries for minutes to reach an address where nobody listens."""
    host, sign, port = address.rpartition(":")
    if not sign or not port.isdigit() or "/" in host:
        if address == "auto":
            return
        raise ConfigError("cluster.address", address, "host:port of a running Ray cluster, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _use_token() -> None:
    """Show the token of `~/.ray` where there is one, as `ray start` does; `ray.init` does not."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    with contextlib.suppress(ImportError):  # since Ray 2.60
        from ray._private.authentication import authentication_token_setup as setup

        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _no_cluster(address: str, error: Exception) -> ConfigError:
    return ConfigError("cluster.address", address, f"a running Ray cluster ({error})")


def _keep_logs(temp: Path, logs: Path) -> None:
    """Keep what the workers printed, and delete Ray's temporary directory."""
    with contextlib.suppress(OSError):  # a full disk has been reported, or will be
        logs.mkdir(parents=True, exist_ok=True)
        for file in temp.glob("session_2*/logs/worker-*"):
            if file.suffix in (".out", ".err") and file.stat().st_size:
                shutil.copy(file, logs)
    shutil.rmtree(temp, ignore_errors=True)


def ranks_placement(ray: Any, config: ClusterConfig, use_gpu: bool) -> Any:
    """A placement group with one bundle per rank, or an error that says what there is."""
    kind = "GPU" if use_gpu else "CPU"
    available = ray.cluster_resources().get(kind, 0)
    if available < config.ranks:
        raise ConfigError("cluster.ranks", config.ranks, f"at most the pool's {available:g} {kind}")
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if use_gpu else {})
    group = ray.util.placement_group([dict(bundle) for _ in range(config.ranks)], strategy="PACK")
    try:
        ray.get(group.ready(), timeout=config.start_timeout_s)
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources().get(kind, 0)
        raise ConfigError(
            "cluster.ranks",
            config.ranks,
            f"{kind}s that are free within cluster.start_timeout_s={config.start_timeout_s:g}"
            f" (free now: {free:g} of {available:g})",
        ) from None
    return group
