"""Recipes, ranks and engines without conversations are refused before a process starts."""

import re
from collections.abc import Callable

import pytest

from hybridrl.config import Config, ConfigError
from hybridrl.preflight.environment import check_environment
from hybridrl.preflight.prepare import build_recipe

READS = "environment.kind=none: wanted tools, grid, python, retry, gym, verifiers, function: the"
SILENT = "environment.kind=grid: wanted none: the recipe does not generate"


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["recipe=ppo", "recipe.turn_rewards=true"], READS),
        (["recipe=reinforce_pp", "recipe.turn_rewards=true"], READS),
        (["recipe=gigpo"], READS),
        (["recipe=sft", "environment=grid"], SILENT),
        (["recipe=dpo", "environment=grid"], SILENT),
        (
            ["recipe=safe_rlhf", "recipe.turn_rewards=true", "environment=grid"],
            "recipe.turn_rewards=True: wanted false, or recipe=ppo, reinforce_pp",
        ),
    ],
)
def test_what_conversations_do_not_go_with(
    make_config: Callable[..., Config], overrides: list[str], error: str
) -> None:
    config = make_config(*overrides, "run.dir=out")
    with pytest.raises(ConfigError, match=re.escape(error)):
        check_environment(config, build_recipe(config.recipe))


@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe=gigpo"],
        ["recipe=ppo", "recipe.turn_rewards=true"],
        ["recipe=safe_rlhf"],
        ["schedule=partial"],
        ["rollout=vllm", "schedule=partial"],
    ],
)
def test_what_they_go_with(make_config: Callable[..., Config], overrides: list[str]) -> None:
    config = make_config(*overrides, "environment=grid", "run.dir=out")
    check_environment(config, build_recipe(config.recipe))
