"""Ranks on GPUs of several nodes: by Ray's logical GPUs, which need no hardware.

The driver notes which lines that need a GPU it has run, since no dry run has a driver.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_dry.tables import BY_DRIVER, MISSED

PROGRAM = """
    import json, os, sys
    from pathlib import Path
    from gpu_dry.cuda_lines import LineProbes
    lines = LineProbes()
    lines.install()  # before the package
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

    def describe_probe(probe):
        names = ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
        said = {name: os.environ.get(name) for name in names}
        return {**said, "rank": probe.rank, "node": ray.get_runtime_context().get_node_id()}

    visible, gpus = json.loads(sys.argv[1]), int(sys.argv[2])
    cluster = Cluster()
    cluster.add_node(num_cpus=1, num_gpus=0, include_dashboard=False)  # the driver's
    for names in visible:
        env = {} if names is None else {"CUDA_VISIBLE_DEVICES": names}
        cluster.add_node(num_cpus=2 * gpus, num_gpus=gpus, env_vars=env)
    try:
        register()
        config = check([f"cluster.address={cluster.address}", *sys.argv[3:]])
        resolve_device(config)
        ranks = []
        if gpus == 2:  # a whole rank imports for seconds
            with launched(config.cluster, Path()) as launcher:
                group = launcher.start(Worker, Worker)
                ranks = [launcher.get(answer) for answer in group.describe()]
        with ray_runtime(config.cluster, verl.environment(config.cluster.device), Path()) as ray:
            probes = _probes(ray, config.cluster)
            said = [probe.__ray_call__.remote(describe_probe) for probe in probes]
            print(json.dumps([ranks, ray.get(said), lines.missed()]))
    finally:
        cluster.shutdown()
"""

TESTS = Path(__file__).parents[1]
Said = list[dict[str, Any]]
OnNodes = Callable[..., tuple[Said, Said, list[str]]]


@pytest.fixture
def on_nodes() -> OnNodes:
    """What the ranks of a run say on nodes of so many logical GPUs, and the probes of doctor.

    Of two GPUs a node; probes alone otherwise. Both are placed and claim GPUs by the same code. The
    third are lines that need a GPU and that the driver has not run.
    """

    def run(visible: list[str | None], gpus: int, *overrides: str) -> tuple[Said, Said, list[str]]:
        env = os.environ | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",  # it would start a process for each CPU
            "PYTHONPATH": str(TESTS),
        }
        env.pop("CUDA_VISIBLE_DEVICES", None)
        arguments = [json.dumps(visible), str(gpus), *overrides]
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        ranks, probes, missed = json.loads(done.stdout.splitlines()[-1])
        return ranks, probes, missed

    return run


def check_nodes(said: Said, gpus: int, visible: list[str | None]) -> None:
    """Ranks of two nodes: neighbors, each with a GPU of its own, who see all of their node."""
    assert [rank["rank"] for rank in said] == list(range(2 * gpus))
    halves = said[:gpus], said[gpus:]
    nodes = [{rank["node"] for rank in half} for half in halves]
    assert [len(node) for node in nodes] == [1, 1]
    assert nodes[0] != nodes[1]
    for half in halves:
        assert sorted(int(rank["LOCAL_RANK"]) for rank in half) == list(range(gpus))
    seen = [{rank["CUDA_VISIBLE_DEVICES"] for rank in half} for half in halves]
    assert sorted(seen, key=str) == sorted([{names} for names in visible], key=str)


@pytest.mark.gpu_dry
def test_ranks_of_a_node_are_neighbors_and_see_all_its_gpus(on_nodes: OnNodes) -> None:
    """A rank per GPU of the cluster, though the driver's node has none. So is a probe of doctor."""
    visible: list[str | None] = ["6,7", "GPU-a,GPU-b"]
    ranks, probes, missed = on_nodes(visible, 2)
    check_nodes(ranks, 2, visible)
    check_nodes(probes, 2, visible)
    assert len({rank["MASTER_ADDR"] for rank in ranks}) == 1
    reasons = json.loads(MISSED.read_text())
    drivers = {line for line, reason in reasons.items() if reason == BY_DRIVER}
    assert drivers
    assert not drivers & set(missed)


@pytest.mark.gpu_dry_full
def test_two_nodes_of_eight(on_nodes: OnNodes) -> None:
    """One names its GPUs in an order of its own, on the other Ray counts them."""
    visible: list[str | None] = ["7,6,5,4,3,2,1,0", None]
    _, probes, _ = on_nodes(visible, 8)
    check_nodes(probes, 8, visible)
