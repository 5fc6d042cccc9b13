"""Which layouts are said to cross nodes."""

from typing import Any

import pytest

from hybridrl.config import (
    ClusterConfig,
    Config,
    FusedScheduleConfig,
    RolloutConfig,
    SlurmClusterConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.layout import Grouping, RolloutLayoutConfig
from hybridrl.preflight.node_crossing import crossing_warnings


@pytest.mark.parametrize(
    ("train", "gen", "nodes", "keys"),
    [
        (2, 2, "aabb", []),
        (4, 2, "aabb", [("trainer.layout.tp=4: ranks 0, 1, 2, 3 are on several nodes, as 1 of 1",
                         "a trainer.layout.tp that divides a node's ranks avoids it")]),
        (2, 2, "abcd", [("trainer.layout.tp=2: ranks 0, 1",
                         "a trainer.layout.tp that divides a node's ranks avoids it"),
                        ("rollout.layout.tp=2: ranks 0, 1",
                         "a rollout.layout.tp that divides a node's ranks avoids it")]),
        (1, 4, "aabb", [("rollout.layout.tp=4: ranks 0, 1, 2, 3",
                         "a rollout.layout.tp that divides a node's ranks avoids it")]),
        (1, 1, "abcd", []),
    ],
)  # fmt: skip
def test_tp_across_nodes(train: int, gen: int, nodes: str, keys: list[tuple[str, str]]) -> None:
    config = Config(
        cluster=ClusterConfig(ranks=4),
        trainer=TrainerConfig(layout=TrainLayoutConfig(tp=train)),
        rollout=RolloutConfig(layout=RolloutLayoutConfig(tp=gen)),
    )
    instances = [list(range(start, start + gen)) for start in range(0, 4, gen)]
    lines = crossing_warnings(config, nodes, range(4), instances)
    assert len(lines) == len(keys)
    for line, (begins, ends) in zip(lines, keys, strict=True):
        assert line.startswith(begins)
        assert line.endswith(f"every layer's all-reduces cross the network; {ends}")


def test_an_order_by_name_that_crosses_nodes() -> None:
    layout = RolloutLayoutConfig(tp=2, grouping=Grouping.strided)
    config = Config(cluster=ClusterConfig(ranks=4), rollout=RolloutConfig(layout=layout))
    (line,) = crossing_warnings(config, "aabb", range(4), [[0, 2], [1, 3]])
    assert line.startswith("rollout.layout.tp=2: ranks 0, 2 are on several nodes, as 2 of 2")
    assert line.endswith(
        "rollout.layout.grouping=auto and a rollout.layout.tp that divides a node's ranks avoids it"
    )


def test_a_wide_tail_across_nodes() -> None:
    """Stages of four ranks each, of which the second is on two nodes."""
    layout = RolloutLayoutConfig(pp=2)
    config = Config(
        cluster=ClusterConfig(ranks=8),
        rollout=RolloutConfig(layout=layout, tail_tp="4"),
        schedule=FusedScheduleConfig(),
    )
    instances, wide = [[i, i + 1] for i in range(0, 8, 2)], [[0, 2, 4, 6, 1, 3, 5, 7]]
    (line,) = crossing_warnings(config, "abababac", range(8), instances, wide)
    assert line.startswith("rollout.tail_tp=4: ranks 1, 3, 5, 7 are on several nodes, as 1 of 2")


NEAR = "trainer.layout.ep_grouping=vanilla and a trainer.layout.ep that"


@pytest.mark.parametrize(
    ("layout", "nodes", "keys"),
    [
        # Experts are the slower part of fsdp's numbering: ep 2 joins ranks 0 and 2.
        (TrainLayoutConfig(ep=2), "aabb", [("trainer.layout.ep=2: ranks 0, 2 are on several nodes",
                                            NEAR)]),
        (TrainLayoutConfig(ep=2), "abab", []),
        (TrainLayoutConfig(ep=2, ep_grouping=Grouping.vanilla), "aabb", []),
        (TrainLayoutConfig(tp=2, ep=2), "aabb", []),
        (TrainLayoutConfig(cp=2), "aabb", []),
        (TrainLayoutConfig(cp=2), "abab", [("trainer.layout.cp=2: ranks 0, 1 are on several nodes",
                                            "a trainer.layout.cp that")]),
        (TrainLayoutConfig(ep=4), "aabb", [("trainer.layout.ep=4: ranks 0, 1, 2, 3 are on several",
                                            NEAR)]),
    ],
)  # fmt: skip
def test_ep_and_cp_across_nodes(
    layout: TrainLayoutConfig, nodes: str, keys: list[tuple[str, str]]
) -> None:
    config = Config(cluster=ClusterConfig(ranks=4), trainer=TrainerConfig(layout=layout))
    lines = crossing_warnings(config, nodes, range(4), [[0], [1], [2], [3]])
    assert len(lines) == len(keys)
    for line, (begins, instead) in zip(lines, keys, strict=True):
        assert line.startswith(begins)
        assert "every layer's all-to-alls cross the network" in line
        assert line.endswith(f"{instead} divides a node's ranks avoids it")


@pytest.mark.parametrize(
    ("layout", "nodes", "advised"),
    [
        ({"ep": 4}, "aabb", {"ep": 2, "ep_grouping": Grouping.vanilla}),
        ({"ep": 8}, "aaaabbbb", {"ep": 4, "ep_grouping": Grouping.vanilla}),
        ({"tp": 6}, "aaaabbbbcccc", {"tp": 2}),
        ({"cp": 4, "tp": 2}, "aaaabbbb", {"cp": 2, "tp": 2}),
    ],
)
def test_what_is_advised_avoids_it(
    layout: dict[str, Any], nodes: str, advised: dict[str, Any]
) -> None:
    """All of it: neither a smaller ep nor another order is enough, nor is any smaller tp."""
    number = len(nodes)

    def lines(**settings: Any) -> list[str]:
        train = TrainLayoutConfig(**settings)
        config = Config(cluster=ClusterConfig(ranks=number), trainer=TrainerConfig(layout=train))
        config.resolve_device(number, "this test")
        return crossing_warnings(config, nodes, range(number), [[rank] for rank in range(number)])

    (line,) = lines(**layout)
    assert "that divides a node's ranks avoids it" in line
    assert lines(**advised) == []


@pytest.mark.parametrize(
    ("layout", "nodes", "wanted"),
    [
        ({"ep": 4}, 2, Grouping.vanilla),  # strided: ranks 0, 2, 4, 6
        ({"ep": 4}, 1, Grouping.auto),
        ({"ep": 8}, 2, Grouping.auto),  # no order has eight ranks on four
        ({"ep": 2, "tp": 2}, 2, Grouping.auto),  # ep's ranks are those of tp
        ({"ep": 4, "tp": 2}, 2, Grouping.vanilla),
        ({"ep": 2, "pp": 2}, 2, Grouping.auto),  # a stage is on a node
        ({"ep": 2, "pp": 2}, 4, Grouping.vanilla),
        ({"ep": 4, "ep_grouping": Grouping.strided}, 2, Grouping.strided),
    ],
    ids=str,
)
def test_ep_stays_on_a_node_where_it_can(
    layout: dict[str, Any], nodes: int, wanted: Grouping
) -> None:
    cluster = SlurmClusterConfig(nodes=nodes, ranks=8)
    config = Config(cluster=cluster, trainer=TrainerConfig(layout=TrainLayoutConfig(**layout)))
    assert config.trainer.layout.ep_grouping is wanted
    node_of = [str(rank * nodes // 8) for rank in range(8)]
    crosses = crossing_warnings(config, node_of, range(8), [[rank] for rank in range(8)])
    expected = layout["ep"] == 8 or wanted is Grouping.strided
    assert any("ep=" in line for line in crosses) == expected
