"""Placement `split`: two pools of ranks, what fits them, what overlaps, what is told of them."""

import math
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hybridrl.config import ConfigError
from hybridrl.driver.rank_failures import WorkerError
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.preflight.placement import check_placement
from hybridrl.preflight.prepare import build_recipe
from hybridrl.telemetry.records import read_lines

SPLIT = ["cluster.placement=split"]
PPO = ["recipe=ppo", "recipe.num_samples=4", "trainer.steps=2", "eval.sets.main.num_prompts=2"]


@pytest.fixture
def placed(make_config: Callable[..., Any]) -> Callable[..., Any]:
    """The `Config` of some overrides to ppo, once its placement is checked."""

    def make(*overrides: str) -> Any:
        config = make_config("recipe=ppo", "run.dir=out", *overrides)
        check_placement(config, build_recipe(config.recipe))
        return config

    return make


@pytest.mark.parametrize(
    ("overrides", "pools"),
    [
        ([], {"actor": range(1), "critic": range(1, 2)}),
        (["cluster.ranks=5"], {"actor": range(3), "critic": range(3, 5)}),
        (["cluster.ranks=5", "cluster.pools.critic=1"], {"actor": range(4), "critic": range(4, 5)}),
        (["cluster.ranks=5", "cluster.pools.actor=1"], {"actor": range(1), "critic": range(1, 5)}),
    ],
)
def test_pools_are_the_first_and_the_last_ranks(
    overrides: list[str], pools: dict[str, range], placed: Callable[..., Any]
) -> None:
    config = placed(*SPLIT, *overrides)
    assert config.cluster.pool_ranks == pools
    assert config.trainer.layout.fsdp == len(pools["actor"])
    assert config.roles.critic.layout.fsdp == len(pools["critic"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.pools.critic=1"], "cluster.pools.critic=1: wanted 0, or a role in it: "),
        (
            [*SPLIT, "cluster.ranks=4", "cluster.pools.actor=2", "cluster.pools.critic=1"],
            "cluster.pools=2 + 1: wanted actor + critic = cluster.ranks=4, each 1 or more",
        ),
        ([*SPLIT, "cluster.ranks=1"], "cluster.pools=? + ?: wanted actor + critic = cl"),
        ([*SPLIT, "schedule=partial"], "schedule=partial: wanted serial or fused or packed with"),
        (
            [*SPLIT, "rollout.layout.tp=2"],
            "rollout.layout=1 x 2: wanted pp x tp that divides cluster.pools.actor=1",
        ),
        (
            [*SPLIT, "roles.critic.layout.tp=2"],
            "roles.critic.layout=1 x 1 x ? x 2: wanted pp x replicas x fsdp x tp = cluster.pools.",
        ),
        ([*SPLIT, "recipe=grpo"], "the recipe has nothing for cluster.pools.critic (a critic or "),
        ([*SPLIT, "recipe=rm"], "the recipe has nothing for cluster.pools.actor (an actor"),
        (
            [
                *SPLIT, "cluster.ranks=3", "cluster.pools.actor=2", "recipe=grpo",
                "reward=model", "reward.model=x", "rollout.layout.tp=2",
            ],
            "cluster.pools.critic=1: wanted a multiple of rollout.layout's 1 x 2, the"
            " layout of reward",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    overrides: list[str], message: str, placed: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        placed(*overrides)


@pytest.mark.slow
def test_roles_begin_as_the_warmed_up_actor_of_the_other_pool(
    train: Callable[..., Any], tiny_run: list[str], user_rewards: Path, tmp_path: Path
) -> None:
    """Colocated it has those weights beside it. Two critics, two verifiers; all learn.

    Measured: losses and norms of gradients within 5e-7 of their size.
    """
    kept = [setting for setting in tiny_run if not setting.startswith("recipe")]
    cost = ["cost=function", f"cost.function={user_rewards}:score", "cost.extract=null"]
    recipe = ["recipe=safe_rlhf", *PPO[1:], *cost]
    lines = []
    apart = [*SPLIT, "cluster.pool_of.reference=critic"]
    for name, placement in (("colocate", []), ("split", SPLIT), ("apart", apart)):
        run = train(tmp_path / name, *kept, *recipe, "warm_start.steps=2", *placement)
        lines.append([x for x in read_lines(run.dir / "metrics.jsonl") if "critic/loss" in x])
        assert run.stored == [0, 0]
        for folder in ("critic", "cost_critic"):
            assert load_file(run.dir / "final" / folder / "model.safetensors")
    for one, *others in zip(*lines, strict=True):
        for key in ("critic/loss", "critic/grad_norm", "cost_critic/grad_norm", "grad_norm"):
            assert one[key] > 0
            assert all(math.isclose(one[key], other[key], rel_tol=1e-5) for other in others), key


@pytest.mark.slow
def test_a_killed_rank_of_the_critic_is_named(
    train: Callable[..., Any], tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [setting for setting in tiny_run if not setting.startswith("recipe")]
    update = RayExecutor.update

    def killing(self: RayExecutor, updates: Any) -> None:
        node, _ = self.group._locations[1]
        if updates[0][0].role == "actor":  # while the critic trains
            os.kill(int(node.partition("pid ")[2].rstrip(")")), signal.SIGKILL)
        update(self, updates)

    monkeypatch.setattr(RayExecutor, "update", killing)
    with pytest.raises(WorkerError, match=r"rank 1 of 2 \(critic\) on node .* process ended"):
        train(tmp_path / "killed", *kept, *PPO, *SPLIT)
