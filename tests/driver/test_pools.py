"""Every partition of PPO's models into pools: what runs where, and the batch of one pool."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError, compose
from hybridrl.costs.roofline import Roofline
from hybridrl.driver import train as runs
from hybridrl.flow.executor import Scope
from hybridrl.preflight.placement import check_placement, graphs_of, scope_of
from hybridrl.preflight.prepare import build_recipe
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.trace import read_timeline

MODELS = ("actor", "critic", "reference", "reward")
STAGES = {"values": "critic", "reference_log_probs": "reference", "reward": "reward"}
Partition = tuple[tuple[str, ...], ...]


def partitions(roles: tuple[str, ...]) -> list[Partition]:
    """All of them; in each the pools, and the roles of a pool, are in the order of `roles`."""
    if not roles:
        return [()]
    *others, last = roles
    grown: list[Partition] = []
    for before in partitions(tuple(others)):
        grown += [(*before[:i], (*before[i], last), *before[i + 1 :]) for i in range(len(before))]
        grown.append((*before, (last,)))
    return grown


ALL = partitions(MODELS)


def named(partition: Partition) -> str:
    return "|".join("+".join(pool) for pool in partition)


def overrides(partition: Partition) -> list[str]:
    """A pool has the name of its first role; the actor has 2 of the ranks, each other pool 1."""
    moved = {role: pool[0] for pool in partition[1:] for role in pool}
    table = ", ".join(f"{role}: {pool}" for role, pool in moved.items())
    size = ["cluster.pools.actor=2"] if moved else []
    return [f"cluster.ranks={1 + len(partition)}", f"cluster.pool_of={{{table}}}", *size]


def pool_by_role(partition: Partition) -> dict[str, str]:
    return {role: pool[0] for pool in partition for role in pool}


PPO = ("recipe=ppo", "recipe.num_samples=4", "reward=model", "reward.model=none")


def test_there_are_fifteen() -> None:
    assert len({*ALL}) == 15
    assert named(ALL[0]) == "actor+critic+reference+reward"
    assert named(ALL[-1]) == "actor|critic|reference|reward"


@pytest.mark.parametrize("partition", ALL, ids=named)
def test_each_role_has_its_pool(partition: Partition, make_config: Callable[..., Any]) -> None:
    config = make_config(*PPO, *overrides(partition), "run.dir=out")
    graph = build_recipe(config.recipe)
    check_placement(config, graph)
    pools = pool_by_role(partition)
    assert list(config.cluster.pool_ranks) == [pool[0] for pool in partition]
    assert [*map(len, config.cluster.pool_ranks.values())] == [2, *[1] * (len(partition) - 1)]
    for pool, of_pool in graphs_of(graph, config).items():
        assert {*of_pool.roles} == {role for role, its in pools.items() if its == pool}
        assert {*of_pool.copies} <= {"reference"}
    assert config.roles.critic.layout.fsdp == config.ranks_of(pools["critic"])
    for stage in graph.stages.values():
        if stage.role in pools and stage.method is not None and stage.role != "actor":
            assert (scope_of(stage, config) is Scope.POOL) == (pools[stage.role] != "actor")


@pytest.mark.parametrize(
    ("placement", "same"),
    [
        ("colocate", ALL[0]),
        ("split", (("actor", "reference"), ("critic", "reward"))),
        ("standalone", ALL[-1]),
    ],
)
def test_three_have_names(placement: str, same: Partition, make_config: Callable[..., Any]) -> None:
    sizes = [f"cluster.pools.{pool[0]}=1" for pool in same[1:]]
    ranks = f"cluster.ranks={1 + len(same)}"
    config = make_config(*PPO, ranks, f"cluster.placement={placement}", *sizes, "run.dir=out")
    other = make_config(*PPO, *overrides(same), "run.dir=out")
    check_placement(config, build_recipe(config.recipe))
    assert config.cluster.pool_ranks == other.cluster.pool_ranks
    assert {role: config.pool_of(role) for role in MODELS} == pool_by_role(same)


EMULATED = (
    "cluster=emulated", "cluster.time_scale=0.001", "trainer.steps=2", "trainer.prompts_per_step=4",
    "rollout.max_new_tokens=1000", "rollout.max_running=8", "recipe.kl_coef=0.1",
    "telemetry.progress=false", "telemetry.loggers=[]", "telemetry.report=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of an emulated run of a partition, by schedule; made once."""

    # Of a file: no GPU holds what a rank of such small pools would.
    costs = tmp_path_factory.mktemp("costs") / "costs.json"
    modeled = Roofline.of("gpu:model=8b,critic=8b", gpus=1, total=2).costs()
    costs.write_text(json.dumps({"costs": modeled.to_json()}))

    @functools.cache
    def train(partition: Partition, schedule: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        compose.register()
        settings = (
            f"cluster.costs={costs}",
            *EMULATED,
            *PPO,
            *overrides(partition),
            f"schedule={schedule}",
        )
        runs.train(compose.check([*settings, f"run.dir={folder}"]))
        return folder

    return train


def trained_on(run: Path) -> list[Any]:
    lengths = [(line["prompts"], line["lengths"]) for line in read_lines(run / "lengths.jsonl")]
    return [*lengths, *(line["reward_mean"] for line in read_lines(run / "metrics.jsonl"))]


@pytest.mark.long
@pytest.mark.parametrize("partition", ALL, ids=named)
def test_every_one_trains_on_the_same_batch(
    partition: Partition, emulated: Callable[..., Path]
) -> None:
    """Streamed as one after the other, and each role works on the ranks of its pool alone."""
    serial, run = emulated(ALL[0], "serial"), emulated(partition, "fused")
    assert trained_on(run) == trained_on(serial)
    assert len(trained_on(run)) > 2
    pools = pool_by_role(partition)
    numbers = {pool[0]: {i + 1} if i else {0, 1} for i, pool in enumerate(partition)}
    spans, _ = read_timeline(run / "trace.json")
    for stage, role in STAGES.items():
        lanes = {span.lane for span in spans if span.name == stage}
        ranks = {int(lane.split()[1]) for lane in lanes if lane.startswith("rank")}
        assert ranks, stage
        assert ranks <= numbers[pools[role]], stage


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["cluster.pool_of.reference=nowhere"],
            "cluster.pool_of.reference=nowhere: wanted one of actor, critic, cost_critic, ",
        ),
        (["cluster.pool_of.critics=critic"], "cluster.pool_of.critics=critic: wanted a known key"),
        (
            ["cluster.placement=standalone", "cluster.pools.critic=1", "cluster.pools.reward=1"],
            "cluster.pools.reference=0: wanted 1 or more ranks for reference, or cluster.pool_of.",
        ),
        (
            ["cluster.pool_of.reference=reference", "cluster.pools.critic=1"],
            "cluster.pools.critic=1: wanted 0, or a role in it: cluster.pool_of.ROLE=critic, or ",
        ),
        (
            ["cluster.pool_of.teacher=teacher"],
            "cluster.placement=colocate: wanted another: the recipe has nothing for "
            "cluster.pools.teacher (a teacher as a model)",
        ),
        (
            ["cluster.placement=split", "cluster.pool_of.reference=reference", "cluster.ranks=2"],
            "cluster.pools=? + ? + ?: wanted actor + critic + reference = cluster.ranks=2, each 1",
        ),
        (
            ["cluster.pool_of.reference=reference", "rollout.layout.tp=2", "cluster.ranks=3"],
            "cluster.pools.reference=1: wanted a multiple of rollout.layout's 1 x 2, the layout",
        ),
        (
            ["cluster.pool_of.critic=critic", "schedule=partial"],
            "schedule=partial: wanted serial or fused or packed with critic in pool critic",
        ),
        (
            [
                "recipe.reference_ema_decay=0.9", "cluster.pool_of.reference=reference",
            ],
            "cluster.pool_of.reference=reference: wanted actor: ",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(settings: list[str], message: str) -> None:
    compose.register()

    def place() -> None:
        # As the command line: its keys are checked, too.
        config = compose.check([*PPO, "cluster.ranks=4", "run.dir=out", *settings])
        check_placement(config, build_recipe(config.recipe))

    with pytest.raises(ConfigError, match=re.escape(message)):
        place()


def test_a_frozen_reference_apart_may_be_streamed_off_policy(
    make_config: Callable[..., Any],
) -> None:
    """Only values grow old."""
    config = make_config(
        "recipe=grpo", "recipe.kl_coef=0.1", "cluster.pool_of.reference=reference",
        "cluster.ranks=2", "schedule=partial", "run.dir=out",
    )  # fmt: skip
    check_placement(config, build_recipe(config.recipe))
    assert config.cluster.pool_ranks == {"actor": range(1), "reference": range(1, 2)}
