"""The memory that a plan is held to: of this node, or of a GPU of a cluster that is joined."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridrl import cli
from hybridrl.config import ClusterConfig, Config, ConfigError, Device
from hybridrl.models.tiny import make_tiny_model
from hybridrl.preflight.memory_plan import check_memory, local_room
from hybridrl.preflight.prepare import build_recipe
from hybridrl.system.node_info import usable_memory

GIB = 2**30


def _on_gpus(address: str | None = None) -> Config:
    config = Config(cluster=ClusterConfig(device=Device.cuda, ranks=2, address=address))
    config.resolve_device(2, "this test")
    return config


def test_a_rank_has_the_memory_of_this_nodes_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    room = local_room(_on_gpus())
    assert room.capacity == 80 * GIB
    assert 3 * GIB < room.reserved < 4 * GIB, "a share of it for others"


def test_a_run_is_held_to_the_gpus_of_the_cluster_that_it_joins(tmp_path: Path) -> None:
    config = _on_gpus("10.0.0.1:6379")
    make_tiny_model(tmp_path, config.model.tiny, seed=0)
    graph = build_recipe({"target": "hybridrl.recipes.grpo:grpo"})
    check_memory(config, graph, str(tmp_path), 80 * GIB)
    with pytest.raises(ConfigError, match=r"^cluster\.memory_check=refuse: .* of 1\.0 MiB for it"):
        check_memory(config, graph, str(tmp_path), 2**20)


def test_a_plan_on_cpus_is_held_to_a_ranks_share_of_this_node(
    capfd: pytest.CaptureFixture[str],
) -> None:
    cli.main(["plan", "memory", "cluster.device=cpu", "cluster.ranks=2"])
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert record["device"] == "cpu"
    assert record["capacity"] == usable_memory() // 2
