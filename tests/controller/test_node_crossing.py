"""Which layouts are said to cross nodes."""

import pytest

from hybridrl.config import ClusterConfig, Config, RolloutConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.config.layout import RolloutLayoutConfig
from hybridrl.controller.node_crossing import crossing_warnings


@pytest.mark.parametrize(
    ("train", "gen", "nodes", "keys"),
    [
        (2, 2, "aabb", []),
        (4, 2, "aabb", ["trainer.layout.tp=4: ranks 0, 1, 2, 3 are on several nodes, as 1 of 1"]),
        (2, 2, "abab", ["trainer.layout.tp=2: ranks 0, 1", "rollout.layout.tp=2: ranks 0, 1"]),
        (1, 4, "aabb", ["rollout.layout.tp=4: ranks 0, 1, 2, 3"]),
        (1, 1, "abcd", []),
    ],
)
def test_tp_across_nodes(train: int, gen: int, nodes: str, keys: list[str]) -> None:
    config = Config(
        cluster=ClusterConfig(ranks=4),
        trainer=TrainerConfig(layout=TrainLayoutConfig(tp=train)),
        rollout=RolloutConfig(layout=RolloutLayoutConfig(tp=gen)),
    )
    instances = [list(range(start, start + gen)) for start in range(0, 4, gen)]
    lines = crossing_warnings(config, nodes, range(4), instances)
    assert len(lines) == len(keys)
    assert all(line.startswith(key) for line, key in zip(lines, keys, strict=True))


@pytest.mark.parametrize(
    ("layout", "nodes", "keys"),
    [
        # Experts are the slower part of fsdp's numbering: ep 2 joins ranks 0 and 2.
        (TrainLayoutConfig(ep=2), "aabb", ["trainer.layout.ep=2: ranks 0, 2 are on several nod"]),
        (TrainLayoutConfig(ep=2), "abab", []),
        (TrainLayoutConfig(tp=2, ep=2), "aabb", []),
        (TrainLayoutConfig(cp=2), "aabb", []),
        (TrainLayoutConfig(cp=2), "abab", ["trainer.layout.cp=2: ranks 0, 1 are on several node"]),
        (TrainLayoutConfig(ep=4), "aabb", ["trainer.layout.ep=4: ranks 0, 1, 2, 3 are on severa"]),
    ],
)
def test_ep_and_cp_across_nodes(layout: TrainLayoutConfig, nodes: str, keys: list[str]) -> None:
    config = Config(cluster=ClusterConfig(ranks=4), trainer=TrainerConfig(layout=layout))
    lines = crossing_warnings(config, nodes, range(4), [[0], [1], [2], [3]])
    assert len(lines) == len(keys)
    assert all(line.startswith(key) for line, key in zip(lines, keys, strict=True))
    assert all(line.endswith("every layer's all-to-alls cross the network") for line in lines)
