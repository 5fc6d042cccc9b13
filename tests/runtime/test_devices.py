"""Which GPU is whose: by Ray's logical GPUs, which need no hardware."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ClusterConfig, ClusterKind, Config, ConfigError, Device
from hybridrl.config.compose import check, register
from hybridrl.runtime import devices
from hybridrl.system.devices import cores_beside, local_gpus, local_index, own_device


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


@pytest.mark.parametrize(
    ("settings", "gpus", "device", "ranks"),
    [
        ([], 0, Device.cpu, 2),
        ([], 1, Device.cuda, 1),
        ([], 8, Device.cuda, 8),
        (["cluster.ranks=4"], 8, Device.cuda, 4),
        (["cluster.ranks=4"], 0, Device.cpu, 4),
        (["cluster.device=cpu"], 8, Device.cpu, 2),
        (["cluster.device=cpu", "cluster.ranks=3"], 1, Device.cpu, 3),
        (["cluster.device=cuda"], 2, Device.cuda, 2),
        (["cluster=processes"], 8, Device.cuda, 1),
    ],
)
def test_ranks_and_device(settings: list[str], gpus: int, device: Device, ranks: int) -> None:
    """The layouts follow."""
    config = check(settings)
    config.resolve_device(gpus, "this machine")
    assert (config.cluster.device, config.cluster.ranks) == (device, ranks)
    assert config.trainer.layout.fsdp == ranks


@pytest.mark.parametrize(
    ("settings", "gpus", "message"),
    [
        (["cluster.device=cuda"], 0, "cluster.device=cuda: wanted auto or cpu: torch finds no GPU"),
        (
            ["cluster.ranks=3"],
            2,
            "cluster.ranks=3: wanted at most 2 (the GPUs of this machine), or cluster.device=cpu",
        ),
        (["trainer.layout.tp=3"], 8, "trainer.layout=1 x 1 x ? x 3: wanted"),
        (["cluster.placement=split"], 1, "cluster.pools=? + ?: wanted actor + critic = cluster.ra"),
    ],
)
def test_ranks_that_cannot_be(settings: list[str], gpus: int, message: str) -> None:
    config = check(settings)
    with pytest.raises(ConfigError) as raised:
        config.resolve_device(gpus, "this machine")
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"device": Device.cuda, "ranks": 1},
            "cluster.device=cuda: wanted auto with cluster.gpus_",
        ),
        ({"device": Device.cpu, "gpus_per_node": 8}, "cluster.device=cpu: wanted auto with clust"),
    ],
)
def test_a_job_asks_for_its_gpus(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config(cluster=ClusterConfig(kind=ClusterKind.slurm, **settings))
    assert str(raised.value).startswith(message)


def test_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is asked only where the ranks may be on GPUs."""
    config = check([])
    monkeypatch.setattr(devices, "local_gpus", lambda: 4)
    devices.resolve_device(config)
    assert (config.cluster.ranks, config.cluster.device) == (4, Device.cuda)
    config = check(["cluster.device=cpu"])
    monkeypatch.setattr(devices, "local_gpus", lambda: 1 / 0)
    devices.resolve_device(config)
    assert config.cluster.ranks == 2


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [([], 1), (["trainer.layout.tp=2", "rollout.layout.pp=3"], 6), (["cluster.ranks=5"], 5)],
)
def test_who_submits_to_a_cluster_does_not_know_its_gpus(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], ranks: int
) -> None:
    """The layouts are checked at the least number of ranks that they take."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = check(["cluster=ray", "cluster.address=http://head:8265", *settings])
    devices.resolve_device(config)
    assert config.cluster.ranks == ranks


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ("3", None, 3),
        ("3", "3", 0),
        ("5", "2,5", 1),
        ("GPU-b", "GPU-a,GPU-b", 1),
        ("MIG-2/3/0", "MIG-2/3/0", 0),
    ],
)
def test_the_index_of_a_ranks_gpu(assigned: str, visible: str | None, index: int) -> None:
    assert local_index([assigned], visible) == index


def test_a_rank_without_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match=r"is on GPU 1 of its node, and torch .* finds 0 there"):
        own_device()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpus() == 0


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("5\n", {5}), ("\n", set()), (None, set())],
)
def test_cores_beside_a_gpu(tmp_path: Path, text: str | None, cores: set[int]) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    if text is not None:
        (folder / "local_cpulist").write_text(text)
    assert cores_beside("0000:3b:00", tmp_path) == cores


PROGRAM = """
    import json, os, sys
    from pathlib import Path
    import ray
    from ray.cluster_utils import Cluster
    from hybridrl.config.compose import check, register
    from hybridrl.runtime.devices import resolve_device
    from hybridrl.runtime.launchers import launched
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
        cluster.add_node(num_cpus=8, num_gpus=4, env_vars=env)
    try:
        register()
        config = check([f"cluster.address={cluster.address}", *sys.argv[2:]])
        resolve_device(config)
        with launched(config.cluster, Path()) as launcher:
            group = launcher.start(Worker, Worker)
            print(json.dumps([launcher.get(answer) for answer in group.describe()]))
    finally:
        cluster.shutdown()
"""


@pytest.fixture
def on_nodes() -> Callable[..., list[dict[str, Any]]]:
    """Descriptions of the ranks of a run on a cluster with nodes of 4 GPUs, by logical ones."""

    def run(visible: list[str | None], *overrides: str) -> list[dict[str, Any]]:
        env = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        env.pop("CUDA_VISIBLE_DEVICES", None)
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(visible), *overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        return answers

    return run


def test_ranks_of_a_node_are_neighbors_and_see_all_its_gpus(
    on_nodes: Callable[..., list[dict[str, Any]]],
) -> None:
    """A rank per GPU of the cluster, though the driver's node has none."""
    ranks = on_nodes(["4,5,6,7", "GPU-a,GPU-b,GPU-c,GPU-d"])
    assert [rank["rank"] for rank in ranks] == list(range(8))
    nodes = [rank["node"] for rank in ranks]
    assert nodes == [nodes[0]] * 4 + [nodes[4]] * 4
    assert nodes[0] != nodes[4]
    for half in (ranks[:4], ranks[4:]):
        assert sorted(rank["LOCAL_RANK"] for rank in half) == ["0", "1", "2", "3"]
        (visible,) = {rank["CUDA_VISIBLE_DEVICES"] for rank in half}
        assert visible in ("4,5,6,7", "GPU-a,GPU-b,GPU-c,GPU-d")
    assert len({rank["MASTER_ADDR"] for rank in ranks}) == 1
