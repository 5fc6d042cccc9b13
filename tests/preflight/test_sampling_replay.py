"""Recipes that cannot train on the ids that truncated sampling has kept are refused in time."""

from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.preflight.prepare import build_recipe
from hybridrl.preflight.sampling_replay import check_sampling_replay

RECIPE = """
from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe

@recipe("{name}")
def {name}(flow, cfg):
    samples = flow.actor.generate(flow.prompts, num_samples=2, {settings})
    samples = flow.reward.score(samples).by_group(advantages.group_relative)
    flow.actor.update(samples, loss=losses.ClippedLoss())
"""
TOP = ["rollout.top_k=5"]
STAGE = "rollout.sampling_replay=auto: wanted off with stage 'generate', which draws with"


@pytest.mark.parametrize(
    ("settings", "rollout", "refused"),
    [
        ("", TOP, ""),
        ("top_p=0.9", TOP, ""),
        ("top_p=0.9", [], f"{STAGE} top_p=0.9 and top_k=0"),
        ("top_k=5", [], f"{STAGE} top_p=1 and top_k=5"),
        ("top_k=0, top_p=0.9", TOP, f"{STAGE} top_p=0.9 and top_k=0"),
        ("top_k=0", TOP, ""),
        ("greedy=True", TOP, ""),
        ("top_p=0.9", ["rollout.sampling_replay=off"], ""),
    ],
)
def test_stages_with_settings_of_their_own(
    make_config: Any, tmp_path: Path, settings: str, rollout: list[str], refused: str
) -> None:
    (tmp_path / "own.py").write_text(RECIPE.format(name="own", settings=settings))
    graph = build_recipe({"target": f"{tmp_path}/own.py:own"})
    config = make_config(*rollout)
    if not refused:
        check_sampling_replay(config, graph)
        return
    with pytest.raises(ConfigError) as error:
        check_sampling_replay(config, graph)
    assert str(error.value) == f"{refused}: wanted a rollout.top_k of 1 to 1024"


@pytest.mark.parametrize("name", ["distill_topk", "self_distill"])
def test_losses_that_read_the_likeliest_tokens(make_config: Any, name: str) -> None:
    graph = build_recipe({"target": f"hybridrl.recipes.{name}:{name}"})
    check_sampling_replay(make_config(), graph)
    check_sampling_replay(make_config(*TOP, "rollout.sampling_replay=off"), graph)
    with pytest.raises(ConfigError) as error:
        check_sampling_replay(make_config(*TOP), graph)
    assert str(error.value).startswith(
        "rollout.sampling_replay=auto: wanted off with rollout.top_k=5 and the loss of stage"
    )
