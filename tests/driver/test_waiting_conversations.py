"""Conversations that wait: how many an instance may have, and what else runs without them."""

import pytest

from hybridrl.config import Config, ConfigError, compose
from hybridrl.preflight.generation_sizes import conversations_held
from hybridrl.preflight.prepare import build_recipe


def configured(*settings: str) -> Config:
    compose.register()
    return compose.check(["experiment=grid_tiny", "cluster.ranks=2", *settings])


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ([], 512 // 2),  # all held-out walks
        (["data.eval_size=64"], 32 * 8 // 2),  # those of a step
        (["data.eval_size=64", "rollout.layout.tp=2"], 32 * 8),
        (["data.eval_size=9", "recipe.group_size=3", "trainer.prompts_per_step=5"], 8),  # of 15
        (["data.eval_size=9", "schedule=partial", "schedule.over_provision=2"], 2 * 32 * 8 // 2),
        (["environment=none", "reward=exact"], 0),
    ],
)
def test_an_instance_may_have_its_share_of_all_conversations(
    settings: list[str], number: int
) -> None:
    config = configured(*settings)
    assert conversations_held(config, build_recipe(config.recipe)) == number


def test_vllm_keeps_none_on_the_host() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_host_tokens=64: wanted null with rollout\.engine=vllm"
    ):
        configured("rollout=vllm", "rollout.kv_host_tokens=64")
