"""Ranks on GPUs of several nodes: by Ray's logical GPUs, which need no hardware."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

PROGRAM = """
    import json, os, sys
    from pathlib import Path
    import ray
    from ray.cluster_utils import Cluster
    from hybridrl.compat import verl
    from hybridrl.config.compose import check, register
    from hybridrl.doctor.command import _probes
    from hybridrl.runtime.devices import resolve_device
    from hybridrl.runtime.launchers import launched
    from hybridrl.runtime.ray_cluster import ray_runtime
    from hybridrl.workers.dispatch import Dispatch, dispatch

    class Worker:
        def __init__(self, rank, size):
            self.rank = rank

        @dispatch(Dispatch.SAME)
        def describe(self):
            names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "RANK", "MASTER_ADDR")
            said = {name: os.environ.get(name) for name in names}
            context = ray.get_runtime_context()
            return {**said, "rank": self.rank, "node": context.get_node_id()}

    cluster = Cluster()
    cluster.add_node(num_cpus=1, num_gpus=0, include_dashboard=False)  # the driver's
    for visible in json.loads(sys.argv[1]):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        cluster.add_node(num_cpus=4, num_gpus=2, env_vars=env)
    try:
        register()
        config = check([f"cluster.address={cluster.address}", *sys.argv[2:]])
        resolve_device(config)
        with launched(config.cluster, Path()) as launcher:
            group = launcher.start(Worker, Worker)
            ranks = [launcher.get(answer) for answer in group.describe()]
        with ray_runtime(config.cluster, verl.environment(config.cluster.device), Path()) as ray:
            said = [
                probe.__ray_call__.remote(lambda probe: os.environ["LOCAL_RANK"])
                for probe in _probes(ray, config.cluster)
            ]
            print(json.dumps([ranks, ray.get(said)]))
    finally:
        cluster.shutdown()
"""


@pytest.fixture
def on_nodes() -> Callable[..., tuple[list[dict[str, Any]], list[str]]]:
    """Ranks of a run on a cluster with nodes of 2 logical GPUs, and the doctor's local ranks."""

    def run(visible: list[str | None], *overrides: str) -> tuple[list[dict[str, Any]], list[str]]:
        env = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        env.pop("CUDA_VISIBLE_DEVICES", None)
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(visible), *overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        ranks, probes = json.loads(done.stdout.splitlines()[-1])
        return ranks, probes

    return run


@pytest.mark.gpu_dry
def test_ranks_of_a_node_are_neighbors_and_see_all_its_gpus(
    on_nodes: Callable[..., tuple[list[dict[str, Any]], list[str]]],
) -> None:
    """A rank per GPU of the cluster, though the driver's node has none. So is a probe of doctor."""
    ranks, probes = on_nodes(["6,7", "GPU-a,GPU-b"])
    assert [rank["rank"] for rank in ranks] == list(range(4))
    nodes = [rank["node"] for rank in ranks]
    assert nodes == [nodes[0]] * 2 + [nodes[2]] * 2
    assert nodes[0] != nodes[2]
    for half in (ranks[:2], ranks[2:]):
        assert sorted(rank["LOCAL_RANK"] for rank in half) == ["0", "1"]
    assert [sorted(probes[:2]), sorted(probes[2:])] == [["0", "1"]] * 2
    for half in (ranks[:2], ranks[2:]):
        (visible,) = {rank["CUDA_VISIBLE_DEVICES"] for rank in half}
        assert visible in ("6,7", "GPU-a,GPU-b")
    assert len({rank["MASTER_ADDR"] for rank in ranks}) == 1
