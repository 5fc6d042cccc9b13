"""Which layouts are said to cross nodes, and that what is advised instead crosses none."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from hybridrl.config import (
    ClusterConfig,
    Config,
    ConfigError,
    FusedScheduleConfig,
    ModelConfig,
    RolloutConfig,
    SlurmClusterConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.layout import Grouping, RolloutLayoutConfig
from hybridrl.config.rollout import Engine
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.mesh import gen_mesh
from hybridrl.layout.switching import candidate_orders, check_ascending
from hybridrl.models.parallel import check_gen_layout, check_tail_tp, check_train_layout
from hybridrl.models.shape import model_shape
from hybridrl.preflight.node_crossing import crossing_warnings


@pytest.mark.parametrize(
    ("train", "gen", "nodes", "keys"),
    [
        (2, 2, "aabb", []),
        (4, 2, "aabb", [("trainer.layout.tp=4: ranks 0, 1, 2, 3 are on several nodes, as 1 of 1",
                         "trainer.layout.tp=2 trainer.layout.fsdp=2 avoids it")]),
        (2, 2, "abcd", [("trainer.layout.tp=2: ranks 0, 1",
                         "trainer.layout.tp=1 trainer.layout.fsdp=4 avoids it"),
                        ("rollout.layout.tp=2: ranks 0, 1",
                         "rollout.layout.tp=1 rollout.layout.pp=2 avoids it")]),
        (1, 4, "aabb", [("rollout.layout.tp=4: ranks 0, 1, 2, 3",
                         "rollout.layout.tp=2 rollout.layout.pp=2 avoids it")]),
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
    assert line.endswith("rollout.layout.grouping=auto avoids it")


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


@pytest.mark.parametrize(
    ("layout", "nodes", "keys"),
    [
        # Experts are the slower part of fsdp's numbering: ep 2 joins ranks 0 and 2.
        (TrainLayoutConfig(ep=2), "aabb", [("trainer.layout.ep=2: ranks 0, 2 are on several nodes",
                                            "trainer.layout.ep_grouping=vanilla")]),
        (TrainLayoutConfig(ep=2), "abab", []),
        (TrainLayoutConfig(ep=2, ep_grouping=Grouping.vanilla), "aabb", []),
        (TrainLayoutConfig(tp=2, ep=2), "aabb", []),
        (TrainLayoutConfig(cp=2), "aabb", []),
        (TrainLayoutConfig(cp=2), "abab", [("trainer.layout.cp=2: ranks 0, 1 are on several nodes",
                                            "trainer.layout.cp=1")]),
        (TrainLayoutConfig(ep=4), "aabb", [("trainer.layout.ep=4: ranks 0, 1, 2, 3 are on several",
                                            "ep=2 trainer.layout.ep_grouping=vanilla")]),
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
        assert line.endswith(f"{instead} avoids it")


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


DENSE = {"model_type": "qwen3", "num_hidden_layers": 6}
EXPERTS = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 16}
WITHOUT_STAGES = {"model_type": "granite", "num_hidden_layers": 6, "embedding_multiplier": 2.0}
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 64,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip


def checked(overrides: dict[str, Any]) -> Config:
    """A run's config, which `train` and `plan layout` would take; raises ConfigError."""
    of = {
        place: {
            key.removeprefix(place): value
            for key, value in overrides.items()
            if key.startswith(place)
        }
        for place in ("trainer.layout.", "rollout.layout.", "model.", "cluster.", "rollout.own.")
    }
    config = Config(
        cluster=ClusterConfig(**of["cluster."]),
        model=ModelConfig(**of["model."]),
        trainer=TrainerConfig(layout=TrainLayoutConfig(**of["trainer.layout."])),
        rollout=RolloutConfig(
            layout=RolloutLayoutConfig(**of["rollout.layout."]), **of["rollout.own."]
        ),
        schedule=FusedScheduleConfig(),
    )
    model, gen = model_shape(config.model), config.rollout.layout
    check_train_layout(model, config.trainer.layout)
    check_gen_layout(model, gen.pp, gen.tp, ep=gen.ep)
    check_tail_tp(model, config.rollout)
    if config.rollout.features.ascending:
        check_ascending(TrainAxes.of(config.trainer.layout), gen.pp, gen.tp, gen.grouping)
    return config


def crossings(config: Config, nodes: Sequence[int]) -> list[str]:
    """The lines, whichever of the orders of fewest nodes the switch takes."""
    gen, axes = config.rollout.layout, TrainAxes.of(config.trainer.layout)
    lines: dict[str, None] = {}
    ascending = config.rollout.features.ascending
    for positions in candidate_orders(
        axes, gen.pp, gen.tp, gen.grouping, ascending=ascending, nodes=nodes
    ):
        instances = gen_mesh(positions, gen.pp, gen.tp).grid().reshape(-1, gen.ranks).tolist()
        lines |= dict.fromkeys(crossing_warnings(config, nodes, range(len(nodes)), instances))
    return [*lines]


def override(text: str) -> tuple[str, Any]:
    """A key and its value, as on the command line."""
    key, _, value = text.partition("=")
    return key, Grouping(value) if "grouping" in key else int(value)


def random_case(draw: random.Random) -> dict[str, Any]:
    """Overrides that may be refused."""
    powers = 1, 1, 2, 4, 8, 16
    tp, ranks = draw.choice((2, 4, 6, 8, 12, 16)), draw.choice((8, 16, 24, 32))
    train_tp = draw.choice(powers)
    case = {
        "cluster.ranks": ranks,
        "model.shape": draw.choice((DENSE, EXPERTS, EXPERTS, WITHOUT_STAGES)) | SIZES,
        "trainer.layout.tp": train_tp,
        "trainer.layout.pp": draw.choice((1, 1, 2)),
        "trainer.layout.ep": draw.choice((1, 1, 2, 4)),
        "rollout.layout.tp": tp,
        "rollout.layout.pp": draw.choice((1, 1, 2)),
        "rollout.layout.ep": draw.choice((1, tp)),
        "rollout.layout.grouping": draw.choice([*Grouping]),
        "rollout.own.engine": draw.choice([*Engine]),
    }
    if draw.random() < 0.2:
        case["rollout.own.speculate"] = "auto"
    elif draw.random() < 0.3:
        case["rollout.own.tail_tp"] = str(2 * tp)
    if draw.random() < 0.5:
        case["trainer.layout.fsdp"] = ranks // (train_tp * case["trainer.layout.pp"])
    return case


@pytest.mark.long
def test_what_is_advised_is_allowed_and_crosses_no_node() -> None:
    """Random models, layouts and nodes; every second one has a size that is no power of two."""
    draw, followed = random.Random(0), dict.fromkeys(("tp", "pp", "ep", "grouping"), 0)
    for _ in range(1200):
        case, per_node = random_case(draw), draw.choice((2, 3, 4, 6, 8))
        nodes = [rank // per_node for rank in range(case["cluster.ranks"])]
        try:
            config = checked(case)
        except ConfigError:
            continue
        for line in crossings(config, nodes):
            setting, _, advice = line.partition("; every layer's ")
            words = [word for word in advice.split() if ".layout." in word]
            assert words, line
            others = crossings(checked(case | dict(map(override, words))), nodes)
            key = setting.partition("=")[0]
            assert not [other for other in others if other.startswith(f"{key}=")], (case, line)
            for word in words:
                place, _, name = word.partition("=")[0].rpartition(".")
                if place == "rollout.layout":
                    followed[name] += 1
    assert min(followed.values()) > 10, followed
